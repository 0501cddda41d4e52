"""The folder of pipeline files: each file's pipeline or error, read by both DAGs and pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.errors import ConfigError


def read_pipeline_files(folder: Path) -> Iterator[tuple[Path, PipelineFile | Exception]]:
    """Yields every file (``*.yml``, ``*.yaml``) of a folder by name, with its pipeline or error.

    Of several files that exclude each other, the first is valid.
    """
    taken: dict[str, Path] = {}
    for path in sorted([*folder.glob("*.yml"), *folder.glob("*.yaml")]):
        try:
            pipeline = load_pipeline_file(path)
            _refuse_doubles(path, pipeline, taken)
            yield path, pipeline
        except Exception as err:  # A rejected file doesn't affect the others.
            yield path, err


def _refuse_doubles(path: Path, pipeline: PipelineFile, taken: dict[str, Path]) -> None:
    """Raise ConfigError for a file that excludes an earlier one.

    Two pipelines with one name would share DAGs. With one slot, each would lose what the other
    consumed. With one lake, each would apply the other's changes too.
    """
    slot = f"slot {pipeline.source.slot!r} of connection {pipeline.source.conn_id!r}"
    alone = (
        (f"pipeline {pipeline.pipeline!r}", "rename one"),
        (slot, "give each its own slot"),
        (f"target.root {pipeline.target.root!r}", "give each a root of its own"),
    )
    for what, remedy in alone:
        if what in taken:
            raise ConfigError(
                f"pipeline file {path} is refused: {what} is also in {taken[what]}: {remedy}"
            )
        taken[what] = path

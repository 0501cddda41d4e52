"""The folder of pipeline files: each file's pipeline or error, for DAGs, pages and ``list``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from waldelta.config.pipeline_file import PipelineFile, load_pipeline_file
from waldelta.errors import ConfigError

PIPELINES_VARIABLE = "WALDELTA_PIPELINES"
_CHECKOUT = Path(__file__).resolve().parents[3]


def pipelines_folder() -> Path:
    """Returns the absolute folder of pipeline files: WALDELTA_PIPELINES, or include/pipelines of
    this repository.
    """
    variable = os.environ.get(PIPELINES_VARIABLE)
    # A task runs in another folder than the process that reads the variable.
    return Path(variable or _CHECKOUT / "include" / "pipelines").absolute()


def existing_folder(folder: Path | None = None) -> Path:
    """Returns this folder, or pipelines_folder(); raises ConfigError when it doesn't exist."""
    folder = folder or pipelines_folder()
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder} of pipeline files: set {PIPELINES_VARIABLE} to yours"
        )
    return folder


def refusal(error: Exception) -> str:
    """Returns why a pipeline file is refused; with the class for an error that isn't named."""
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def load_unchanged(path: Path) -> PipelineFile:
    """Returns a pipeline file as load_pipeline_file() does, which reads it when it has changed."""
    try:
        status = path.stat()
    except OSError:
        return load_pipeline_file(path)
    return _load(path, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(maxsize=2_000)
def _load(path: Path, _: tuple[int, ...]) -> PipelineFile:
    return load_pipeline_file(path)


def pipeline_paths(folder: Path) -> list[Path]:
    """Returns the pipeline files (``*.yml``, ``*.yaml``) of a folder by name."""
    return sorted([*folder.glob("*.yml"), *folder.glob("*.yaml")])


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """The pipelines of a folder, and its refused files with their errors, each by its path."""

    pipelines: dict[Path, PipelineFile] = field(default_factory=dict)
    refused: dict[Path, Exception] = field(default_factory=dict)

    @classmethod
    def read(
        cls, folder: Path, load: Callable[[Path], PipelineFile] = load_pipeline_file
    ) -> PipelineFolder:
        """Returns every pipeline file of a folder by name.

        Of several files that exclude each other, the first is valid.
        """
        read, owners = cls(), dict[str, Path]()
        for path in pipeline_paths(folder):
            try:
                pipeline = load(path)
                _refuse_doubles(path, pipeline, owners)
                read.pipelines[path] = pipeline
            except Exception as err:  # A rejected file doesn't affect the others.
                read.refused[path] = err
        return read

    def refusals(self) -> list[dict[str, str]]:
        """Returns the refused files as JSON has them."""
        return [
            {"file": str(path), "error": refusal(error)} for path, error in self.refused.items()
        ]


def _refuse_doubles(path: Path, pipeline: PipelineFile, owners: dict[str, Path]) -> None:
    """Raise ConfigError for a file that excludes an earlier one.

    Two pipelines with one name would share DAGs. With one slot, each would lose what the other
    consumed. With one lake, each would apply the other's changes too.
    """
    slot = f"slot {pipeline.source.slot!r} of connection {pipeline.source.conn_id!r}"
    for what, remedy in (
        (f"pipeline {pipeline.pipeline!r}", "rename one"),
        (slot, "give each its own slot"),
        (f"target.root {pipeline.target.root!r}", "give each a root of its own"),
    ):
        if what in owners:
            raise ConfigError(
                f"pipeline file {path} is refused: {what} is also in {owners[what]}: {remedy}"
            )
        owners[what] = path

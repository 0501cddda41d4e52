"""Problems with own expectations, as far as their files show them; part of preflight.

A gate that can't be read or evaluated blocks its table's changes, so it is reported before there
are any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.config.expectation_files import read_own_suites
from waldelta.findings import Finding, problem, warning
from waldelta.target_modes import Feature


def judge_suites(pipeline: PipelineFile, targets: Iterable[str]) -> Iterator[Finding]:
    """Yields findings about rejected files, files without a target, and gates on unsuitable
    targets.
    """
    folder = pipeline.quality.suites
    own = read_own_suites(Path(folder) if folder else None, targets, "of this pipeline")
    for name, err in sorted(own.refused.items()):
        yield problem(f"expectations of {name}: {err}")
    for name, file in sorted(own.by_table.items()):
        mode = pipeline.target.mode_of(name)
        for number, item in enumerate(file.suite.expectations):
            if item.gate != "warn" and not mode.supports(Feature.GATES):
                yield problem(
                    f"{file.place(number)}: gate: {item.gate} needs a target of mode mirror, and"
                    f" this one has mode {mode}: make it warn"
                )
    for told in own.unused:
        yield warning(f"unused expectations: {told}")

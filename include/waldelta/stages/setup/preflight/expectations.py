"""Problems with own expectations: rejected files, and expectations that can't be evaluated on their
target; part of preflight.

Such an expectation fails every check of its table, and with a gate it stops the table's changes, so
it is reported before there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.config.expectation_files import OwnSuiteFile, TargetColumns, read_own_suites
from waldelta.findings import Finding, problem, warning
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import METADATA_TYPES, RELID
from waldelta.pipeline.targets.target_filter import column_states
from waldelta.stages.setup.preflight.targets import PlannedTargets
from waldelta.target_modes import Feature

# Yields what is wrong with a target's own expectations, by the columns that it has or will have.
JudgeSuite = Callable[[str, OwnSuiteFile, TargetColumns], Iterable[Finding]]


def read_only(_: str, __: OwnSuiteFile, ___: TargetColumns) -> Iterable[Finding]:
    """Yields nothing: only the files themselves are judged."""
    return ()


def judge_suites(
    pipeline: PipelineFile,
    planned: PlannedTargets,
    states: Mapping[str, TableState],
    judge: JudgeSuite = read_only,
) -> Iterator[Finding]:
    """Yields findings about rejected files, files without a target, and expectations that a target
    can't be judged by.
    """
    folder = pipeline.quality.suites
    own = read_own_suites(Path(folder) if folder else None, planned.sources, "of this pipeline")
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
        yield from judge(name, file, _columns(pipeline, name, planned, states.get(name)))
    for told in own.unused:
        yield warning(f"unused expectations: {told}")


def _columns(
    pipeline: PipelineFile, name: str, planned: PlannedTargets, state: TableState | None
) -> TargetColumns:
    """Returns the columns that a target will have, by the columns that its source publishes."""
    types = {} if state is None else {c.name: c.spark_type for c in state.columns}
    unpublished: set[str] = set()
    has_key = state is not None and bool(state.key_columns)
    for part in planned.relations_of(name):
        columns = [c for c in part.relation.columns if c.name in part.columns]
        states = column_states(columns, sorted(part.key), pipeline.target.types_of(name))
        types |= {c.name: c.spark_type for c in states}
        unpublished |= {c.name for c in part.relation.columns} - part.columns
        has_key = has_key or bool(part.key)
    if pipeline.target.metadata_columns:
        types |= METADATA_TYPES
    if planned.sources[name].root_id is not None:
        types[RELID] = "bigint"
    return TargetColumns(types, has_key, frozenset(unpublished - types.keys()))

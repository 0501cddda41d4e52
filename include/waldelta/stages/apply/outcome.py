"""Applied: what an apply did, by target. A failure in one target doesn't affect the others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from waldelta.errors import ConsentNeeded, NeedsSync, SchemaChanged, WaldeltaError
from waldelta.lake.ledger import BatchCut, Decision, Decisions, TableState, TargetCut
from waldelta.lake.storage import BOOKKEEPING
from waldelta.pipeline import Job, RunResult, of_table, unexpected_error
from waldelta.pipeline.drift import Repair, may_resync, record_questions
from waldelta.pipeline.targets import TargetSource
from waldelta.pipeline.targets.lifecycle import NOT_PUBLISHED
from waldelta.postgres.publication_checks import Unpublished
from waldelta.quantities import counted
from waldelta.stages.sync.skipped_copy import stopped

log = logging.getLogger(__name__)


@dataclass
class Applied:
    """An apply's results: cuts by apply batch, tables that failed, tables to copy again, and
    warnings.

    ``reported_late`` is in a published cut but in no run result: an earlier run was killed in
    between, or this one applied it while more was landing. ``drifted`` has what a repair of
    ``outdated`` tables without a copy needs. ``published`` has the source mappings during the
    apply. ``removed`` left the publications since then; the pipeline file lists ``unpublished``
    without effect; ``foreign`` have external commits. ``reached`` is the batch that each copy, by
    name and generation, was brought up to: a copy without changes has no commit.
    """

    steps: list[BatchCut] = field(default_factory=list)
    reported_late: list[TargetCut] = field(default_factory=list)
    failures: dict[str, WaldeltaError] = field(default_factory=dict)
    outdated: dict[str, str] = field(default_factory=dict)
    drifted: dict[str, Repair] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    published: dict[str, TargetSource] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    unpublished: Unpublished = field(default_factory=Unpublished)
    foreign: list[str] = field(default_factory=list)
    reached: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Returns whether every target got all changes."""
        return not self.failures and not self.outdated

    def is_fine(self, table_name: str) -> bool:
        """Returns whether a target hasn't failed and needn't be copied again."""
        return table_name not in self.failures and table_name not in self.outdated


def add_to_result(job: Job, result: RunResult, applied: Applied) -> None:
    """Add the apply's results and warnings to the run's result."""
    add_external_commits(result, applied)
    for target in applied.reported_late:
        result.add_target(target)
    for cut in applied.steps:
        result.add_cut(cut)
    result.targets.is_apply_reported = True
    causes = _causes(job, [name for name, table in result.tables.items() if table.quarantined])
    for name, table in sorted(result.tables.items()):
        if table.quarantined:
            one = table.quarantined == 1
            result.warnings.append(
                f"{name}: {counted(table.quarantined, 'row')}"
                f" {why_quarantined(causes.get(name, frozenset()), one=one)}; stored in"
                f" {BOOKKEEPING}/{Decision.table}, not in the target: `waldelta decide"
                f" FILE list` shows {'it' if one else 'them'}"
            )
        if table.raw_rows and not job.pipeline.target.metadata_columns:
            result.warnings.append(
                f"{name}: {counted(table.raw_rows, 'row has', 'rows have')} values that their types"
                " can't hold; metadata_columns is off, so these are null: name such columns under"
                " types.text"
            )
    result.warnings += [
        f"{name} {NOT_PUBLISHED}"
        for name in applied.removed
        if name not in applied.unpublished.tables
    ]
    result.targets.unpublished = list(applied.unpublished.tables)
    result.warnings += applied.unpublished.warnings()


def _causes(job: Job, tables: Collection[str]) -> dict[str, frozenset[bool]]:
    """Returns by table whether rows that this run quarantined fail a gate: yes, no, or both."""
    return Decisions(job.lake).causes(job.run_id, tables) if tables else {}


def why_quarantined(causes: frozenset[bool], *, one: bool) -> str:
    """Returns why a run quarantined rows, by whether some fail a gate.

    >>> why_quarantined(frozenset([True]), one=True)
    'fails an expectation with gate: quarantine'
    """
    parts = {
        False: "came without values that the source no longer has",
        True: f"{'fails' if one else 'fail'} an expectation with gate: quarantine",
    }
    return ", or ".join(text for gate, text in parts.items() if gate in (causes or parts))


def add_external_commits(result: RunResult, applied: Applied) -> None:
    """Add the external commits that were found, each once."""
    result.warn(applied.warnings)
    result.targets.external_commits = sorted({*applied.foreign, *result.targets.external_commits})


@contextmanager
def isolated(job: Job, state: TableState, applied: Applied) -> Iterator[None]:
    """Turn an error into a failure of one table, so that the others continue."""
    try:
        yield
    except Exception as err:
        # A defect of waldelta or a library must not stop the other tables either.
        if not isinstance(err, WaldeltaError):
            log.exception("table=%s", state.table_name)
        _give_up(job, state, unexpected_error(state.table_name, err), applied)


def _give_up(job: Job, state: TableState, err: WaldeltaError, applied: Applied) -> None:
    if isinstance(err, NeedsSync) and may_resync(job, state):
        log.warning("table=%s needs a new copy: %s", state.table_name, err)
        applied.outdated[state.table_name] = str(err)
    else:
        if isinstance(err, NeedsSync) and not job.pipeline.target.copies(state.table_name):
            err = SchemaChanged(stopped(state.table_name, str(err)))
        elif isinstance(err, NeedsSync) and job.pipeline.target.recopies(state.table_name):
            err = SchemaChanged(
                f"{err}: a new copy drops columns that an operator decided to keep, so its changes"
                f" wait: sync it when it may (initial sync with tables={state.table_name})"
            )
        if isinstance(err, ConsentNeeded):
            record_questions(job, state, err.questions)
        log.error("table=%s not applied: %s", state.table_name, err)
        applied.failures[state.table_name] = of_table(err, state.table_name)

"""Applied: what an apply did, by target. A failure in one target doesn't affect the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
from waldelta.stages.sync.skipped_copy import no_changes_reason

log = logging.getLogger(__name__)


@dataclass
class Applied:
    """The results of an apply, by target.

    - ``steps``: the consistent cuts that were published, one for each apply batch.
    - ``reported_late``: commits of published cuts that no run result contains yet, because an
      earlier run was killed, or because this run applied them while it was landing.
    - ``failures``: the errors of targets that failed.
    - ``outdated``: why a table needs a new copy or a repair; ``drifted`` has the repairs.
    - ``published``: the source mappings during the apply.
    - ``removed``: tables that have left the publications since their copy.
    - ``unpublished``: tables that the pipeline file lists without effect.
    - ``foreign``: targets with external commits.
    - ``reached``: the last batch that was applied to each copy, by table name and copy generation.
      A copy without changes has no commit.
    """

    job: Job
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
        """Returns whether a target hasn't failed and needs no new copy or repair."""
        return table_name not in self.failures and table_name not in self.outdated

    def add_to(self, result: RunResult) -> None:
        """Add the results and warnings to the run's result."""
        self.add_external_commits(result)
        for target in self.reported_late:
            result.add_target(target)
        for cut in self.steps:
            result.add_cut(cut)
        result.targets.is_apply_reported = True
        quarantined = [name for name, table in result.tables.items() if table.quarantined]
        decisions = Decisions(self.job.lake)
        causes = decisions.causes(self.job.run_id, quarantined) if quarantined else {}
        for name, table in sorted(result.tables.items()):
            if table.quarantined:
                one = table.quarantined == 1
                result.warnings.append(
                    f"{name}: {counted(table.quarantined, 'row')}"
                    f" {why_quarantined(causes.get(name, frozenset()), one=one)}; stored in"
                    f" {BOOKKEEPING}/{Decision.table}, not in the target: `waldelta decide"
                    f" FILE list` shows {'it' if one else 'them'}"
                )
            if table.raw_rows and not self.job.pipeline.target.metadata_columns:
                result.warnings.append(
                    f"{name}: {counted(table.raw_rows, 'row has', 'rows have')} values that their"
                    " types can't hold; metadata_columns is off, so these are null: name such"
                    " columns under types.text"
                )
        result.warnings += [
            f"{name} {NOT_PUBLISHED}"
            for name in self.removed
            if name not in self.unpublished.tables
        ]
        result.targets.unpublished = list(self.unpublished.tables)
        result.warnings += self.unpublished.warnings()

    def add_external_commits(self, result: RunResult) -> None:
        """Add the external commits that were found, each once."""
        result.warn(self.warnings)
        result.targets.external_commits = sorted({*self.foreign, *result.targets.external_commits})

    @contextmanager
    def isolated(self, state: TableState) -> Iterator[None]:
        """Turn an error into a failure of one table, so that the others continue."""
        try:
            yield
        except Exception as err:
            # A defect of waldelta or a library must not stop the other tables either.
            if not isinstance(err, WaldeltaError):
                log.exception("table=%s apply failed", state.table_name)
            self._give_up(state, unexpected_error(state.table_name, err))

    def _give_up(self, state: TableState, err: WaldeltaError) -> None:
        name, target = state.table_name, self.job.pipeline.target
        if isinstance(err, NeedsSync) and may_resync(self.job, state):
            log.warning("table=%s needs a new copy: %s", name, err)
            self.outdated[name] = str(err)
        else:
            if isinstance(err, NeedsSync) and not target.copies(name):
                err = SchemaChanged(no_changes_reason(name, str(err)))
            elif isinstance(err, NeedsSync) and target.recopies(name):
                err = SchemaChanged(
                    f"{err}: a new copy drops columns that an operator decided to keep, so its"
                    f" changes wait: sync it when it may (initial sync with tables={name})"
                )
            if isinstance(err, ConsentNeeded):
                record_questions(self.job, state, err.questions)
            log.error("table=%s not applied: %s", name, err)
            self.failures[name] = of_table(err, name)


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

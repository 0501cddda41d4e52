"""Job reconcile: compares targets with their source, and corrects the rows that differ if
requested.

::

    reconcile  what the snapshot sees -> change log                    (stages.land)
               checksums of both sides -> rows that differ             (stages.repair.reconcile)
               rows that differ -> read again from the source          (stages.repair)
    report     what was found -> ledger, reports, summary

Nothing is written on the source. What its snapshot sees is landed first, as in any run; writers
continue.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from waldelta.errors import (
    ConfigError,
    NeedsSync,
    StateError,
    TableBusy,
    TargetDiffers,
    TargetNotWritable,
    WaldeltaError,
)
from waldelta.jobs._stages import Stage, all_failures, report_stage, resume_result, run_stages
from waldelta.lake.ledger import DIFFERENT, EQUAL, REPAIRED, Reconciliation, TableState, now
from waldelta.lake.ledger.check_records import (
    COMPARISON_FAILED,
    NOT_COMPARED,
    Reconciliations,
    kept_out,
)
from waldelta.pipeline import Job, RunResult, StageResult, TableResult, of_table, unexpected_error
from waldelta.pipeline.drift import why_other_rows
from waldelta.pipeline.run_result import CheckFindings
from waldelta.pipeline.targets import (
    RequiredAction,
    TableLifecycle,
    Watermarks,
    check_columns,
    read_unlocked_sources,
    unknown_tables,
)
from waldelta.pipeline.targets.external_commits import check_readable, repaired_commits
from waldelta.pipeline.targets.quarantined_rows import current_user, record_current
from waldelta.pipeline.targets.unreadable_messages import close_compared
from waldelta.postgres import is_standby, named_loss
from waldelta.quantities import counted
from waldelta.slot.standby import check_source
from waldelta.snapshot.exported_snapshot import SnapshotHolder, not_primary
from waldelta.spark import Runner
from waldelta.spark.session import session_settings
from waldelta.stages.land.drain import land_backlog, land_through
from waldelta.stages.repair.mend.current_targets import CurrentTargets
from waldelta.stages.repair.mend.unfinished_repairs import end_killed_repairs
from waldelta.stages.repair.reconcile.compare_table import (
    ComparedTarget,
    Found,
    compare,
    needs_spark,
    why_not_compared,
)
from waldelta.stages.repair.repair import Again, repair


def run_reconcile(
    runner: Runner, job: Job, stages: Collection[str] | None = None, **fields: Any
) -> RunResult:
    """Compare targets with the source; with ``repair`` rows that differ are read again and
    corrected.

    ``fields`` are those of a ReconcileRequest. The results are in ``_waldelta/reconciliations``.
    Raises RunFailed when a target differs and isn't repaired.
    """
    order = ReconcileRequest(**fields)
    order = replace(order, by=order.by or current_user())

    def reconcile_stage(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        began, work = now(), ReconciliationProgress(runner, job, order, result)
        try:
            compare_all(work)
        finally:
            rows = [work.results[name] for name in sorted(work.results)]
            result.targets.keep_errors(work.failures)
            # Other runs may have compared or repaired some of many tables since this one began.
            Reconciliations(job.lake).add(rows, began)
            are_equal = [
                row.table_name
                for row in rows
                if row.status in (EQUAL, REPAIRED) and not row.skipped_columns
            ]
            close_compared(job, are_equal, began)
            add_to_result(result, stage, rows)
            repaired = {row.table_name for row in rows if row.status == REPAIRED}
            passed = sorted(repaired.union(result.checked.passed))
            result.checked = CheckFindings(write_report(job, rows), passed=passed)
        if work.failures:
            raise all_failures(work.failures)
        if different := [row for row in rows if row.status == DIFFERENT]:
            raise TargetDiffers(describe_different(different, repair=order.repair))

    job_stages: dict[str, Stage] = {"reconcile": reconcile_stage, "report": report_stage}
    result = resume_result(job, "reconcile", fresh=stages is None or "reconcile" in stages)
    return run_stages(runner, job, result, job_stages, stages)


log = logging.getLogger(__name__)

# Small tables share a snapshot; a large one has its own, which ends with it.
BYTES_PER_SNAPSHOT = 512 << 20
COMPARED_AT_ONCE = 3
# These batches fit into the processor's cache: Spark's time for lists grows with the square of a
# batch's rows.
_SMALL_BATCHES = {"spark.sql.execution.arrow.maxRecordsPerBatch": "8192"}


@dataclass(frozen=True, slots=True)
class ReconcileRequest:
    """A request to compare these tables, None for all, and with ``repair`` to correct them.

    ``by`` is the operator, None for the user of this process; ``reason`` goes into the ledger with
    repairs.
    """

    tables: Collection[str] | None = None
    repair: bool = False
    by: str | None = None
    reason: str | None = None


@dataclass
class ReconciliationProgress:
    """What a reconciliation has found so far: results by table, and the tables that failed."""

    runner: Runner
    job: Job
    order: ReconcileRequest
    result: RunResult
    results: dict[str, Reconciliation] = field(default_factory=dict)
    failures: dict[str, WaldeltaError] = field(default_factory=dict)

    def put(self, table_name: str, status: str, reason: str) -> None:
        """Record why a table has no result."""
        self.results[table_name] = Reconciliation(
            now(), self.job.run_id, table_name, status, reason, by=self.order.by
        )
        log.warning("table=%s %s: %s", table_name, status, reason)

    def fail(self, table_name: str, err: Exception) -> None:
        """Record a failure, which doesn't stop the other tables."""
        error = unexpected_error(table_name, err)
        self.failures[table_name] = of_table(error, table_name)
        self.put(table_name, COMPARISON_FAILED, f"{type(error).__name__}: {error}")


def compare_all(work: ReconciliationProgress) -> None:
    """Compare the requested targets, and repair those that differ if requested.

    Results and failures are stored in ``work``.
    """
    job = work.job
    with job.source.connect("reconcile") as connection:
        if is_standby(connection):
            raise not_primary(job.source.conninfo, "compare with")
        check_source(connection, job)
        mappings, targets, _ = read_unlocked_sources(connection, job.pipeline)
        sizes = {str(target.id): target.table.size_bytes for target in targets}
    all_lifecycles, ended = end_killed_repairs(work.runner, job, mappings)
    for cut in ended.values():
        work.result.add_repair(cut)
    lifecycles = list(_lifecycles(all_lifecycles, work.order))
    for name in sorted(
        set(work.order.tables or ()) - {lifecycle.table_name for lifecycle in all_lifecycles}
    ):
        work.put(name, NOT_COMPARED, "it is no longer replicated: status lists the tables")
    states: dict[str, TableState] = {}
    for lifecycle in lifecycles:
        if lifecycle.action != RequiredAction.APPLY or lifecycle.state is None:
            work.put(lifecycle.table_name, NOT_COMPARED, lifecycle.why or "it gets no changes")
        elif why := why_other_rows(lifecycle.state):
            work.put(lifecycle.table_name, NOT_COMPARED, why)
        else:
            states[lifecycle.table_name] = lifecycle.state
    keys: dict[str, tuple[ComparedTarget, Found]] = {}
    for names in in_groups({name: sizes.get(name, 0) for name in states}):
        keys |= _compare_group(work, [states[name] for name in names])
    if work.order.repair:
        for name, (feeding, compared) in sorted(keys.items()):
            _repair(work, name, feeding, compared)


def _lifecycles(
    all_lifecycles: Sequence[TableLifecycle], order: ReconcileRequest
) -> Iterator[TableLifecycle]:
    by_name = {lifecycle.table_name: lifecycle for lifecycle in all_lifecycles}
    names = set(order.tables or ())
    unknown = sorted(names - by_name.keys())
    if unknown and len(unknown) == len(names):
        raise unknown_tables(unknown, by_name)
    for name, lifecycle in sorted(by_name.items()):
        # Tables that are not published any more, or were never copied, are compared only if
        # requested by name.
        if (
            name in order.tables
            if order.tables is not None
            else lifecycle.action not in (RequiredAction.REMOVED, RequiredAction.FIRST)
        ):
            yield lifecycle


def in_groups(sizes: dict[str, int]) -> list[list[str]]:
    """Returns which tables share a snapshot, the largest first.

    >>> in_groups({"a": 1 << 40, "b": 1, "c": 2}), in_groups({"empty": 0})
    ([['a'], ['c', 'b']], [['empty']])
    """
    groups: list[list[str]] = []
    free_bytes = 0
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if not groups or sizes[name] > free_bytes:
            groups.append([])
            free_bytes = max(BYTES_PER_SNAPSHOT, sizes[name])
        groups[-1].append(name)
        free_bytes -= sizes[name]
    return groups


def _compare_group(
    work: ReconciliationProgress, states: Sequence[TableState]
) -> dict[str, tuple[ComparedTarget, Found]]:
    """Compare some tables in one snapshot; returns those that differ."""
    runner, job = work.runner, work.job
    try:
        work.result.add_drained(land_backlog(runner, job))
        # The batches are read before the snapshot: what a target gets during the comparison comes
        # after the batch it is compared at.
        marks = Watermarks(job, job.read_identity())
        batches = _batches(work, states, marks)
        states = _select_readable(
            work, [s for s in states if s.table_name in batches], marks.versions
        )
        by_spark = any(needs_spark(job, state.table_name) for state in states)
        with (
            session_settings(runner.spark(), _SMALL_BATCHES) if by_spark else nullcontext(),
            named_loss(job.source.conninfo),
            SnapshotHolder(
                job.source.conninfo, f"waldelta reconcile {job.pipeline.source.slot}"
            ) as holder,
        ):
            feedings = _feedings(work, holder, states, batches, marks.versions)
            if feedings:
                work.result.add_drained(land_through(runner, job, holder.lsn))
            with ThreadPoolExecutor(COMPARED_AT_ONCE, thread_name_prefix="reconcile") as pool:
                comparisons = pool.map(
                    lambda feeding: _compare_one(work, holder, feeding), feedings
                )
                return {
                    comparison.row.table_name: (feeding, comparison)
                    for feeding, comparison in comparisons
                    if comparison is not None and comparison.row.differing_buckets
                }
    except Exception as err:
        for state in states:
            if state.table_name not in work.results:
                work.fail(state.table_name, err)
        return {}


def _batches(
    work: ReconciliationProgress, states: Sequence[TableState], marks: Watermarks
) -> dict[str, int]:
    """Returns the last batch that each target has; those that can't be opened are failures."""
    batches: dict[str, int] = {}
    for state in states:
        try:
            batches[state.table_name] = marks.of(state)
        except WaldeltaError as err:
            work.fail(state.table_name, err)
    return batches


def _select_readable(
    work: ReconciliationProgress, states: Sequence[TableState], versions: dict[str, int]
) -> list[TableState]:
    """Returns the targets that can be read safely at these versions, and records the failures of
    the others.
    """
    job, cut, readable_states = work.job, work.job.ledger.last_cut(), []
    for state in states:
        name = state.table_name
        try:
            check_readable(job.lake.target(name).log, state, cut, versions[name])
            check_columns(job, state)
            readable_states.append(state)
        except NeedsSync as err:
            work.put(name, NOT_COMPARED, str(err))
        except StateError as err:
            work.fail(name, err)
    return readable_states


def _feedings(
    work: ReconciliationProgress,
    holder: SnapshotHolder,
    states: Sequence[TableState],
    batches: dict[str, int],
    versions: dict[str, int],
) -> list[ComparedTarget]:
    """Returns the tables that can be compared, with their sources as of the snapshot.

    Records the reason for each of the others; a filter that can't be read is a failure.
    """
    job, feedings = work.job, []
    # The snapshot delays vacuum during the comparison, so that this waits for no lock.
    current = CurrentTargets.as_of(holder.connection, job, states)
    for name in current.states:
        try:
            source = current.as_copied(job, name, waits=False)
            feeding = ComparedTarget(source, batches[name], versions[name])
            why = why_not_compared(job, feeding)
        except (NeedsSync, TableBusy) as err:
            why = str(err)
        except ConfigError as err:
            work.fail(name, err)
            continue
        if why is not None:
            work.put(name, NOT_COMPARED, why)
        else:
            feedings.append(feeding)
    return feedings


def _compare_one(
    work: ReconciliationProgress, holder: SnapshotHolder, feeding: ComparedTarget
) -> tuple[ComparedTarget, Found | None]:
    name = feeding.state.table_name
    try:
        comparison = compare(work.runner, work.job, holder, feeding)
    except NeedsSync as err:
        work.put(name, NOT_COMPARED, str(err))
        return feeding, None
    except Exception as err:
        # An error of one table's comparison, Spark's errors included, must not end the others.
        log.exception("table=%s", name)
        work.fail(name, err)
        return feeding, None
    work.results[name] = replace(comparison.row, by=work.order.by)
    return feeding, comparison


def _repair(
    work: ReconciliationProgress, name: str, feeding: ComparedTarget, comparison: Found
) -> None:
    """Read the rows that differ again, as of a snapshot from which the stream continues."""
    row, job, order = work.results[name], work.job, work.order
    reason = f"reconcile --repair by {order.by}: {counted(row.differing, 'row')} differed" + (
        f": {order.reason}" if order.reason else ""
    )
    # Keys in flight and left-out columns weren't compared, so external commits to them must still
    # be reported.
    compared = None if row.in_flight or row.skipped_columns else feeding.version
    try:
        _check_repairable(comparison)
        warnings = [] if compared is None else repaired_commits(job, feeding.state, compared)
        again = Again(reason, order.by, comparison.keys, compared)
        result = repair(work.runner, job, feeding.as_copied, again)
    except NeedsSync as err:
        remedy = f"sync --tables {name} copies it again"
        work.results[name] = replace(row, reason=f"not repaired: {err}: {remedy}")
        return
    except Exception as err:
        if not isinstance(err, WaldeltaError):
            log.exception("table=%s", name)
        work.fail(name, err)
        work.results[name] = replace(row, reason=f"not repaired: {err}")
        return
    cut = result.cut
    result.add_to(work.result)
    work.result.warnings += warnings
    work.results[name] = replace(
        row,
        status=REPAIRED,
        repaired=cut.written,
        reason=f"the target's version {cut.version} has the repaired rows",
    )
    record_current(job, [name])  # The repair also wrote quarantined rows.


def _check_repairable(comparison: Found) -> None:
    """Raise NeedsSync when rows can't be repaired by their keys."""
    if not comparison.row.is_complete:
        raise NeedsSync(
            f"{comparison.row.differing_buckets:,} of {comparison.row.buckets:,} groups of rows"
            " differ, too many to compare each row"
        )
    if comparison.row.doubled:
        raise NeedsSync("its target has rows with the same key")
    if not comparison.keys:
        raise NeedsSync("no row that differs was found")


def write_report(job: Job, rows: Sequence[Reconciliation]) -> str | None:
    """Write a page for each result; returns their index, or their folder in a store.

    Returns None where there is no result, or the pages can't be written.
    """
    from waldelta.stages.check.reports.data_docs import list_reconciliation

    try:
        index = list_reconciliation(job.pipeline, job.lake, rows) if rows else None
    except (OSError, TargetNotWritable) as err:
        log.warning("no page was written: %s", err)
        return None
    return None if index is None else str(index)


def add_to_result(result: RunResult, stage: StageResult, results: Sequence[Reconciliation]) -> None:
    """Add the results, by table and in one line, to the run's result."""
    for row in results:
        if row.has_answer:
            result.tables[row.table_name] = replace(
                result.tables.get(row.table_name, TableResult(version=row.version)),
                compared=row.source_rows,
                differing=row.differing,
                in_flight=row.in_flight,
                lacking=row.lacking,
            )
        if row.status == NOT_COMPARED:
            result.warnings.append(f"{row.table_name} wasn't compared: {row.reason}")
        elif row.status == DIFFERENT and row.reason:
            result.warnings.append(f"{row.table_name}: {row.reason}")
        if row.skipped_columns:
            result.warnings.append(
                f"{row.table_name}: columns not compared: {', '.join(row.skipped_columns)}"
            )
        if row.lacking:
            result.warnings.append(f"{row.table_name}: {kept_out(row.lacking)}")
    compared = [row for row in results if row.has_answer]
    rows, differing = (
        sum(n) for n in (((r.source_rows or 0) for r in compared), (r.differing for r in compared))
    )
    stage.detail = (
        f"{len(compared)} of {counted(len(results), 'table')} compared, {counted(rows, 'row')},"
        f" {differing:,} with differences, {sum(row.in_flight for row in compared):,} skipped"
        f" (changing), {sum(row.repaired for row in compared):,} repaired"
    )


def describe_different(different: Sequence[Reconciliation], *, repair: bool) -> str:
    """Returns the targets that differ, a line each, for the error that ends the run."""
    lines = "".join(
        f"\n  - {row.table_name}: {'' if row.is_complete else 'at least '}{row.missing:,} missing,"
        f" {row.extra:,} extra, {row.different:,} different, {row.doubled:,} with duplicate keys"
        for row in different
    )
    remedy = (
        ""
        if repair
        else (
            "; reconcile --repair (in Airflow: the param repair) reads these rows from the source"
            " again"
        )
    )
    failed = counted(len(different), "target doesn't", "targets don't")
    return (
        f"{failed} match the source; the report and _waldelta/reconciliations show the"
        f" rows{remedy}:{lines}"
    )

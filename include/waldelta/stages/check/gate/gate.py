"""Gate: expectations marked ``stop`` or ``quarantine`` judge a table's net changes before the
merge.

The gate judges the rows that the merge would write, as the target would store them; deletes always
pass. A value that a change didn't send (an unchanged TOASTed value) isn't judged again.
``quarantine`` rows are set aside first (set_aside). ``stop`` then judges the rest without released
changes (quarantined_rows). No verdict is carried from one attempt to the next: each attempt judges
the range by the current expectation files, and reports what its own commit left out.

The target then agrees with what is certain about the source. Of rows that are set aside, a new one
isn't written, and a row with its key is deleted, because the source replaced it. An update isn't
applied, and the target keeps the earlier row (it is *outdated*). If the update moved the key, the
old row is deleted, because the source no longer has it.

Rows that are read again (a retry, a reconciliation's repair) are judged with the source's current
values: judge_complete_rows() returns which quarantined rows stay there. They bring along what is
waiting for their table: all of it passes, or nothing is changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import starmap

import numpy as np
import pyarrow as pa

from waldelta.arrow import Ints, one_array
from waldelta.changes.decode.collapse import (
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
    QUARANTINED_ROWS,
    RAW_ROWS,
)
from waldelta.changes.decode.net_rows import (
    WRITTEN,
    arrived_values,
    as_net,
    find_key_moves,
    keys_of,
    purges,
    unsent,
    values_as_json,
)
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.stage.net_files import NetFiles
from waldelta.changes.stage.stage import Staged
from waldelta.errors import ConfigError, QualityFailed
from waldelta.lake import write_parquet
from waldelta.lake.ledger import WAITING, Decision, now
from waldelta.lake.ledger.decisions import FAILS
from waldelta.pipeline import Job
from waldelta.pipeline.targets.quarantined_rows import landed_upto
from waldelta.quantities import counted
from waldelta.snapshot.read_table import TableCopy
from waldelta.spark import Runner
from waldelta.spark_sql import string
from waldelta.stages.check.gate.gate_files import TableGate
from waldelta.stages.check.gate.table_gate import (
    EXAMPLE_ROWS,
    MOST_SET_ASIDE,
    JudgedColumns,
    StagedRows,
    Verdict,
    gate_error,
    list_verdicts,
    read_verdicts,
    record,
)
from waldelta.target_modes.target_mode import Feature


@dataclass(frozen=True, slots=True)
class JudgedChanges:
    """The changes to merge after the gate, and the rows that were set aside, for the quarantine."""

    staged: Staged
    aside: Sequence[Decision] = ()


log = logging.getLogger(__name__)


@contextmanager
def _verdicts(
    job: Job, gate: TableGate, columns: JudgedColumns, what: str
) -> Iterator[tuple[list[Verdict], list[Verdict]]]:
    """Yields the verdicts to reach, as read_verdicts() returns them, and records them then."""
    if gate.problem is not None:
        raise ConfigError(f"{gate.table}: {what}, since its gate can't be read: {gate.problem}")
    asides, stops = read_verdicts(gate, columns, job.pipeline.folder)
    try:
        yield asides, stops
    finally:
        record(job, gate, [*asides, *stops])


def judge(
    runner: Runner, job: Job, plan: TargetPlan, gate: TableGate, staged: Staged
) -> JudgedChanges:
    """Returns the staged changes that may be merged.

    Raises QualityFailed when none may, and ConfigError for a gate that can't be evaluated.
    """
    if gate.problem is None and not plan.state.target_mode.supports(Feature.GATES):
        raise ConfigError(
            f"{gate.table}: its changes wait, since it has expectations with a gate, which only a"
            " target of mode mirror supports: set gate: warn"
        )
    columns = JudgedColumns.of(plan, has_metadata=job.pipeline.target.metadata_columns)
    with _verdicts(job, gate, columns, "its changes wait") as (asides, stops):
        if not any(staged.counts.get(action) for action in WRITTEN):
            return JudgedChanges(staged)
        staged = staged.on_disk()
        is_written = f"action in ({', '.join(map(string, WRITTEN))})"
        files = NetFiles.of(staged.folder, job.lake)
        rows = StagedRows(runner, files, columns, gate.table, is_written)
        rows.judge(asides)
        if (count := len(_any_of(asides))) > MOST_SET_ASIDE:
            rows.take_examples(asides)
            raise QualityFailed(
                f"{gate.table}: not merged: {count:,} of its changed rows fail expectations with"
                f" gate: quarantine, and a run quarantines at most {MOST_SET_ASIDE:,} at"
                f" once:\n{list_verdicts(asides)}\nIts changes wait in the change log: correct the"
                " expectation, which the next run uses, or make it warn until they are merged"
            )
        judged = _set_aside(job, plan, rows, asides, staged) if count else JudgedChanges(staged)
        if stops:
            # Released commits end at ``released``, and the next commit may begin exactly there.
            other_rows = replace(
                rows,
                files=NetFiles.of(judged.staged.folder, job.lake),
                where=f"{is_written} and lsn >= {gate.released}",
            )
            if failed := _unmet(other_rows, stops):
                raise gate_error(gate, failed)
    return judged


@dataclass(frozen=True, slots=True)
class StillFails:
    """A quarantined row that was read again and still fails its gate.

    It has the key as texts, the values as JSON, and the reason.
    """

    key: tuple[str, ...]
    values: str
    reason: str


def judge_complete_rows(
    runner: Runner,
    job: Job,
    gate: TableGate,
    copy: TableCopy,
    folder: str,
    opened: Collection[tuple[str, ...]],
) -> list[StillFails]:
    """Returns which of these complete rows stay in quarantine; raises when a gate stops the others.

    The rows in ``folder`` have the copy's columns by position, and ``t<k>``, the texts of the key,
    for quarantined rows. The other rows come from waiting changes. They have no commit positions,
    so a release lets them pass only when nothing has landed since. ``opened`` are the keys of open
    rows: a discarded row that still fails is no new finding.
    """
    has_metadata = job.pipeline.target.metadata_columns
    columns = JudgedColumns(dict(copy.columns), copy.key_columns, has_metadata)
    with _verdicts(job, gate, columns, "its rows weren't read again") as (asides, stops):
        if gate.released >= landed_upto(job, job.read_identity()):
            stops.clear()
        rows = StagedRows(runner, NetFiles.of(folder, job.lake), columns, gate.table)
        replace(rows, where="t0 is not null").judge(asides)
        still = _still_failing(rows.files, copy, asides)
        open_rows = [sum(still[row].key in opened for row in v.failing.tolist()) for v in asides]
        if still:
            other_rows = rows.files.without(runner, _any_of(asides), f"{folder}-rest")
            rows = replace(rows, files=other_rows)
        if failed := _unmet(rows, [*asides, *stops]):
            raise QualityFailed(
                f"{gate.table}: its rows weren't read again, since rows that would enter the target"
                f" fail expectations with a gate:\n{list_verdicts(failed)}\nFirst let a run apply"
                " the waiting changes: it quarantines rows that fail gate: quarantine. Where"
                " gate: stop"
                " stops it, correct the expectation or the data, or release the changes: waldelta"
                f" decide FILE release --tables {gate.table} --reason WHY"
            )
        for verdict, count in zip(asides, open_rows, strict=True):
            if count and (outcome := verdict.outcome) is not None:
                rows_left = (outcome.unexpected_count or 0) + count
                verdict.outcome = replace(outcome, success=False, unexpected_count=rows_left)
    return [*still.values()]


def _any_of(verdicts: Sequence[Verdict]) -> Ints:
    """Returns the numbers of rows that fail any expectation, in their order."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(v.failing for v in verdicts)]))


def _still_failing(
    files: NetFiles, copy: TableCopy, asides: list[Verdict]
) -> dict[int, StillFails]:
    """Returns the rows of ``files`` that fail one of the verdicts ``asides``, by their numbers
    there, with key, values and reasons.
    """
    failing = _any_of(asides)
    rows_of_verdicts = files.at(failing)
    values = values_as_json(rows_of_verdicts, copy.columns, [()] * len(rows_of_verdicts))
    texts = [rows_of_verdicts[f"t{k}"].to_pylist() for k in range(len(copy.key_columns))]
    rows = zip(zip(*texts, strict=True), values, _reasons(asides), strict=True)
    return dict(zip(failing.tolist(), starmap(StillFails, rows), strict=True))


def _reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Returns why each row that fails any expectation is in quarantine, in their order."""
    failed: dict[int, list[str]] = {}
    for verdict in verdicts:
        for row in verdict.failing.tolist():
            reason = f"{verdict.planned.meaning} ({verdict.planned.place})"
            failed.setdefault(row, []).append(reason)
    return [FAILS + "; ".join(failed[row]) for row in sorted(failed)]


def _set_aside(
    job: Job, plan: TargetPlan, judged: StagedRows, asides: Sequence[Verdict], staged: Staged
) -> JudgedChanges:
    """Take the rows that fail out of ``staged``: net changes that would write a row."""
    failing, state = _any_of(asides), plan.state
    rows = as_net(judged.files.at(failing), plan)
    moved, absent = find_key_moves(rows, plan), unsent(rows, plan)
    of_action = np.array(rows["action"].to_pylist(), dtype=object)
    gone = purges(rows.filter(pa.array((of_action == ACTION_UPSERT) | moved)), plan)
    raw = int(one_array(rows["raw"]).is_valid().sum().as_py() or 0)
    additions = Counter({ACTION_PURGE: len(gone), QUARANTINED_ROWS: len(rows)})
    counts = (
        Counter(staged.counts) + additions - Counter(of_action.tolist()) - Counter({RAW_ROWS: raw})
    )
    values = zip(
        keys_of(rows, plan, "c"),
        absent,
        arrived_values(rows, plan, absent),
        rows["lsn"].to_pylist(),
        rows["commit_ts"].to_pylist(),
        _reasons(asides),
        ((of_action == ACTION_UPDATE) & ~moved).tolist(),
        strict=True,
    )
    aside = [
        Decision(
            now(), job.run_id, WAITING, state.table_name, state.generation, plan.batches.upto,
            key, columns, texts, lsn, commit_ts, reason, outdated=is_outdated,
        )
        for key, columns, texts, lsn, commit_ts, reason, is_outdated in values
    ]  # fmt: skip
    folder = f"{staged.folder}-let"
    write_parquet(folder, gone)
    judged.files.without(judged.runner, failing, folder, 1)
    log.warning(
        "table=%s gate: quarantined %s, %d in all",
        judged.table,
        counted(len(aside), "row"),
        counts[QUARANTINED_ROWS],
    )
    let = replace(staged, folder=folder, counts=counts)
    return JudgedChanges(let, aside)


def _unmet(rows: StagedRows, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Returns the expectations that the rows don't meet."""
    rows.judge(verdicts, EXAMPLE_ROWS)
    rows.take_examples(verdicts)
    return [verdict for verdict in verdicts if not verdict.is_met]

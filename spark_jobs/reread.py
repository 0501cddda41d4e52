"""Reread: rows that came without all of their values get them from the source, or are quarantined visibly.

Between stage and merge. A row that moves into a row filter arrives as INSERT; a TOASTed value that the UPDATE left alone
isn't sent with it, and the target has no row to take it from. The value is read by key as it is now, which the table
``quarantine`` notes. When the source has no such row any more, the row isn't written, and ``quarantine`` holds it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.collapse import ACTION_INSERT, ACTION_PURGE, ACTION_UPDATE, ACTION_UPSERT
from spark_jobs.identifier import parquet
from spark_jobs.merge import QUARANTINED_ROWS, REREAD_ROWS
from spark_jobs.plan import TargetPlan
from spark_jobs.row_keys import first_values, row_keys
from spark_jobs.sent_messages import sent_messages
from spark_jobs.source_values import Mask, SourceValues, read_values
from spark_jobs.stage import Staged
from waldelta.arrow_columns import one_array
from waldelta.change_log import ChangeLog
from waldelta.column_names import RELID
from waldelta.copy import RAW_TYPE
from waldelta.errors import NeedsSync
from waldelta.job import Job
from waldelta.lake import open_parquet, write_parquet
from waldelta.ledger_rows import now
from waldelta.pg_text import pg_text
from waldelta.quarantine import QUARANTINED, REREAD, RESOLVED, IncompleteRow, Quarantine, SentMessage, open_keys

log = logging.getLogger(__name__)

# Rows read from the source by one statement; with values of a megabyte each the driver still holds them.
ROWS_PER_READ = 1000
_FRESH = (ACTION_INSERT, ACTION_UPSERT)


def reread(
    job: Job,
    change_log: ChangeLog,
    plan: TargetPlan,
    staged: Staged,
    quarantine: Quarantine,
    *,
    replays: bool = False,
) -> Staged:
    """Complete the staged rows that lack values; returns what to merge instead, with its counts.

    What is told of them takes the place of what a killed run told of the same batches; of a replay it is told beside it.
    A quarantined row's later update takes the row out of quarantine, whatever its key is by then. Raises
    TransactionsStillOpen (retryable) while a change isn't visible on the source yet, SourceUnreachable,
    PrivilegeMissing.
    """
    if not plan.decode.shape.key:
        return staged
    state, after = plan.state, plan.batches[1] if replays else plan.batches[0]
    held = quarantine.outlines(state.table_name, state.generation)
    if not staged.incomplete and not held:
        return staged
    work = _Work(job, change_log, plan, staged)
    opened = open_keys(row for row in held if row.batch <= after)
    emptied = opened and _truncated_keys(quarantine, plan, opened)
    work.told += [work.row(RESOLVED, key) for key in sorted(emptied)]
    work.resolve(opened - emptied, partial(_messages, quarantine, plan, after))
    for rows in _chunks(staged, plan):
        work.complete(rows)
    work.keep_messages()
    if replays:
        if work.told:
            quarantine.add(work.told)
    elif work.told or any(row.batch > after for row in held):
        quarantine.replace(state.table_name, state.generation, after, work.told)
    if quarantined := work.counts[QUARANTINED_ROWS]:
        log.warning(
            "table=%s rows=%d came without values that the source no longer has: they are in %s, not in the target",
            state.table_name, quarantined, quarantine.uri,
        )  # fmt: skip
    return replace(staged, source=work.source(), counts={k: n for k, n in work.counts.items() if n}, net=None)


@dataclass
class _Work:
    """The incomplete rows of one range of batches, on their way."""

    job: Job
    change_log: ChangeLog
    plan: TargetPlan
    staged: Staged
    told: list[IncompleteRow] = field(default_factory=list)
    # Of rows that come out of quarantine by an update: what they came from before, by the key that they have now.
    earlier: dict[str, list[SentMessage]] = field(default_factory=dict)
    parts: int = 0

    def __post_init__(self) -> None:
        self.counts = Counter(self.staged.counts)

    def resolve(self, opened: set[str], messages_of: Callable[[list[str]], Mapping[str, list[SentMessage]]]) -> None:
        """Say which quarantined rows this range of batches ends, and bring back those that it updates.

        ``messages_of`` gives what they came from, by key.
        """
        if not opened:
            return
        touched = _touched(self.staged, self.plan, opened)
        self.told += [self.row(RESOLVED, key) for key in sorted(set(_keys(touched, self.plan, "b")))]
        updated = touched.filter(pc.equal(touched["action"], ACTION_UPDATE))
        if len(updated):
            # The target has no row at the base key; what stands at the new one is purged by a row of its own.
            self.counts[ACTION_UPDATE] -= len(updated)
            self.counts[ACTION_INSERT] += len(updated)
            before, after = (_keys(updated, self.plan, which) for which in "bc")
            messages = messages_of(before)
            self.earlier = {now: messages[then] for then, now in zip(before, after, strict=True)}
            self.complete(_without_base(_with_action(updated, ACTION_INSERT), self.plan))

    def complete(self, rows: pa.Table) -> None:
        """Read what these new rows lack, and stage them anew: whole, or as a purge of whatever stands at their key."""
        lacking = _lacking(rows, self.plan)
        keys = _keys(rows, self.plan, "c")
        values = read_values(self.job, self.change_log, self.plan, rows, lacking)
        filled = _filled(rows, self.plan, values)
        self._tell(rows, keys, values, lacking)
        missing = pa.array(values.missing)
        lost = rows.filter(missing)
        replaced = lost.filter(pc.equal(lost["action"], ACTION_UPSERT))
        for action in _FRESH:
            self.counts[action] -= pc.sum(pc.equal(lost["action"], action)).as_py() or 0
        self.counts[ACTION_PURGE] += len(replaced)
        self.counts[REREAD_ROWS] += int((lacking & ~values.missing).sum())
        self.counts[QUARANTINED_ROWS] += len(lost)
        ready = pa.concat_tables([filled.filter(pc.invert(missing)), _purges(replaced, self.plan)])
        write_parquet(self._folder, ready, self.parts)
        self.parts += 1

    def keep_messages(self) -> None:
        """Keep with the rows that go into quarantine the messages that they came from."""
        wanted = {row.key for row in self.told if row.status == QUARANTINED}
        found = sent_messages(self.change_log, self.plan, wanted)
        self.told = [
            replace(row, messages=self.earlier.get(row.key, []) + found.get(row.key, [])) if row.key in wanted else row
            for row in self.told
        ]

    def source(self) -> str:
        """What the merge reads: the staged rows that were whole, and those made whole."""
        if not self.parts:
            return self.staged.source
        schema = self.plan.decode.net_schema
        flags = " or ".join(self.plan.decode.shape.flags) or "false"
        fresh = ", ".join(f"'{action}'" for action in _FRESH)
        names = ", ".join(schema.names)
        # Numbered columns and our own folders: nothing of the source's is in it.
        return (
            f"(select {names} from {self.staged.source} where not (action in ({fresh}) and ({flags}))"
            f" union all select {names} from {parquet(self._folder)})"
        )

    @property
    def _folder(self) -> str:
        return f"{self.staged.folder}-completed"

    def _tell(self, rows: pa.Table, keys: Sequence[str], values: SourceValues, lacking: Mask) -> None:
        for n, row in enumerate(rows.select(["lsn", "commit_ts", *self.plan.decode.shape.flags]).to_pylist()):
            if not lacking[n]:
                continue
            absent = [self.plan.decode.names[i] for i in self.plan.decode.shape.toastable if row[f"u{i}"]]
            status = QUARANTINED if values.missing[n] else REREAD
            sent = _sent(rows.slice(n, 1), self.plan, absent) if values.missing[n] else None
            self.told.append(
                self.row(status, keys[n], columns=absent, sent=sent, lsn=row["lsn"], commit_ts=row["commit_ts"],
                          reason=values.reasons[n])
            )  # fmt: skip

    def row(self, status: str, key: str, **details: Any) -> IncompleteRow:
        """What the table of quarantined rows is to say of one key."""
        state, (_, upto) = self.plan.state, self.plan.batches
        return IncompleteRow(now(), self.job.run_id, status, state.table_name, state.generation, upto, key, **details)


def _messages(quarantine: Quarantine, plan: TargetPlan, after: int, keys: list[str]) -> dict[str, list[SentMessage]]:
    """What these quarantined rows came from, by key."""
    rows = quarantine.rows(plan.state.table_name, plan.state.generation, keys)
    return {row.key: row.messages or [] for row in rows if row.batch <= after}


def _truncated_keys(quarantine: Quarantine, plan: TargetPlan, opened: set[str]) -> set[str]:
    """Keys of quarantined rows that a TRUNCATE took with the table, or with their leaf."""
    if not plan.truncated or not plan.truncated_leaves:
        return opened if plan.truncated else set()
    leaves = {str(oid) for oid in plan.truncated_leaves}
    rows = quarantine.rows(plan.state.table_name, plan.state.generation, opened)
    return {row.key for row in rows if row.sent and json.loads(row.sent).get(RELID) in leaves}


def _chunks(staged: Staged, plan: TargetPlan) -> Iterator[pa.Table]:
    """The new rows that lack a value, a bounded number at once."""
    flags = plan.decode.shape.flags
    if not staged.incomplete:
        return
    lacking = pc.field(flags[0])
    for flag in flags[1:]:
        lacking = lacking | pc.field(flag)
    chosen = pc.field("action").isin(list(_FRESH)) & lacking
    scanner = open_parquet(staged.folder).scanner(filter=chosen, batch_size=ROWS_PER_READ, batch_readahead=1)
    for part in scanner.to_batches():
        if part.num_rows:
            yield _as_net(pa.Table.from_batches([part]), plan)


def _touched(staged: Staged, plan: TargetPlan, opened: set[str]) -> pa.Table:
    """The staged rows whose base key is one of these."""
    first = plan.decode.names[plan.decode.shape.key[0]]
    if renamed := [key for key in opened if first not in json.loads(key)]:
        raise NeedsSync(
            f"{plan.state.table_name}: its key was renamed while {len(renamed)} of its rows are in quarantine"
        )
    files = open_parquet(staged.folder)
    values = first_values(opened, plan.decode, files.schema.field("b0").type)
    found = _as_net(files.to_table(filter=pc.field("b0").isin(values)), plan)
    return found.filter(pa.array([key in opened for key in _keys(found, plan, "b")], pa.bool_()))


def _as_net(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    schema = plan.decode.net_schema
    return rows.select(schema.names).cast(schema).combine_chunks()


def _keys(rows: pa.Table, plan: TargetPlan, which: str) -> list[str]:
    """Each row's key as JSON: the base (``b``) or its present one (``c``)."""
    shape = plan.decode.shape
    return row_keys(rows, plan.decode, shape.bases if which == "b" else [f"c{i}" for i in shape.key])


def _sent(row: pa.Table, plan: TargetPlan, absent: Sequence[str]) -> str:
    """The values of one row that did come, as JSON."""
    raw = dict(row["raw"][0].as_py() or [])
    texts = {name: pg_text(one_array(row[f"c{i}"]))[0] for i, name in enumerate(plan.decode.names)}
    return json.dumps({name: raw.get(name, text) for name, text in texts.items() if name not in absent})


def _filled(rows: pa.Table, plan: TargetPlan, values: SourceValues) -> pa.Table:
    """The rows with the values that were read, and nothing marked as unchanged any more."""
    raws = [dict(raw or []) for raw in rows["raw"].to_pylist()]
    for i in plan.decode.shape.toastable:
        flags, texts = rows[f"u{i}"].to_pylist(), values.texts[i]
        typed, raw = plan.decode.types[i].from_text(pa.array(texts, pa.string()))
        both = pa.concat_arrays([one_array(rows[f"c{i}"]), typed])
        chosen = pa.array([n + len(rows) if flag else n for n, flag in enumerate(flags)], pa.int64())
        rows = _with_column(rows, f"c{i}", both.take(chosen))
        rows = _with_column(rows, f"u{i}", pa.array([False] * len(rows)))
        for n, text in enumerate(raw.to_pylist() if raw is not None else []):
            if flags[n] and text is not None:
                raws[n][plan.decode.names[i]] = text
    return _with_column(rows, "raw", pa.array([list(raw.items()) or None for raw in raws], RAW_TYPE))


def _purges(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    """These rows as purges of whatever stands at their key."""
    rows = _with_action(rows, ACTION_PURGE)
    for name in [*plan.decode.shape.values, "raw"]:
        rows = _with_column(rows, name, pa.nulls(len(rows), rows.schema.field(name).type))
    for name in plan.decode.shape.flags:
        rows = _with_column(rows, name, pa.array([False] * len(rows), pa.bool_()))
    return rows


def _without_base(rows: pa.Table, plan: TargetPlan) -> pa.Table:
    for name in plan.decode.shape.bases:
        rows = _with_column(rows, name, pa.nulls(len(rows), rows.schema.field(name).type))
    return rows


def _with_action(rows: pa.Table, action: str) -> pa.Table:
    return _with_column(rows, "action", pa.array([action] * len(rows), pa.string()))


def _with_column(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, rows.schema.field(at), values)


def _lacking(rows: pa.Table, plan: TargetPlan) -> Mask:
    """Which rows came without some value."""
    lacking = np.zeros(len(rows), bool)
    for flag in plan.decode.shape.flags:
        lacking |= np.asarray(rows[flag])
    return lacking

"""Complete rows: reads missing values from the source, or quarantines rows that stay incomplete.

This runs between stage and merge. A row that moves into a row filter arrives as INSERT, without
TOASTed values that the UPDATE didn't change, and the target has no row with them. The current value
is read by key, and the ledger table ``decisions`` records that. If the source has no such row any
more, the row isn't written, and ``decisions`` stores it.

The quarantine stores the change log's messages that a few rows came from, because maintenance drops
batches from the change log. The keys of the range are decoded again, and each row's chain of
changes is followed back by collapse's rules.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools, Ints, one_array, with_column
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
    COMPLETED_ROWS,
    DELETE,
    INSERT,
    QUARANTINED_ROWS,
    Chains,
    identity_codes,
    stream_order,
)
from waldelta.changes.decode.decode import CHANGE_COLUMNS, DecodePlan, decode, with_typed_keys
from waldelta.changes.decode.net_rows import (
    FRESH,
    arrived_values,
    as_net,
    find_key_moves,
    first_values,
    keys_of,
    own_keys,
    purges,
    row_keys,
    unsent,
    with_action,
    without_base,
)
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.stage.net_files import NetFiles
from waldelta.changes.stage.stage import Staged
from waldelta.errors import NeedsSync
from waldelta.failpoints import fault_point
from waldelta.lake import Fence, by_row_group, open_parquet, write_parquet
from waldelta.lake.changelog import ChangeLog, place_columns
from waldelta.lake.ledger import (
    DISCARDED,
    RESOLVED,
    WAITING,
    Decision,
    Decisions,
    SentMessage,
    now,
    watched_rows,
)
from waldelta.lake.ledger.decisions import COMPLETED, Outline, discarded_rows, latest_rows
from waldelta.metadata_columns import RELID
from waldelta.pipeline import Job
from waldelta.snapshot.read_table import RAW_TYPE
from waldelta.spark import Runner
from waldelta.stages.apply._source_values import SourceValues, read_values
from waldelta.stages.check.gate.gate import JudgedChanges

log = logging.getLogger(__name__)

# Rows read from the source by one statement; with values of a megabyte each they still fit in the
# driver's memory.
SOURCE_ROWS_PER_READ = 1000


Judge = Callable[[Staged], JudgedChanges]
MessagesOf = Callable[[Sequence[str]], Mapping[str, list[SentMessage]]]


def complete_rows(  # noqa: PLR0913 - what it reads from, writes to, and is about
    runner: Runner,
    job: Job,
    change_log: ChangeLog,
    plan: TargetPlan,
    staged: Staged,
    quarantine: Decisions,
    *,
    judge: Judge | None,
    fence: Fence,
) -> Staged:
    """Complete the staged rows that lack values, and have ``judge`` (the gate) judge all of them.

    Returns what to merge instead. The records replace what a killed run recorded for the same
    batches. ``fence`` raises when another run owns the target now, whose records of later
    batches would be lost. Raises TransactionsStillOpen (retryable) while a change isn't visible on
    the source yet, SourceUnreachable, PrivilegeMissing, and what ``judge`` raises, with no record.
    """
    if not plan.decode.numbering.key:
        return staged if judge is None else judge(staged).staged
    state, after = plan.state, plan.batches.after
    outlines = quarantine.outlines(state.table_name, state.generation)
    if not staged.incomplete and not outlines and judge is None:
        return staged
    staged = staged.on_disk()
    work = _Work(runner, job, change_log, plan, staged)
    work.follow(quarantine, [row for row in outlines if row.batch <= after], after)
    for rows in _chunks(staged, plan):
        work.complete(rows)
    judged = JudgedChanges(work.completed()) if judge is None else judge(work.completed())
    work.recorded += judged.aside
    work.keep_messages()
    if work.recorded or any(row.batch > after for row in outlines):
        quarantine.replace(state.table_name, state.generation, after, work.recorded, fence)
    fault_point("complete.recorded")
    if quarantined := judged.staged.counts.get(QUARANTINED_ROWS):
        log.warning(
            "table=%s rows=%d %s: they are in %s, not in the target",
            state.table_name, quarantined, _why_quarantined(quarantined, len(judged.aside)),
            quarantine.uri,
        )  # fmt: skip
    return judged.staged


def _why_quarantined(rows: int, failing: int) -> str:
    """Returns why rows are quarantined, of which ``failing`` fail a gate.

    >>> _why_quarantined(2, 2), _why_quarantined(2, 1)
    ('fail a gate', 'lack values that the source no longer has, 1 of them fails a gate instead')
    """
    if rows == failing:
        return "fail a gate"
    lacks = "lack values that the source no longer has"
    suffix = f"{failing} of them {'fails' if failing == 1 else 'fail'} a gate instead"
    return f"{lacks}, {suffix}" if failing else lacks


@dataclass
class _Work:
    """The incomplete rows of one range of batches while they are completed."""

    runner: Runner
    job: Job
    change_log: ChangeLog
    plan: TargetPlan
    staged: Staged
    recorded: list[Decision] = field(default_factory=list)
    # The messages from which a quarantined row came, by the key that an update gives the row when
    # it leaves quarantine.
    earlier: dict[str, list[SentMessage]] = field(default_factory=dict)
    parts: int = 0
    # The numbers of the updates among the staged rows that were staged again as complete rows.
    replaced: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.counts = Counter(self.staged.counts)

    @cached_property
    def files(self) -> NetFiles:
        """The staged rows."""
        return NetFiles.of(self.staged.folder, self.change_log.lake)

    def follow(self, quarantine: Decisions, rows: Sequence[Outline], after: int) -> None:
        """Record what this range does to rows that are in quarantine since earlier batches.

        A quarantined row's later update takes the row out of quarantine, whatever its new key. A
        discarded row's update doesn't, but another row with its key does. It stays discarded under
        a new key that an update gives it.
        """
        watched, discarded = watched_rows(rows), discarded_rows(rows).keys()
        if not watched and not discarded:
            return
        emptied = _truncated_keys(quarantine, self.plan, {*watched, *discarded})
        replaced_keys, moved = discarded_since(self.staged, self.plan, discarded - emptied)
        self.recorded += [self.row(RESOLVED, key) for key in sorted(emptied | replaced_keys)]
        still = {key: row for key, row in watched.items() if key not in emptied}
        self.resolve(still, partial(_messages, quarantine, self.plan, after))
        # The records of the new keys follow those of the rows that they replace.
        if moved:
            self.record_moved(moved, _applied_records(quarantine, self.plan, after, moved.keys()))

    def resolve(self, watched: Mapping[str, Outline], messages_of: MessagesOf) -> None:
        """Record which missing or outdated rows this range resolves, and complete its updates of
        them.

        What was sent for such a row since then was never written, so an update that doesn't send a
        value again lacks it. ``messages_of`` returns the messages the rows came from, by key.
        """
        if not watched:
            return
        numbers, touched = _touched_rows(self.files, self.plan, watched.keys())
        keys = keys_of(touched, self.plan, "b")
        self.recorded += [self.row(RESOLVED, key) for key in sorted(set(keys))]
        is_update = np.array(
            [action == ACTION_UPDATE for action in touched["action"].to_pylist()], np.bool_
        )
        is_there = np.array([bool(watched[key].outdated) for key in keys], np.bool_)
        updated = touched.filter(pa.array(is_update & ~is_there))
        # An update that lacks values would leave values in the outdated row that an earlier,
        # quarantined change has replaced. So the complete row replaces it.
        lacks = self.plan.decode.numbering.lacks_values(touched)
        overlaid = touched.filter(pa.array(is_update & is_there & lacks))
        self.replaced = numbers[is_update & (lacks | ~is_there)]
        if len(updated):
            # The target has no row at the base key; a separate row purges the one at the new key.
            self.counts[ACTION_UPDATE] -= len(updated)
            self.counts[ACTION_INSERT] += len(updated)
            old_keys, new_keys = (keys_of(updated, self.plan, which) for which in "bc")
            messages = messages_of(old_keys)
            self.earlier = {
                now: messages[then] for then, now in zip(old_keys, new_keys, strict=True)
            }
            self.complete(without_base(with_action(updated, ACTION_INSERT), self.plan))
        if len(overlaid):
            self.complete(overlaid)

    def complete(self, rows: pa.Table) -> None:
        """Read the missing values and stage the rows again: complete, or as a purge of their
        key.
        """
        lacks = self.plan.decode.numbering.lacks_values(rows)
        keys = keys_of(rows, self.plan, "c")
        values = read_values(self.job, self.change_log, self.plan, rows, lacks)
        filled = _fill_values(rows, self.plan, values)
        self._record(rows, keys, values, lacks)
        missing = pa.array(values.missing)
        rows_lost = rows.filter(missing)
        gone = rows_lost.filter(
            pa.array(
                np.asarray(pc.equal(rows_lost["action"], ACTION_UPSERT))
                | find_key_moves(rows_lost, self.plan)
            )
        )
        for action in (*FRESH, ACTION_UPDATE):
            self.counts[action] -= pc.sum(pc.equal(rows_lost["action"], action)).as_py() or 0
        self.counts[ACTION_PURGE] += len(gone)
        self.counts[COMPLETED_ROWS] += int((lacks & ~values.missing).sum())
        self.counts[QUARANTINED_ROWS] += len(rows_lost)
        ready = pa.concat_tables([filled.filter(pc.invert(missing)), purges(gone, self.plan)])
        write_parquet(self._folder, ready, self.parts)
        self.parts += 1

    def completed(self) -> Staged:
        """Returns the staged rows, completed where possible, in files of their own."""
        counts = {name: count for name, count in self.counts.items() if count}
        if not self.parts:
            return replace(self.staged, counts=counts)
        numbers = np.union1d(_incomplete(self.files, self.plan), self.replaced)
        self.files.without(self.runner, numbers, self._folder, self.parts)
        return replace(self.staged, folder=self._folder, counts=counts)

    def record_moved(self, moved: Mapping[str, str], rows: Sequence[Decision]) -> None:
        """Record that discarded ``rows`` have another key now; without ``by``, as it is no new
        decision.
        """
        for key, row in latest_rows(rows).items():
            why = (
                row.why
                if row.by is None
                else f"discarded at {key} by {row.by}: {row.why or ''}".rstrip(": ")
            )
            self.recorded.append(
                self.row(
                    DISCARDED,
                    moved[key],
                    columns=row.columns,
                    values=row.values,
                    lsn=row.lsn,
                    commit_ts=row.commit_ts,
                    reason=row.reason,
                    why=why,
                    outdated=row.outdated,
                )
            )

    def keep_messages(self) -> None:
        """Store the messages that rows came from with the rows that go into quarantine."""
        keys = {row.key for row in self.recorded if row.status == WAITING}
        messages = sent_messages(self.change_log, self.plan, keys)
        self.recorded = [
            (
                replace(row, messages=self.earlier.get(row.key, []) + messages.get(row.key, []))
                if row.key in keys
                else row
            )
            for row in self.recorded
        ]

    @property
    def _folder(self) -> str:
        return f"{self.staged.folder}-completed"

    def _record(
        self, rows: pa.Table, keys: Sequence[str], values: SourceValues, lacks: Bools
    ) -> None:
        absent, texts = (
            unsent(rows, self.plan),
            arrived_values(rows, self.plan, unsent(rows, self.plan)),
        )
        stay = ~find_key_moves(rows, self.plan)
        for n, row in enumerate(rows.select(["action", "lsn", "commit_ts"]).to_pylist()):
            if not lacks[n]:
                continue
            is_lost = bool(values.missing[n])
            outdated = bool(stay[n]) if is_lost and row["action"] == ACTION_UPDATE else None
            self.recorded.append(
                self.row(
                    WAITING if is_lost else COMPLETED,
                    keys[n],
                    columns=absent[n],
                    values=texts[n] if is_lost else None,
                    lsn=row["lsn"],
                    commit_ts=row["commit_ts"],
                    reason=values.reasons[n],
                    outdated=outdated,
                )
            )

    def row(self, status: str, key: str, **details: Any) -> Decision:
        """Returns the quarantine record of one key."""
        state, upto = self.plan.state, self.plan.batches.upto
        return Decision(
            now(), self.job.run_id, status, state.table_name, state.generation, upto, key, **details
        )


def _messages(
    quarantine: Decisions, plan: TargetPlan, after: int, keys: Sequence[str]
) -> dict[str, list[SentMessage]]:
    """Returns the messages these quarantined rows came from, by key."""
    return {row.key: row.messages or [] for row in _applied_records(quarantine, plan, after, keys)}


def _applied_records(
    quarantine: Decisions, plan: TargetPlan, after: int, keys: Collection[str]
) -> list[Decision]:
    """Returns the quarantine records of these keys, without those of a killed run."""
    rows = quarantine.rows(plan.state.table_name, plan.state.generation, keys)
    return [row for row in rows if row.batch <= after]


def _truncated_keys(quarantine: Decisions, plan: TargetPlan, watched: Collection[str]) -> set[str]:
    """Returns the keys of quarantined rows that a TRUNCATE of the table or leaf partition
    removed.
    """
    if not plan.truncated or not plan.truncated_leaves:
        return set(watched) if plan.truncated else set()
    leaves = {str(oid) for oid in plan.truncated_leaves}
    rows = quarantine.rows(plan.state.table_name, plan.state.generation, watched)
    return {row.key for row in rows if row.values and json.loads(row.values).get(RELID) in leaves}


def _chunks(staged: Staged, plan: TargetPlan) -> Iterator[pa.Table]:
    """Yields the new rows that lack a value, a limited number at a time."""
    if not staged.incomplete:
        return
    lacks = reduce(or_, (pc.field(f"u{i}") for i in plan.decode.numbering.completable))
    condition = pc.field("action").isin(list(FRESH)) & lacks
    files = by_row_group(open_parquet(staged.folder), condition)
    scanner = files.scanner(
        filter=condition, batch_size=SOURCE_ROWS_PER_READ, batch_readahead=1, fragment_readahead=1
    )
    for part in scanner.to_batches():
        if part.num_rows:
            yield as_net(pa.Table.from_batches([part]), plan)


def _incomplete(files: NetFiles, plan: TargetPlan) -> Ints:
    """Returns the numbers of the new rows that lack a value."""
    flags = [f"u{i}" for i in plan.decode.numbering.completable]
    rows = files.read(["action", *flags])
    lacks = reduce(pc.or_, (pc.fill_null(rows[flag], False) for flag in flags), pa.scalar(False))
    is_fresh = pc.is_in(rows["action"], value_set=pa.array(FRESH))
    return np.flatnonzero(np.asarray(pc.and_(is_fresh, lacks)))


def _touched_rows(
    files: NetFiles, plan: TargetPlan, opened: Collection[str]
) -> tuple[Ints, pa.Table]:
    """Returns the staged rows whose base key is one of these, and their numbers."""
    first = plan.decode.names[plan.decode.numbering.key[0]]
    if renamed := [key for key in opened if first not in json.loads(key)]:
        raise NeedsSync(
            f"{plan.state.table_name}: its key was renamed while {len(renamed)} of its rows are in"
            " quarantine"
        )
    values = first_values(opened, plan.decode, files.schema.field("b0").type)
    numbers = np.flatnonzero(np.asarray(pc.is_in(files.read(["b0"])["b0"], value_set=values)))
    rows = as_net(files.at(numbers), plan)
    is_open = np.array([key in opened for key in keys_of(rows, plan, "b")], np.bool_)
    return numbers[is_open], rows.filter(pa.array(is_open))


def discarded_since(
    staged: Staged, plan: TargetPlan, discarded: Collection[str]
) -> tuple[set[str], dict[str, str]]:
    """Returns keys that are no longer discarded, and new keys that updates gave to discarded rows.

    At the former keys these changes write a row, or the source has no row any more.
    """
    key = plan.decode.numbering.key
    keys = own_keys(discarded, plan.decode)
    if not keys:
        return set(), {}
    files = open_parquet(staged.folder)
    values = first_values(keys, plan.decode, files.schema.field("b0").type)
    first = pc.field(f"c{key[0]}").isin(values) | pc.field("b0").isin(values)
    rows = as_net(files.to_table(filter=first), plan)
    actions, moves = rows["action"].to_pylist(), find_key_moves(rows, plan)
    old_keys, new_keys = (keys_of(rows, plan, which) for which in "bc")
    has_left = [action in FRESH or bool(moves[n]) for n, action in enumerate(actions)]
    present = {text for n, text in enumerate(new_keys) if has_left[n]}
    gone = {text for n, text in enumerate(old_keys) if actions[n] in (ACTION_DELETE, ACTION_PURGE)}
    # A target with row versions reports each of them: where a row is at the end is unknown.
    is_mirror = plan.decode.unfolding is None
    moved = {
        text: new_keys[n]
        for n, text in enumerate(old_keys)
        if is_mirror and moves[n] and text in keys
    }
    return keys & (present | gone | moved.keys()), moved


def _fill_values(rows: pa.Table, plan: TargetPlan, values: SourceValues) -> pa.Table:
    """Returns the rows with the source's values in place of those marked as unchanged."""
    raws = [dict(raw or []) for raw in rows["raw"].to_pylist()]
    for i in plan.decode.numbering.completable:
        flags, texts = rows[f"u{i}"].to_pylist(), values.texts[i]
        typed, raw = plan.decode.types[i].from_text(pa.array(texts, pa.string()))
        both = pa.concat_arrays([one_array(rows[f"c{i}"]), typed])
        places = pa.array(
            [n + len(rows) if flag else n for n, flag in enumerate(flags)], pa.int64()
        )
        rows = with_column(rows, f"c{i}", both.take(places))
        rows = with_column(rows, f"u{i}", pa.array([False] * len(rows)))
        for n, text in enumerate(raw.to_pylist() if raw is not None else []):
            if flags[n] and text is not None:
                raws[n][plan.decode.names[i]] = text
    return with_column(rows, "raw", pa.array([list(raw.items()) or None for raw in raws], RAW_TYPE))


# A row's newest message is stored whatever its size; the bytes of earlier ones up to this total.
MOST_EARLIER_BYTES = 1 << 20


def sent_messages(
    change_log: ChangeLog, plan: TargetPlan, keys: Collection[str]
) -> dict[str, list[SentMessage]]:
    """Returns the messages behind the rows that a range of batches writes, in commit order.

    ``keys`` are the rows' keys (as row_keys()). A chain goes back to the row's INSERT, or to the
    first UPDATE in the range. The target's own filter is ignored, so changes of the row that the
    filter excluded are included.
    """
    if not keys:
        return {}
    decode_plan = replace(plan.decode, routing=None)
    chains = _chains(_keys_of_events(change_log, plan, decode_plan), decode_plan, keys)
    messages = _read(change_log, plan, {place for places in chains.values() for place in places})
    return {
        key: keep_bytes([messages[place] for place in places]) for key, places in chains.items()
    }


def keep_bytes(messages: list[SentMessage]) -> list[SentMessage]:
    """Returns the messages to store: for a row changed very often, earlier ones without their
    bytes.
    """
    result, size = messages[-1:], 0
    for message in reversed(messages[:-1]):
        size += len(message.raw or b"")
        result.append(message if size <= MOST_EARLIER_BYTES else replace(message, raw=None))
    return result[::-1]


def _keys_of_events(change_log: ChangeLog, plan: TargetPlan, decode_plan: DecodePlan) -> pa.Table:
    """Returns place, operation, and old and new key of each event of the range, in commit order."""
    names = ["ord", "op", *decode_plan.numbering.old_keys, *_new_keys(decode_plan)]
    schema = decode_plan.event_schema
    parts = [pa.schema([schema.field(name) for name in names]).empty_table()]
    for changes in _changes(change_log, plan, list(CHANGE_COLUMNS)):
        parts += [events.select(names) for events in decode(changes, decode_plan)]
    events = with_typed_keys(pa.concat_tables(parts), decode_plan)
    return events.take(pa.array(stream_order(events)))


def _chains(
    events: pa.Table, plan: DecodePlan, keys_wanted: Collection[str]
) -> dict[str, list[int]]:
    """Returns by key the places of the events that led to its row, in commit order."""
    op = events["op"].to_numpy().astype(np.int64)
    old, new = identity_codes(events, plan.numbering)
    chains = Chains(op, np.where(op == INSERT, -1, old), np.where(op == DELETE, -1, new), False)
    last, places = chains.live(), events["ord"].to_numpy()
    columns = _new_keys(plan)
    near = pc.is_in(
        events[columns[0]],
        value_set=first_values(keys_wanted, plan, events.schema.field(columns[0]).type),
    )
    last = last[np.asarray(near)[last]]
    return {
        key: [int(places[event]) for event in _events_up_to(chains, event)]
        for key, event in zip(
            row_keys(events.take(pa.array(last)), plan, columns), last.tolist(), strict=True
        )
        if key in keys_wanted
    }


def _events_up_to(chains: Chains, event: int) -> list[int]:
    """Returns the events of a chain from its first one up to ``event``."""
    events = [event]
    while (parent := int(chains.parent[events[-1]])) >= 0:
        events.append(parent)
    return events[::-1]


def _read(
    change_log: ChangeLog, plan: TargetPlan, places: Collection[int]
) -> dict[int, SentMessage]:
    """Returns the messages at these places in commit order."""
    numbers = np.array(sorted(places), np.int64)
    messages: dict[int, SentMessage] = {}
    for part in _changes(change_log, plan, ["batch", "seq", "streamed_xid", "lsn", "xid8", "data"]):
        at = plan.decode.segments.places(*place_columns(part))
        mask = np.isin(at, numbers)
        for place, row in zip(
            at[mask].tolist(), part.filter(pa.array(mask)).to_pylist(), strict=True
        ):
            messages[place] = SentMessage(
                row["batch"], row["seq"], row["lsn"], row["xid8"], row["data"]
            )
    return messages


def _changes(
    change_log: ChangeLog, plan: TargetPlan, columns: list[str]
) -> Iterable[pa.RecordBatch]:
    return change_log.rows_of(
        plan.decode.segments, plan.state.relation_ids, plan.decode.snapshot, columns
    )


def _new_keys(plan: DecodePlan) -> list[str]:
    return [f"c{i}" for i in plan.numbering.key]

"""What waits for a decision: attention for it, and quarantined rows without reading resolved ones;
and operators' decisions: what, on which, who, when and why.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.config import PipelineFile
from waldelta.decision_kinds import EXTERNAL_COMMIT, MESSAGE, ROW, TABLE, WAITING_KINDS, kind_of
from waldelta.errors import SlotMissing, StateError
from waldelta.lake.ledger import (
    REMOVED,
    RESOLVED,
    WAITING,
    Decision,
    Decisions,
    ExternalCommit,
    Ledger,
    TableState,
)
from waldelta.lake.ledger.decisions import COMPLETED, OF_ID
from waldelta.lake.ledger.records import schema_of
from waldelta.lsn import Lsn
from waldelta.monitoring.attention import UNNAMED, Attention, names, worst_first
from waldelta.monitoring.reconciliation_status import Compared, read_compared
from waldelta.monitoring.stopped_tables import Stopped, read_stopped
from waldelta.monitoring.table_list import TableLine, latest_states
from waldelta.pipeline import Job, SourceConnections
from waldelta.pipeline.drift import open_questions
from waldelta.pipeline.targets import open_messages, target_generations
from waldelta.pipeline.targets.target_definition import describe
from waldelta.pipeline.targets.unreadable_messages import (
    ANY_TABLE,
    OpenMessage,
    as_json,
    with_applied,
)

_KEY = ("table_name", "generation", "key")
# Messages are left out: a row may have megabytes of them, which no list shows.
_SHOWN = tuple(name for name in schema_of(Decision).names if name != "messages")
# What is shown of a status whose word says less than what an operator did to a row.
_WORDS = {RESOLVED: "retried", WAITING: "retried, still fails"}
_COMMIT = "external commit: "
_OF_ONE = ("run_id", "table_name", "kind", "status", "by", "why", "upto_lsn")


def read_open(ledger: Ledger, keys: pa.Table) -> list[Decision]:
    """Returns the quarantine records of the rows with these keys that still wait, in the keys'
    order.

    Pass only a few keys, because each becomes an object.
    """
    in_order = [tuple(row.values()) for row in keys.select([*_KEY, "at"]).to_pylist()]
    # ``at`` identifies the rows of one table; another table's rows of that time are removed below.
    where = pc.field("at").isin(keys["at"]) & (pc.field("status") == WAITING)
    where &= pc.field("kind") == ROW
    rows = ledger.table(Decision).read(where, columns=_SHOWN)
    by_key = {(row.table_name, row.generation, row.key, row.at): row for row in rows}
    return [by_key[key] for key in in_order if key in by_key]


class Quarantine(NamedTuple):
    """Why rows of a table are in quarantine, each reason once, and since when the first of them."""

    reasons: Sequence[str]
    since: datetime


def read_quarantine(ledger: Ledger, tables: Collection[str]) -> dict[str, Quarantine]:
    """Returns by table what is in quarantine of these tables."""
    if not tables:
        return {}
    keys = Decisions(ledger.lake).scan_open(target_generations(ledger), ("reason",))
    groups = keys.filter(pc.field("table_name").isin(tables)).group_by("table_name")
    rows = groups.aggregate([("reason", "distinct"), ("at", "min")]).to_pylist()
    return {
        row["table_name"]: Quarantine(sorted(filter(None, row["reason_distinct"])), row["at_min"])
        for row in rows
    }


def read_by_id(ledger: Ledger, row_id: str) -> Decision | None:
    """Returns the quarantined row with this id, with its messages, even if it was decided on
    since.
    """
    table = ledger.table(Decision)
    rows = table.read((pc.field("kind") == ROW) & (pc.field("status") == WAITING), columns=OF_ID)
    outline = next((row for row in reversed(rows) if row.id == row_id), None)
    if outline is None:
        return None
    where = (pc.field("at") == pa.scalar(outline.at, UTC_TIME)) & (pc.field("key") == outline.key)
    return next(iter(table.read(where & (pc.field("table_name") == outline.table_name))), None)


def read_since(ledger: Ledger, row: Decision) -> Decision | None:
    """Returns the latest record of the row's key after it, in the same copy, or None."""
    where = (pc.field("table_name") == row.table_name) & (pc.field("key") == row.key)
    where &= (pc.field("generation") == row.generation) & (
        pc.field("at") > pa.scalar(row.at, UTC_TIME)
    )
    return next(reversed(ledger.table(Decision).read(where, columns=_SHOWN)), None)


def read_of_run(ledger: Ledger, run_id: str, most: int) -> tuple[list[Decision], int]:
    """Returns the first rows that a run quarantined, oldest first, and their number.

    Unreadable messages don't count.
    """
    where = (pc.field("run_id") == run_id) & (pc.field("kind") == ROW)
    table = ledger.table(Decision)
    moments = table.scan(("at",), None, where)["at"]
    where &= pc.field("at").isin(moments.slice(0, most).unique())
    return table.read(where, columns=_SHOWN)[:most], len(moments)


@dataclass(frozen=True, slots=True)
class Decided:
    """One decision on one table: on ``rows``, of which ``key`` is the first, or on its ``scope``:
    an unreadable message, a change of a source table, an external commit, or all landed changes.
    """

    at: datetime
    what: str
    table_name: str
    by: str | None
    reason: str | None
    run_id: str
    rows: int | None = None
    key: str | None = None
    scope: str = ""


def read_decided(ledger: Ledger, table: str | None = None) -> list[Decided]:
    """Returns all decisions, or those on one table, newest first, as long as the ledger stores
    them.
    """
    # Rows without ``by`` were resolved, or moved to another key, by a later change. Rows that a
    # repair carried over repeat an earlier decision.
    condition = (pc.field("status") != COMPLETED) & pc.field("by").is_valid()
    if table is not None:
        condition &= pc.field("table_name") == table
    rows = ledger.table(Decision).scan((*_OF_ONE, "at", "key", "reason"), None, condition)
    # Rows that were decided on together are one decision; other keys are decisions of their own.
    of_rows, none = pc.equal(rows["kind"], ROW), pa.scalar(None, pa.string())
    rows = rows.append_column("of", pc.if_else(of_rows, none, rows["key"]))
    groups = rows.group_by([*_OF_ONE, "of"], use_threads=False).aggregate(
        [("at", "first"), ("reason", "first"), ("key", "first"), ("key", "count_distinct")]
    )
    decided = [_to_decided(row) for row in groups.to_pylist()]
    return sorted(decided, key=lambda one: one.at, reverse=True)


def _to_decided(row: dict[str, Any]) -> Decided:
    key, status, of_rows = row["key_first"], row["status"], row["kind"] == ROW
    scopes = {
        ROW: "",
        MESSAGE: f"message {key}",
        TABLE: f"everything landed up to {Lsn(row['upto_lsn'])}",
    }
    return Decided(
        row["at_first"],
        _WORDS.get(status, status) if of_rows else status,
        row["table_name"],
        row["by"],
        row["why"],
        row["run_id"],
        row["key_count_distinct"] if of_rows else None,
        key if of_rows else None,
        scopes.get(row["kind"], row["reason_first"] or ""),
    )


def read_commits(ledger: Ledger) -> list[Decision]:
    """Returns the external commits that wait for a decision, by table.

    Those don't wait that a copy, or a later comparison of all columns, covers, or to which an
    operator agreed.
    """
    states = [
        state
        for state in latest_states(ledger)
        if state.status != REMOVED and state.external_commits
    ]
    if not states:
        return []
    compared = read_compared(ledger, [state.table_name for state in states])
    accepted = {(row.table_name, row.key) for row in Decisions(ledger.lake).accepted_commits()}
    commits = [
        _commit(state, commit)
        for state in sorted(states, key=lambda state: state.table_name)
        for commit in state.external_commits
        if not _is_outlived(commit, state.table_name, compared)
    ]
    return [row for row in commits if (row.table_name, row.key) not in accepted]


def _commit(state: TableState, commit: ExternalCommit) -> Decision:
    text = describe(commit)
    return Decision(
        commit.at or state.at,
        state.run_id,
        WAITING,
        state.table_name,
        state.generation,
        0,
        json.dumps({"commit": text}),
        reason=f"{_COMMIT}{text}",
        kind=EXTERNAL_COMMIT,
    )


def _is_outlived(commit: ExternalCommit, name: str, compared: Compared) -> bool:
    """Returns whether a comparison covers the commit, by version and time.

    Both are compared, because the versions of a target that was removed begin again.
    """
    answer = compared.answers.get(name)
    if answer is None or answer.version is None:
        return False
    # A writer may leave out the time.
    return answer.version >= commit.version and (commit.at is None or answer.at > commit.at)


@dataclass(frozen=True, slots=True)
class WaitingItem:
    """One thing that waits: what is said of its ``tables``, how lists show it, and the ``value`` of
    its reader, which waits ``since`` then.
    """

    kind: str
    tables: tuple[str, ...]
    value: Any
    since: datetime | None
    detail: str = ""
    listed: Sequence[dict[str, Any]] = ()

    @property
    def attention(self) -> Attention:
        """Returns attention for it, whose text lacks the names of its tables."""
        kind = WAITING_KINDS[self.kind]
        return Attention(
            kind.severity, "decision", kind.text.format(self.detail), waiting=self.kind
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for a decision besides rows in quarantine, and decisions that no run has applied,
    in the order of its kinds' readers.
    """

    items: Sequence[WaitingItem] = ()

    @property
    def count(self) -> int:
        """Returns how many things wait, without those that a run only has to follow."""
        return sum(not WAITING_KINDS[item.kind].is_decided for item in self.items)

    def of(self, *kinds: str) -> list[Any]:
        """Returns what waits of these kinds, as its reader returns it."""
        return [item.value for item in self.items if item.kind in kinds]

    def as_listed(self, tables: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Returns what waits in all targets, or in these, ready for JSON."""
        return [
            line
            for item in self.items
            if tables is None or not {ANY_TABLE, *tables}.isdisjoint(item.tables)
            for line in item.listed
        ]

    def attention(self, lines: Iterable[TableLine]) -> Iterator[Attention]:
        """Yields attention, one for all tables where the same waits; ``lines`` count rows."""
        rows = [WaitingItem("rows", (of.table_name,), of, None) for of in lines if of.in_quarantine]
        waits: dict[str, dict[Attention, None]] = defaultdict(dict)
        for item in (*self.items, *rows):
            for name in item.tables:
                waits[UNNAMED if name == ANY_TABLE else name][item.attention] = None
        alike: dict[tuple[Attention, ...], list[str]] = defaultdict(list)
        for name in sorted(waits):
            alike[tuple(waits[name])].append(name)
        commits, order = self.of("external_commit"), list(WAITING_KINDS)
        for parts, tables in alike.items():
            about = {ANY_TABLE if name == UNNAMED else name for name in tables}
            times = [item.since for item in self.items if not about.isdisjoint(item.tables)]
            yield replace(
                min(parts, key=lambda part: order.index(part.waiting)),
                severity=worst_first(parts)[0].severity,
                text=f"{names(tables)}: {'; '.join(part.text for part in parts)}",
                page=("waiting",),
                objects=tuple(tables),
                details=tuple(
                    (
                        row.table_name,
                        (row.reason or "").removeprefix(_COMMIT).replace("+0000)", " UTC)"),
                    )
                    for row in commits
                    if row.table_name in tables
                ),
                since=min(filter(None, times), default=None),
            )


def _of_gate(gate: Stopped) -> WaitingItem:
    kind = "released" if gate.released else "gate"
    return WaitingItem(kind, (gate.table_name,), gate, gate.since, gate.describe(), gate.as_json())


def _of_message(message: OpenMessage) -> WaitingItem:
    kind, detail = "message", message.row.id
    if message.is_skipped:
        when = "" if message.is_applied else ", which no run has applied yet"
        kind, detail = "skipped", f"{message.row.id} was skipped{when}"
    return WaitingItem(kind, message.tables, message, message.row.at, detail, [as_json(message)])


def _of_row(row: Decision) -> WaitingItem:
    kind, detail = kind_of(row.kind, row.status), row.reason or ""
    if row.by:
        kind, detail = "answered", f"({row.status}): {row.reason}"
    return WaitingItem(kind, (row.table_name,), row, row.at, detail, [row.as_listed()])


def count_waiting(pipeline: PipelineFile, ledger: Ledger) -> int:
    """Returns how many things wait for a decision, each row in quarantine counted."""
    rows = Decisions(ledger.lake).open_counts(target_generations(ledger))
    return read_waiting(pipeline, ledger).count + sum(rows.values())


def read_waiting(
    pipeline: PipelineFile, ledger: Ledger, behind: Collection[str] | None = None
) -> Waiting:
    """Returns what waits for a decision; ``behind``: see read_stopped()."""
    messages = open_messages(ledger, pipeline.source.slot)
    job = Job(pipeline, SourceConnections(pipeline.source), "waiting", lake=ledger.lake)
    with suppress(SlotMissing, StateError):  # Nothing is applied without a slot, or a target.
        messages = with_applied(job, messages)
    rows = [*open_questions(ledger), *read_commits(ledger)]
    return Waiting(
        [
            *map(_of_gate, read_stopped(pipeline, ledger, behind)),
            *map(_of_message, messages),
            *map(_of_row, rows),
        ]
    )

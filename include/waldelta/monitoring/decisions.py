"""What waits for a decision: attention for it, and quarantined rows without reading resolved ones;
and operators' decisions: what, on which, who, when and why.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import UTC_TIME
from waldelta.config import PipelineFile
from waldelta.errors import SlotMissing, StateError
from waldelta.lake.ledger import (
    ACCEPTED,
    DISCARDED,
    RELEASED,
    REMOVED,
    RESOLVED,
    SKIPPED,
    WAITING,
    Decision,
    Decisions,
    ExternalCommit,
    Ledger,
    TableState,
)
from waldelta.lake.ledger.decisions import (
    AGREED,
    EXTERNAL_COMMIT,
    MESSAGE,
    OF_ID,
    REFUSED,
    ROW,
    SOURCE_CHANGES,
    TABLE,
)
from waldelta.lake.ledger.records import schema_of
from waldelta.monitoring.attention import (
    UNNAMED,
    Attention,
    WaitingKind,
    names,
    worst_first,
)
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
_WHAT = {
    DISCARDED: "discarded",
    RESOLVED: "retried",
    ACCEPTED: "accepted",
    SKIPPED: "skipped",
    RELEASED: "released",
    AGREED: "agreed",
    REFUSED: "refused",
    WAITING: "retried, still fails",
}
_COMMIT = "external commit: "
_OF_ONE = ("run_id", "table_name", "kind", "status", "by", "why", "upto_lsn")


def read_open(ledger: Ledger, keys: pa.Table) -> list[Decision]:
    """Returns the quarantine records of some of these keys, in their order.

    Pass only a few keys, because each becomes an object.
    """
    in_order = [tuple(row.values()) for row in keys.select([*_KEY, "at"]).to_pylist()]
    # ``at`` identifies the rows of one table; another table's rows of that time are removed below.
    chosen = pc.field("at").isin(keys["at"]) & (pc.field("status") == WAITING)
    chosen &= pc.field("kind") == ROW
    rows = ledger.table(Decision).read(chosen, columns=_SHOWN)
    by_key = {(row.table_name, row.generation, row.key, row.at): row for row in rows}
    return [by_key[key] for key in in_order if key in by_key]


def read_reasons(ledger: Ledger, tables: Collection[str]) -> list[str]:
    """Returns why rows of these tables are in quarantine, each reason once."""
    keys = Decisions(ledger.lake).scan_open(target_generations(ledger), ("reason",))
    keys = keys.filter(pc.is_in(keys["table_name"], value_set=pa.array(tables, pa.string())))
    return sorted(filter(None, keys["reason"].unique().to_pylist()))


def read_by_id(ledger: Ledger, row_id: str) -> Decision | None:
    """Returns the quarantined row with this id, with its messages, even if it was decided on
    since.
    """
    table = ledger.table(Decision)
    rows = table.read((pc.field("kind") == ROW) & (pc.field("status") == WAITING), columns=OF_ID)
    found = next((row for row in reversed(rows) if row.id == row_id), None)
    if found is None:
        return None
    chosen = (pc.field("at") == pa.scalar(found.at, UTC_TIME)) & (pc.field("key") == found.key)
    return next(iter(table.read(chosen & (pc.field("table_name") == found.table_name))), None)


def read_since(ledger: Ledger, row: Decision) -> Decision | None:
    """Returns the latest record of the row's key after it, in the same copy, or None."""
    chosen = (pc.field("table_name") == row.table_name) & (pc.field("key") == row.key)
    chosen &= (pc.field("generation") == row.generation) & (
        pc.field("at") > pa.scalar(row.at, UTC_TIME)
    )
    return next(reversed(ledger.table(Decision).read(chosen, columns=_SHOWN)), None)


def read_of_run(ledger: Ledger, run_id: str, most: int) -> tuple[list[Decision], int]:
    """Returns the first rows that a run quarantined, oldest first, and their number.

    Unreadable messages don't count.
    """
    chosen = (pc.field("run_id") == run_id) & (pc.field("kind") == ROW)
    table = ledger.table(Decision)
    moments = table.scan(("at",), None, chosen)["at"]
    chosen &= pc.field("at").isin(moments.slice(0, most).unique())
    return table.read(chosen, columns=_SHOWN)[:most], len(moments)


@dataclass(frozen=True, slots=True)
class Decided:
    """One decision on one table; ``key`` is the first of its ``rows``.

    ``upto_lsn`` is the position up to which changes were released. ``message`` is the unreadable
    message that was decided on, ``change`` that of a source table, or an external commit.
    """

    at: datetime
    what: str
    table_name: str
    by: str | None
    reason: str | None
    run_id: str
    rows: int | None = None
    key: str | None = None
    upto_lsn: int | None = None
    message: str | None = None
    change: str | None = None


def read_decided(ledger: Ledger) -> list[Decided]:
    """Returns all decisions, newest first, as long as the ledger stores them."""
    # Rows without ``by`` were resolved, or moved to another key, by a later change. Rows that a
    # repair carried over repeat an earlier decision.
    chosen = pc.field("status").isin(list(_WHAT)) & pc.field("by").is_valid()
    rows = ledger.table(Decision).scan((*_OF_ONE, "at", "key", "reason"), None, chosen)
    # Rows that were decided on together are one decision; other keys are decisions of their own.
    of_rows, none = pc.equal(rows["kind"], ROW), pa.scalar(None, pa.string())
    rows = rows.append_column("of", pc.if_else(of_rows, none, rows["key"]))
    found = rows.group_by([*_OF_ONE, "of"], use_threads=False).aggregate(
        [("at", "first"), ("reason", "first"), ("key", "first"), ("key", "count_distinct")]
    )
    decided = [_decided(row) for row in found.to_pylist()]
    return sorted(decided, key=lambda one: one.at, reverse=True)


def _decided(row: dict[str, Any]) -> Decided:
    kind, key = row["kind"], row["key_first"]
    is_resolved = kind == MESSAGE and row["status"] == RESOLVED
    return Decided(
        row["at_first"],
        RESOLVED if is_resolved else _WHAT[row["status"]],
        row["table_name"],
        row["by"],
        row["why"],
        row["run_id"],
        rows=row["key_count_distinct"] if kind == ROW else None,
        key=key if kind == ROW else None,
        upto_lsn=row["upto_lsn"] if kind == TABLE else None,
        message=key if kind == MESSAGE else None,
        change=row["reason_first"] if kind in (*SOURCE_CHANGES, EXTERNAL_COMMIT) else None,
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
class Waiting:
    """What waits for a decision besides rows in quarantine, and decisions that no run has applied.

    ``questions`` are changes of source tables, ``commits`` those of other programs.
    """

    stopped: list[Stopped]
    messages: list[OpenMessage]
    questions: list[Decision]
    commits: list[Decision]

    @property
    def count(self) -> int:
        """Returns how many things wait, without those that a run only has to follow."""
        return (
            sum(one.released is None for one in self.stopped)
            + sum(not one.is_skipped for one in self.messages)
            + sum(not one.by for one in self.questions)
            + len(self.commits)
        )

    def as_listed(self, tables: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Returns what waits in all targets, or in these, ready for JSON."""
        listed = [as_json(one) for one in self.messages if tables is None or one.is_about(tables)]
        for row in [*self.questions, *self.commits]:
            listed += [row.as_listed()] if tables is None or row.table_name in tables else []
        for one in self.stopped:
            listed += one.as_json() if tables is None or one.table_name in tables else []
        return listed

    def attention(self, lines: Iterable[TableLine]) -> Iterator[Attention]:
        """Yields attention, one for all tables where the same waits; ``lines`` count rows."""
        waits: dict[str, list[Attention]] = defaultdict(list)
        for name, wait in self._by_table(lines):
            waits[name].append(wait)
        alike: dict[tuple[Attention, ...], list[str]] = defaultdict(list)
        for name in sorted(waits):
            alike[tuple(waits[name])].append(name)
        for parts, tables in alike.items():
            yield replace(
                min(parts, key=lambda part: get_args(WaitingKind).index(part.waiting)),
                severity=worst_first(parts)[0].severity,
                text=f"{names(tables)}: {'; '.join(part.text for part in parts)}",
                page=("waiting",),
                objects=tuple(tables),
                details=tuple(
                    (row.table_name, _written(row))
                    for row in self.commits
                    if row.table_name in tables
                ),
            )

    def _by_table(self, lines: Iterable[TableLine]) -> Iterator[tuple[str, Attention]]:
        """Yields each thing that waits, with the name of its table, which its text lacks."""
        for gate in self.stopped:
            wait = Attention(
                "failed", "decision", f"stopped by a gate {gate.describe()}", waiting="gate"
            )
            if gate.released:
                wait = replace(wait, severity="warning", waiting="released")
            yield gate.table_name, wait
        for message in self.messages:
            wait = _of_message(message)
            for name in message.tables:
                yield UNNAMED if name == ANY_TABLE else name, wait
        for row in self.questions:
            yield row.table_name, _of_question(row)
        wait = Attention(
            "warning", "decision", "another program wrote to the target", waiting="external_commit"
        )
        for name in sorted({commit.table_name for commit in self.commits}):
            yield name, wait
        wait = Attention("warning", "decision", "rows are in quarantine", waiting="rows")
        for line in lines:
            if line.in_quarantine:
                yield line.table_name, wait


def _written(commit: Decision) -> str:
    return (commit.reason or "").removeprefix(_COMMIT).replace("+0000)", " UTC)")


def _of_question(row: Decision) -> Attention:
    if row.by:
        return Attention(
            "warning",
            "decision",
            f"answered for the next run to follow ({row.status}): {row.reason}",
            waiting="answered",
        )
    return Attention(
        "failed",
        "decision",
        f"a schema change waits: {row.reason}",
        waiting="schema_change",
    )


def _of_message(message: OpenMessage) -> Attention:
    key = message.row.id
    if not message.is_skipped:
        return Attention(
            "failed", "decision", f"message {key} can't be read: changes wait", waiting="message"
        )
    when = "" if message.is_applied else ", which no run has applied yet"
    return Attention(
        "warning",
        "decision",
        f"may miss a change: message {key} was skipped{when}",
        waiting="skipped",
    )


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
    return Waiting(
        read_stopped(pipeline, ledger, behind),
        messages,
        open_questions(ledger),
        read_commits(ledger),
    )

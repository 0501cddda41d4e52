"""Messages that can't be decoded: kept in quarantine with their bytes, and skipped when an operator
says so.

Landing and apply record such a message, then fail. It blocks the slot, or its table, until
``decide FILE skip`` lets runs go on without it. From then on landing lands it without reading it,
and apply leaves it out. Its tables lack its change until they are copied, or compared with their
source as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from waldelta.decision_kinds import MESSAGE
from waldelta.errors import ConfigError, DecodeError, SlotMissing, WaldeltaError
from waldelta.lake import MESSAGES
from waldelta.lake.ledger import (
    RESOLVED,
    SKIPPED,
    WAITING,
    Decision,
    Decisions,
    Ledger,
    SentMessage,
    now,
)
from waldelta.lake.storage import BOOKKEEPING
from waldelta.lsn import Lsn
from waldelta.pgoutput.byte_readers import unsigned
from waldelta.pgoutput.message_kinds import BY_LETTER, name_of
from waldelta.pgoutput.messages import UnreadMessage, read_truncate
from waldelta.pipeline.job import Job, identity_of
from waldelta.pipeline.targets.lifecycle import target_generations
from waldelta.pipeline.targets.watermarks import Watermarks, messages_applied

log = logging.getLogger(__name__)

# The table isn't known: any target may lack the change.
ANY_TABLE = "*"
OF_MESSAGES = f"{BOOKKEEPING}/{MESSAGES}"
_COMPARED = "its table was compared with the source"


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A message that can't be decoded, the tables that may lack its change, and the operator's
    decision on it.

    ``row`` is its latest quarantine row, for the first of these tables. ``is_applied``: runs have
    applied later changes to all of these tables.
    """

    row: Decision
    tables: tuple[str, ...]
    is_applied: bool = False

    @property
    def is_skipped(self) -> bool:
        """Whether runs go on without it."""
        return self.row.status == SKIPPED

    @property
    def kind(self) -> str:
        """Its kind, by its first byte."""
        first = self.first_byte
        return name_of(first.decode("latin-1")) or f"unknown ({first.hex()})"

    @property
    def first_byte(self) -> bytes:
        """Its first byte; none of an empty message."""
        return (self.original.raw or b"")[:1]

    @property
    def error(self) -> str:
        """Why PostgreSQL or waldelta can't decode the message."""
        return self.row.reason or ""

    @property
    def original(self) -> SentMessage:
        """Its bytes and its position."""
        return (self.row.messages or [])[0]

    @property
    def is_of_any_table(self) -> bool:
        """Whether the message's table is unknown, so that any table may lack its change."""
        return ANY_TABLE in self.tables

    def describe(self) -> str:
        """Returns a run's warning: the message, what it blocks or who skipped it, the remedy."""
        place = (
            f"{self.kind} message {self.row.id} at {Lsn(self.row.lsn or 0)} (transaction"
            f" {self.original.xid})"
        )
        if not self.is_skipped:
            return (
                f"{place} can't be read, and {self._what_waits()} until it is skipped:"
                f" {skip_command(self.row.id)}"
            )
        why = f": {self.row.why}" if self.row.why else ""
        return f"{place} was skipped by {self.row.by}{why}; {self._remedy()}"

    def _what_waits(self) -> str:
        if self.original.batch is None:
            return "no later change lands"
        return (
            "no table gets changes"
            if self.is_of_any_table
            else f"{', '.join(self.tables)} gets no changes"
        )

    def _remedy(self) -> str:
        discard = f"waldelta decide FILE discard --ids {self.row.id} --reason …"
        if self.is_of_any_table:
            return f"any table may lack its change: reconcile --repair all tables, then {discard}"
        if self.tables == (OF_MESSAGES,):
            return f"the table of messages lacks it permanently: {discard} acknowledges that"
        names = ",".join(self.tables)
        return (
            f"{', '.join(self.tables)} lacks its change: reconcile --tables {names} --repair, or"
            f" sync --tables {names} where reconcile can't compare all columns; once it is repaired"
            f" otherwise, {discard}"
        )


def skip_command(message: str) -> str:
    """Returns the command by which an operator lets runs go on without a message."""
    return f"waldelta decide FILE skip --ids {message} --reason … (or skip in the _decide DAG)"


def record_unreadable(job: Job, unread: UnreadMessage, err: DecodeError) -> DecodeError:
    """Store a message that can't be decoded in quarantine, and name it and the remedy in the error.

    A message that is in quarantine already isn't stored again. The targets that it is about are
    read from its bytes. A message that can't be stored is still named.
    """
    tables = tables_of(job, unread)
    subject = "any table" if ANY_TABLE in tables else f"table {', '.join(tables)}"
    detail = (
        f"{err.detail}; transaction {unread.xid}, {subject}; to go on without it:"
        f" {skip_command(unread.id)}"
    )
    try:
        _record(job, unread, err, tables)
    except (WaldeltaError, OSError) as failed:
        log.warning("message %s can't be recorded: %s", unread.id, failed)
    error = DecodeError(err.message, err.field, err.offset, detail, err.row)
    error.unread = unread
    return error


def _record(job: Job, unread: UnreadMessage, err: DecodeError, tables: Sequence[str]) -> None:
    messages = open_messages(job.ledger, job.pipeline.source.slot)
    if any(message.row.id == unread.id for message in messages):
        return
    generations, at = target_generations(job.ledger), now()
    incarnation = job.read_identity().incarnation
    original = SentMessage(unread.batch, unread.seq, unread.lsn, unread.xid, unread.shortened().raw)
    Decisions(job.lake).add(
        [
            # Batch 0, so that a run which applies the message's batch again doesn't replace the
            # row.
            Decision(
                at,
                job.run_id,
                WAITING,
                name,
                generations.get(name, 0),
                0,
                unread.id,
                lsn=unread.lsn,
                reason=f"{err.field} at byte {err.offset}: {err.detail}",
                messages=[original],
                kind=MESSAGE,
                incarnation=incarnation,
            )
            for name in tables
        ]
    )
    log.error("message %s can't be read and is kept in quarantine", unread.id)


def tables_of(job: Job, unread: UnreadMessage) -> tuple[str, ...]:
    """Returns the targets of the relations in a message; ANY_TABLE if no target has one of them."""
    if unread.kind == "M":
        return (OF_MESSAGES,)
    relations = set(_relations(unread))
    tables = sorted(
        n for n, state in job.read_states().items() if not relations.isdisjoint(state.relation_ids)
    )
    return tuple(tables) or (ANY_TABLE,)


def _relations(unread: UnreadMessage) -> Iterator[int]:
    """Yields the oids of the relations that a message names.

    Where it isn't known whether the message was streamed, it is read in both ways.
    """
    for streamed in (False, True) if unread.streamed is None else (unread.streamed,):
        if unread.kind in ("R", "I", "U", "D"):
            if (oid := unsigned(unread.raw, 5 if streamed else 1)) is not None:
                yield oid
        elif unread.kind == "T":
            try:
                yield from read_truncate(unread.raw, streamed=streamed)
            except DecodeError:
                continue


def open_messages(ledger: Ledger, slot: str) -> list[OpenMessage]:
    """Returns messages that wait for a decision, and skipped ones that tables may still lack;
    oldest first.

    A table lacks a message's change until it is copied again, or a repair has compared all of it.
    Where the table isn't known, that lasts until the next slot incarnation.
    """
    rows = Decisions(ledger.lake).messages()
    if not rows:
        return []
    generations = target_generations(ledger)
    try:
        incarnation = identity_of(slot, ledger.slot_events()).incarnation
    except SlotMissing:
        incarnation = ""
    latest = {(row.id, row.table_name, row.generation): row for row in rows}
    decisions: dict[str, list[Decision]] = {}
    for row in latest.values():
        if row.status in (WAITING, SKIPPED) and _is_current(row, generations, incarnation):
            decisions.setdefault(row.id, []).append(row)
    messages = [
        OpenMessage(of[0], tuple(sorted(row.table_name for row in of))) for of in decisions.values()
    ]
    return sorted(messages, key=lambda message: message.row.at)


def with_applied(job: Job, messages: Iterable[OpenMessage]) -> list[OpenMessage]:
    """Returns the messages; ``is_applied`` is set for a skipped message after which runs have
    applied later changes to all its tables.
    """
    all_messages, skipped = list(messages), [message for message in messages if message.is_skipped]
    if not skipped:
        return all_messages
    watermarks, states = Watermarks(job, job.read_identity()), job.read_states()
    ends = watermarks.change_log.reach(watermarks.identity.floor).ends

    def is_applied(message: OpenMessage) -> bool:
        lsn, batch = message.row.lsn or 0, message.original.batch
        if batch is None:  # The message hadn't landed when a run found it.
            kind = BY_LETTER.get(message.first_byte.decode("latin-1"))
            # One that ends its transaction is where the batch ends, others are before that.
            position = lsn if kind is None or kind.end_at is None else lsn - 1
            batch = next((number for number, end in ends.items() if end > position), None)
        if batch is None:
            return False
        if OF_MESSAGES in message.tables:
            return messages_applied(job, watermarks.identity) >= batch
        names = states if message.is_of_any_table else states.keys() & message.tables
        return all(watermarks.of(states[name]) >= batch for name in names)

    return [
        replace(message, is_applied=is_applied(message)) if message.is_skipped else message
        for message in all_messages
    ]


def _is_current(row: Decision, generations: dict[str, int], incarnation: str) -> bool:
    if row.table_name in generations:
        return generations[row.table_name] == row.generation
    return row.incarnation == incarnation


def skipped_messages(job: Job) -> frozenset[tuple[int, str]]:
    """Returns the LSN and the id of each message that an operator skipped.

    Landing stores its bytes in the change log, and doesn't decode it.
    """
    rows = Decisions(job.lake).messages()
    return frozenset((row.lsn or 0, row.id) for row in rows if row.status == SKIPPED)


def skip_messages(job: Job, messages: Collection[str], *, by: str, reason: str | None) -> None:
    """Let runs go on without these messages (ids), either all or none.

    Raises ConfigError for a message that doesn't wait for a decision.
    """
    waiting = {
        m.row.id: m for m in open_messages(job.ledger, job.pipeline.source.slot) if not m.is_skipped
    }
    if unknown := sorted(set(messages) - waiting.keys()):
        raise ConfigError(
            f"no message waits to be skipped: {', '.join(unknown)}: waldelta decide FILE list has"
            " those that do"
        )
    _decide(job, [waiting[message] for message in sorted(set(messages))], SKIPPED, by, reason)


def messages_to_acknowledge(job: Job, messages: Collection[str]) -> list[OpenMessage]:
    """Returns the skipped messages of these ids, ignoring all other ids.

    Raises ConfigError for a message that isn't skipped.
    """
    by_id = {
        message.row.id: message for message in open_messages(job.ledger, job.pipeline.source.slot)
    }
    matches = [by_id[message] for message in sorted(by_id.keys() & set(messages))]
    if waiting := [one.row.id for one in matches if not one.is_skipped]:
        raise ConfigError(
            f"{', '.join(waiting)} can't be read and blocks later changes:"
            f" {skip_command(waiting[0])}"
        )
    return matches


def close_compared(job: Job, tables: Collection[str], moment: datetime) -> None:
    """Record that these tables no longer lack messages that were skipped before a moment.

    At that moment, a comparison of all their rows began.
    """
    messages = [
        replace(message, tables=tuple(name for name in message.tables if name in tables))
        for message in open_messages(job.ledger, job.pipeline.source.slot)
        if message.is_skipped and (message.row.decided_at or message.row.at) < moment
    ]
    _decide(job, [message for message in messages if message.tables], RESOLVED, None, _COMPARED)


def _decide(
    job: Job, messages: Iterable[OpenMessage], status: str, by: str | None, reason: str | None
) -> None:
    if rows := decided(job, messages, status, by, reason):
        Decisions(job.lake).add(rows)


def decided(
    job: Job, messages: Iterable[OpenMessage], status: str, by: str | None, reason: str | None
) -> list[Decision]:
    """Returns the quarantine rows that record a decision on messages, one for each affected
    table.
    """
    generations, at = target_generations(job.ledger), now()
    return [
        replace(
            message.row.decided(status, job.run_id, at, by, reason),
            table_name=name,
            generation=generations.get(name, 0),
        )
        for message in messages
        for name in message.tables
    ]


def notices(job: Job) -> list[str]:
    """Returns every run's warnings about messages that can't be decoded."""
    return [message.describe() for message in open_messages(job.ledger, job.pipeline.source.slot)]


def as_json(message: OpenMessage) -> dict[str, Any]:
    """Returns a message as JSON-ready values: the fields of a quarantine row, and why it can't be
    decoded.
    """
    return message.row.as_listed() | {
        "applied": message.is_applied if message.is_skipped else None,
        "table": ", ".join(message.tables),
        "kind": message.kind,
        "error": message.error,
    }

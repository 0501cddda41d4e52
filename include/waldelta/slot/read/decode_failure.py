"""Finds transactions that PostgreSQL itself can't decode, and reads up to them.

Examples are a row filter that raises, a byte that UTF-8 lacks, or a row whose text exceeds the size
of a message. Every call that reaches the transaction ends with the same error, since WAL is decoded
with the catalogs of its time. So after an error, a drain first reads the WAL before that
transaction in smaller calls, and stops only at the transaction itself.

An error counts as such under two conditions. Its SQLSTATE is about a value or a defect, and reading
only the next transaction, in a session of its own, ends with such an error again. A cancelled
statement, a lost connection, a lock or a full disk never counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import psycopg

from waldelta.config import Source
from waldelta.errors import DecodeError, SlotUnreadable, SourceError, without_values
from waldelta.lsn import Lsn
from waldelta.pgoutput.message_kinds import END_CODES, STREAM_ABORT
from waldelta.pgoutput.messages import read_begin, read_relation
from waldelta.pipeline import Job
from waldelta.postgres import filtered_tables, limited
from waldelta.postgres.walsender import stream_slot
from waldelta.server_errors import sqlstate as codes
from waldelta.server_errors.sqlstate import ServerError
from waldelta.server_errors.texts import DECODED_POSITION
from waldelta.slot.read.peek import PeekBound, call, peek_error, plugin_options, without_streaming

log = logging.getLogger(__name__)

# Classes of SQLSTATE that aren't about decoded data: connections, transactions, privileges,
# resources, locks, operators, disks.
_PASSING = ("08", "25", "28", "40", "53", "55", "57", "58")
# Privileges, and a missing publication, which is an error of its own.
_OTHERS = (codes.INSUFFICIENT_PRIVILEGE, codes.UNDEFINED_OBJECT)
_CORRUPT = "XX"
_UNCONVERTED = ("22021", "22P05")
# The transaction's id is only for an error message, so a transaction of gigabytes isn't read to its
# end.
_IDENTIFY_S = 10.0
# After an error has disappeared on a new attempt this many times, the run ends with it.
_MOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """A decoding error: PostgreSQL's message and SQLSTATE, and the position of the change, if
    known.
    """

    words: str
    sqlstate: str
    at: Lsn | None

    @classmethod
    def of(cls, error: ServerError) -> Refusal | None:
        """Returns the decoding error that a server's error reports; None for an error that isn't
        about decoded data, or that may be temporary.
        """
        if error.sqlstate is None or error.is_one_of(*_PASSING, *_OTHERS):
            return None
        at = position(error.context)
        if at is None and not error.is_one_of(_CORRUPT):
            return None
        return cls(error.shown, error.sqlstate, at)


def position(text: str) -> Lsn | None:
    """Returns the position of the change that an error was about, from PostgreSQL's context text.

    The text has slot, plugin, callback and position in any language.

    >>> context = 'slot "s", output plugin "pgoutput", in the change callback'
    >>> str(position(f"{context}, associated LSN 0/15D76A8"))
    '0/15D76A8'
    """
    match = DECODED_POSITION.search(text)
    return Lsn.parse(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call: its messages, those of them that land, and its last transaction's end,
    if any.
    """

    messages: int
    landing: int
    end: Lsn | None


ReadWhole = Callable[[int], Answer | Refusal]


def last_readable(ask: ReadWhole, first: Answer) -> tuple[Answer, Refusal | None]:
    """Returns the answer up to the transaction that can't be read, and that transaction's refusal.

    ``first`` is the first transaction's answer. ``ask`` is called with numbers of messages that
    double until it is refused, and then between the last two. When a call returns fewer messages
    than asked for, nothing is refused any more, and the refusal is None.
    """
    last, refusal, too_many = first, None, 0
    while not too_many or too_many - last.messages > 1:
        limit = (last.messages + too_many) // 2 if too_many else 2 * max(last.messages, 1)
        answer = ask(limit)
        if isinstance(answer, Refusal):
            refusal, too_many = answer, limit
        elif answer.messages < limit:
            return answer, None
        else:
            last = answer
    return last, refusal


@dataclass
class Reading:
    """How a drain reads the slot: as configured, and after an error only as far as is known to be
    readable.

    After an error it reads without streaming, because an open transaction that can't be decoded may
    still be rolled back.
    """

    job: Job
    source: Source = field(init=False)
    _upto: Lsn | None = None
    _most: int | None = None
    _attempts: int = 0

    def __post_init__(self) -> None:
        self.source = self.job.pipeline.source

    def within(self, bound: PeekBound) -> PeekBound:
        """Returns a bound, made smaller by what earlier calls showed can't be decoded."""
        if self._upto is not None:
            bound = replace(bound, upto_lsn=min(bound.upto_lsn, self._upto))
        if self._most is not None:
            bound = replace(bound, upto_nchanges=min(self._most, bound.upto_nchanges or self._most))
        return bound

    def answered(self) -> None:
        """Remove the limits after an answer, so that the next call may go further again."""
        self._upto, self._most, self._attempts = None, None, 0

    def refused(self, err: SourceError, bound: PeekBound) -> SlotUnreadable | None:
        """Returns the error for what can't be read next, or None when something readable comes
        before it.

        In the latter case the next call is limited to what is readable. Raises ``err`` when it is
        about anything else, and errors that prevent reading the slot.
        """
        if type(err) is not SourceError:  # The error has a name of its own.
            raise err
        self.source, self._upto, self._most = without_streaming(self.source), None, None

        ask = partial(_read_whole, self.job, self.source, bound)
        first = ask(1)
        if isinstance(first, Refusal):
            return _unreadable(self.job, self.source, first)
        self._attempts += 1
        if self._attempts >= _MOST_ATTEMPTS:
            raise err
        at = position(str(err))
        if at is not None and first.end is not None and at > first.end:
            # Everything that was committed before the change was written comes before it.
            self._upto = at
        else:
            last, refusal = last_readable(ask, first)
            if refusal is not None and not last.landing:
                return _unreadable(self.job, self.source, refusal)
            self._most = last.messages if refusal is not None else None
        # PostgreSQL's message is left out, because it may contain values of a row.
        log.warning(
            "slot=%s can't be decoded at %s: the run first reads the changes before that position",
            self.source.slot,
            "an unknown position" if at is None else at,
        )
        return None


def _read_whole(job: Job, source: Source, bound: PeekBound, most: int) -> Answer | Refusal:
    """Returns the answer for complete transactions with at least ``most`` messages.

    It uses a new session, since an error ends decoding in a session.
    """
    query = _ANSWER.format(
        changes=call("peek", source, bound.upto_lsn, most, "lsn, data"),
        abort=STREAM_ABORT,
        ends=END_CODES,
    )
    with job.source.connect_slot("probe") as connection:
        try:
            with limited(connection, "statement_timeout", bound.statement_timeout_s):
                ((messages, landing, end),) = connection.execute(query.encode()).fetchall()
        except psycopg.Error as err:
            if (refusal := Refusal.of(ServerError.of(err))) is not None:
                return refusal
            if err.sqlstate is None:  # The connection was lost.
                raise
            raise peek_error(source.slot, ServerError.of(err)) from None
    return Answer(messages, landing, Lsn.parse(end) if end is not None else None)


# When reading complete transactions, landing discards every Stream Abort (pgoutput.envelope). The
# position of a transaction's last message, or its prepare's, is its end.
_ANSWER = """
select count(*),
       count(*) filter (where get_byte(data, 0) <> {abort}),
       (max(lsn) filter (where get_byte(data, 0) in ({ends})))::text
from ({changes}) as changes
"""


def _unreadable(job: Job, source: Source, refusal: Refusal) -> SlotUnreadable:
    names = _identify(job, source)
    where = f"at {refusal.at}" if refusal.at is not None else "at its current position"
    details = [*names, *([] if names and "table" in names[-1] else _suspects(job, refusal))]
    of = f" ({', '.join(details)})" if details else ""
    return SlotUnreadable(
        f"slot {source.slot!r} can't be decoded {where}{of}: PostgreSQL says {refusal.words!r}"
        f" (SQLSTATE {refusal.sqlstate}). Everything before that transaction has landed, and"
        " nothing after it can be read: PostgreSQL decodes WAL with the catalogs of its time, so a"
        " corrected row or filter helps only later changes: correct it, then run resync"
    )


def _identify(job: Job, source: Source) -> list[str]:
    """Returns the transaction, and the table if it was sent last before the error, as far as known.

    The replication protocol sends what was decoded before an error, but a function's whole answer
    is lost.
    """
    transaction, table = "", ""
    try:
        for message in stream_slot(
            job.source.slot_conninfo, source.slot, plugin_options(source), _IDENTIFY_S
        ):
            kind = message[:1]
            if kind in (b"B", b"b"):
                begin = read_begin(message)
                transaction, table = f"transaction {begin.xid}, commit at {Lsn(begin.lsn)}", ""
            elif kind == b"R":
                relation = read_relation(message)
                table = f"table {relation.schema}.{relation.name}"
            elif kind in (b"C", b"P"):
                return []  # The transaction was decoded.
            elif kind not in (b"Y", b"O"):
                table = ""
    except (
        SourceError,
        DecodeError,
        psycopg.Error,
    ) as err:  # These errors only affect the description of a known error.
        log.info(
            "slot=%s the transaction that can't be decoded is unknown: %s",
            source.slot,
            without_values(err),
        )
    return [text for text in (transaction, table) if text]


def _suspects(job: Job, refusal: Refusal) -> list[str]:
    """Returns tables that an error about a value may concern: those that have a row filter now."""
    if not refusal.sqlstate.startswith("22") or refusal.sqlstate in _UNCONVERTED:
        return []
    with job.source.connect("probe") as connection:
        tables = filtered_tables(connection, job.pipeline.source.publication_names)
    return [f"tables with a row filter: {', '.join(tables)}"] if tables else []

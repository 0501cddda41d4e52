"""Compares what the slot still holds with what has landed, before the slot is moved."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import psycopg

from waldelta.config import Source
from waldelta.errors import ConsumeMismatch, PublicationGone
from waldelta.lake.changelog import Transactions
from waldelta.lake.ledger import SlotMove
from waldelta.lsn import Lsn
from waldelta.postgres import Connection
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.read import ReadRequest, peek_error
from waldelta.slot.read.peek import whole, with_options
from waldelta.slot.verify.slot_count import agree, counted

log = logging.getLogger(__name__)


ORIGINS_SINCE = 160000  # The first version with the option, in the form of server_version.


@dataclass(frozen=True, slots=True)
class VerifiedRange:
    """Landed batches that were read from the slot with the same options, from ``begins`` on.

    ``first`` and ``last`` are their numbers, ``messages`` their messages in all. ``request``
    holds the options; it is None for batches whose commit Delta's log doesn't have any more.
    """

    request: ReadRequest | None
    begins: int
    first: int
    last: int
    messages: int = 0
    transactions: Transactions = field(default_factory=Transactions)

    def __add__(self, behind: VerifiedRange) -> VerifiedRange:
        """Return this range joined with the one that was read after it."""
        return replace(
            self,
            last=behind.last,
            messages=self.messages + behind.messages,
            transactions=self.transactions + behind.transactions,
        )


def check_landed(
    connection: Connection, source: Source, move: SlotMove, landed: Transactions
) -> None:
    """Raise ConsumeMismatch when what the slot holds up to ``move.lsn`` isn't what has landed.

    The slot isn't moved.
    """
    held = _slot_messages(connection, source, move.lsn)
    if not agree(connection, held, landed):
        raise _mismatch(source, move, held, landed, f"batch {move.batch}")


def check_behind(
    connection: Connection, source: Source, move: SlotMove, verified: VerifiedRange, position: int
) -> bool:
    """Check what other runs landed after the slot, which is at ``position`` or earlier.

    Their pipeline files may have requested more, or less, than this one's. The caller must use
    ``connection`` for nothing else. Returns whether it was compared: there may be nothing to
    compare, or no way to do it.
    """
    if move.lsn <= verified.begins and verified.transactions == Transactions():
        return False
    try:
        _check_range(connection, source, move, verified, position)
    except psycopg.errors.UndefinedObject as err:
        # Before PostgreSQL 18, decoding fails once a publication in the list is gone; what landed
        # is durable.
        if not isinstance(peek_error(source.slot, ServerError.of(err)), PublicationGone):
            raise
        log.warning(
            "slot %s moves past %s..%s without a comparison: %s",
            *(move.slot, Lsn(verified.begins), Lsn(move.lsn), err),
        )
        return False
    return True


def _check_range(
    connection: Connection, source: Source, move: SlotMove, verified: VerifiedRange, position: int
) -> None:
    differing: Transactions | None = None
    for then in _as_then(connection, source, verified):
        held, landed = _slot_messages(connection, then, move.lsn), verified.transactions
        if verified.begins > position:
            # The slot returns everything from its position on, including what an earlier request
            # skipped.
            landed += _slot_messages(connection, then, verified.begins)
        if agree(connection, held, landed):
            return
        differing = differing or held
    first, last = verified.first, verified.last
    batches = f"batch {last}" if first == last else f"batches {first} to {last}"
    raise _mismatch(source, move, differing or Transactions(), landed, batches)


def _as_then(connection: Connection, source: Source, verified: VerifiedRange) -> Iterator[Source]:
    if verified.request is not None:
        yield verified.request.put_to(source)
    else:
        yield source
        yield from _read_otherwise(connection, source)


def _read_otherwise(connection: Connection, source: Source) -> Iterator[Source]:
    """Yield the source with other options that decide what a slot returns."""
    now = source.options
    origins = ("any", "none") if connection.info.server_version >= ORIGINS_SINCE else (now.origin,)
    for messages, origin in itertools.product((False, True), origins):
        if (messages, origin) != (now.messages, now.origin):
            yield with_options(source, messages=messages, origin=origin)


def _mismatch(
    source: Source, move: SlotMove, held: Transactions, landed: Transactions, batches: str
) -> ConsumeMismatch:
    return ConsumeMismatch(
        f"slot {source.slot!r} holds {held} up to {Lsn(move.lsn)}, but landed {landed} in"
        f" {batches}; nothing of that was consumed: compare the slot's changes with the change log"
        " (docs/how-to/recover-a-slot.md#consumemismatch); to start over, run teardown, setup and"
        " resync"
    )


def _slot_messages(connection: Connection, source: Source, upto: int) -> Transactions:
    return counted(connection, "peek", whole(source), Lsn(upto))

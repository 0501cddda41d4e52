"""Moving the slot: verified consumption of what has landed, and idle moves; every move is preceded by an intent.

The order of effects is the whole point: the batch is durable in the lake, the intent is durable in the ledger,
a temporary copy of the slot keeps a way back, and only then does PostgreSQL forget the changes.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql

from waldelta.asked import Asked
from waldelta.binary_count import WORTH_IT, is_plain, is_refused
from waldelta.errors import (
    ConsumeMismatch,
    LateWriter,
    NoFreeSlot,
    PublicationGone,
    SlotInUse,
    SlotStuck,
    SourceUnreachable,
)
from waldelta.fault import fault_point
from waldelta.ledger import Ledger
from waldelta.ledger_rows import SlotMove, now
from waldelta.lsn import Lsn, LsnRange
from waldelta.peek import NO_ROOM, call, in_binary, name_of_copy, peek_error, short_name, whole
from waldelta.pipeline_file import Source
from waldelta.tally import PreparedRows, Transactions

log = logging.getLogger(__name__)

Connection = psycopg.Connection[tuple[Any, ...]]
Sessions = Callable[[], AbstractContextManager[Connection]]

ORIGINS_SINCE = 160000  # the option, as server_version has it
# A message that isn't transactional has kind 0: it may lie beyond the last transaction, or between two calls.
_KIND = "lsn, xid, case when get_byte(data, 0) = 77 and get_byte(data, 1) = 0 then 0 else get_byte(data, 0) end as kind"
# The kinds by the fields of Transactions: Commit, Prepare, Commit Prepared, Rollback Prepared, Insert, Update, Delete, Truncate, Message.
_FIELDS = {
    67: "commits", 80: "prepares", 75: "prepared_commits", 114: "prepared_rollbacks",
    73: "inserts", 85: "updates", 68: "deletes", 84: "truncates", 77: "messages",
}  # fmt: skip
# One row for each kind, of each prepared transaction: the server evaluates next to nothing for each message.
_TALLY = """
select {xid}, kind, count(*),
       coalesce(sum(xid::text::bigint) filter (where kind in (67, 80, 75, 114)), 0),
       coalesce(sum(lsn - '0/0'::pg_lsn) filter (where kind in (67, 80, 75, 114)), 0)
from {changes} as changes
group by 1, 2
"""
# Rows of transactions prepared here are told apart from all others.
_PREPARED_HERE = """
with changes as materialized ({changes}),
     prepared as (select distinct xid from changes where kind = 80)
"""
_XID_PREPARED = (
    "case when kind in (73, 85, 68, 84, 77) and xid in (select xid from prepared) then xid::text::bigint end"
)


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """Which slot, on which server, in which life; stamped on every move."""

    slot: str
    system_identifier: str
    timeline: int
    incarnation: str

    @property
    def app_id(self) -> str:
        """Delta's txnAppId of everything this slot lands: a recreated slot is another writer."""
        return f"waldelta:{self.system_identifier}:{self.slot}:{self.incarnation}"


def consume(
    connection: Connection,
    source: Source,
    ledger: Ledger,
    move: SlotMove,
    landed: Transactions,
    sessions: Sessions | None = None,
) -> Transactions:
    """Consume the slot up to ``move.lsn`` and verify that this is what has landed. ``sessions`` opens more like ``connection``.

    Raises ConsumeMismatch when the transactions consumed aren't those landed, and makes the slot's copy permanent so that
    nothing is lost (with ``acknowledge: peek`` nothing has been consumed then); SlotStuck when the slot didn't move, SlotInUse
    when somebody else reads it.
    """
    fault_point("consume.landed")
    by_get = source.options.acknowledge == "get"
    ledger.append(replace(move, at=now(), event="intent", compared_after=by_get))
    fault_point("consume.intended")
    if by_get:
        consumed = _get_verified(connection, source, move, landed, sessions)
        ledger.append(replace(move, at=now(), event="compared"))
    else:
        if source.options.acknowledge == "peek":
            check_landed(connection, source, move, landed)
        _advance(connection, source.slot, move.lsn)
        consumed = landed
    fault_point("consume.moved")
    _check_moved(connection, source.slot, move.lsn)
    return consumed


@dataclass(frozen=True, slots=True)
class Stretch:
    """What landed of WAL that was read by the same request, from ``begins`` on: of the batches from the first to the last.

    ``asked`` is that request; None: it was read by a version that didn't tell. ``messages`` are all that landed.
    """

    asked: Asked | None
    begins: int
    batches: tuple[int, int]
    messages: int = 0
    transactions: Transactions = field(default_factory=Transactions)

    def __add__(self, behind: Stretch) -> Stretch:
        """With what was read behind it, likewise."""
        batches, messages = (self.batches[0], behind.batches[1]), self.messages + behind.messages
        return Stretch(self.asked, self.begins, batches, messages, self.transactions + behind.transactions)


def check_landed(connection: Connection, source: Source, move: SlotMove, landed: Transactions) -> None:
    """Raises ConsumeMismatch when what the slot holds up to ``move.lsn`` isn't what has landed; the slot stays."""
    held = _held(connection, source, move.lsn)
    if not _agree(connection, held, landed):
        raise _mismatch(source, move, held, landed, f"batch {move.batch}")


def check_behind(connection: Connection, source: Source, move: SlotMove, stretch: Stretch, stands: int) -> bool:
    """The same of what other runs landed behind the slot, which ``stands`` there or before; ``connection`` is for nothing else.

    Their pipeline files may have asked for more, or less, than this one's. Returns whether it was compared: there may be nothing
    to compare, or no way.
    """
    if move.lsn <= stretch.begins and stretch.transactions == Transactions():
        return False
    try:
        _check_stretch(connection, source, move, stretch, stands)
    except psycopg.errors.UndefinedObject as err:
        # Before PostgreSQL 18 nothing is decoded any more once a publication of the list is gone; what landed is durable.
        if not isinstance(peek_error(source.slot, str(err)), PublicationGone):
            raise
        between = LsnRange(Lsn(stretch.begins), Lsn(move.lsn))
        log.warning("slot %s moves over %s without a comparison: %s", move.slot, between, err)
        return False
    return True


def _check_stretch(connection: Connection, source: Source, move: SlotMove, stretch: Stretch, stands: int) -> None:
    differing: Transactions | None = None
    for then in _as_then(connection, source, stretch):
        held, landed = _held(connection, then, move.lsn), stretch.transactions
        if stretch.begins > stands:
            # The slot gives all from where it stands, by this request also what another one passed over.
            landed += _held(connection, then, stretch.begins)
        if _agree(connection, held, landed):
            return
        differing = differing or held
    first, last = stretch.batches
    batches = f"batch {last}" if first == last else f"batches {first} to {last}"
    raise _mismatch(source, move, differing or Transactions(), landed, batches)


def _as_then(connection: Connection, source: Source, stretch: Stretch) -> Iterator[Source]:
    if stretch.asked is not None:
        yield stretch.asked.put_to(source)
    else:
        yield source
        yield from _asked_otherwise(connection, source)


def _mismatch(
    source: Source, move: SlotMove, held: Transactions, landed: Transactions, batches: str
) -> ConsumeMismatch:
    return ConsumeMismatch(
        f"slot {source.slot!r} holds {held} up to {Lsn(move.lsn)}, but landed {landed} in {batches}; nothing was "
        "consumed of that: compare the slot's changes with the change log (docs/consume.md); teardown, setup and resync "
        "start afresh"
    )


def _held(connection: Connection, source: Source, upto: int) -> Transactions:
    return _counted(connection, "peek", whole(source), Lsn(upto))


def _counted(connection: Connection, verb: str, source: Source, upto: Lsn) -> Transactions:
    """What a call of the slot functions gives up to a position, added up on the server.

    Of the ``whole`` source: what is counted is the same whatever the landed chunks looked like.
    """
    with _named_use(source.slot):
        return _count(connection, call(verb, source, upto, None, _KIND), two_phase=source.options.two_phase)


def _asked_otherwise(connection: Connection, source: Source) -> Iterator[Source]:
    """The source by other options that decide on what a slot gives."""
    now = source.options
    origins = ("any", "none") if connection.info.server_version >= ORIGINS_SINCE else (now.origin,)
    for messages, origin in itertools.product((False, True), origins):
        if (messages, origin) != (now.messages, now.origin):
            options = now.model_copy(update={"messages": messages, "origin": origin})
            yield source.model_copy(update={"options": options})


def move_idle_slot(connection: Connection, slot: str, ledger: Ledger, move: SlotMove) -> None:
    """Move a slot over WAL that was read and holds nothing for us, so that it doesn't hold the WAL back."""
    ledger.append(replace(move, at=now(), event="intent"))
    fault_point("idle.intended")
    _advance(connection, slot, move.lsn)
    fault_point("idle.moved")
    _check_moved(connection, slot, move.lsn)


def confirmed_lsn(connection: Connection, slot: str) -> Lsn:
    """The slot's confirmed_flush_lsn."""
    row = connection.execute(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", (slot,)
    ).fetchone()
    if row is None or row[0] is None:
        raise SlotStuck(f"slot {slot!r} has no confirmed position: check pg_replication_slots")
    return Lsn.parse(row[0])


def _get_verified(
    connection: Connection, source: Source, move: SlotMove, landed: Transactions, sessions: Sessions | None
) -> Transactions:
    _check_alone(connection, move)
    keep = _copy_slot(connection, source.slot)
    fault_point("consume.copied")
    consumed = None
    if sessions is not None and landed.changes >= WORTH_IT and not source.options.binary:
        consumed = _get_in_binary(sessions, source, move, _Kept(keep, _backend_pid(connection)))
        if consumed is None:
            _check_alone(connection, move)
    if consumed is None:
        consumed = _counted(connection, "get", whole(source), Lsn(move.lsn))
    fault_point("consume.got")
    if not _agree(connection, consumed, landed):
        differs = f"slot {source.slot!r}: consumed {consumed} but landed {landed} in batch {move.batch}"
        # Before anything else may fail: whoever looks for it later finds it here.
        log.error(differs)
        try:
            kept = _keep_copy(connection, source.slot, keep)
        except psycopg.Error as err:
            raise ConsumeMismatch(
                f"{differs}; the copy of the slot that holds these changes could not be kept ({err}): reconcile tells what differs "
                "from the source; teardown, setup and resync start afresh"
            ) from err
        raise ConsumeMismatch(
            f"{differs}; the slot {kept!r} still holds these changes: compare them with the change log, then drop one of "
            "the two slots"
        )
    # Where its session was lost while another one consumed, the copy is gone already, and what was found stands.
    with suppress(psycopg.OperationalError):
        connection.execute("select pg_drop_replication_slot(%s)", (keep,))
    return consumed


@dataclass(frozen=True, slots=True)
class _Kept:
    """The copy that is the way back, and the backend whose session holds it."""

    name: str
    pid: int


def _backend_pid(connection: Connection) -> int:
    ((pid,),) = connection.execute("select pg_backend_pid()").fetchall()
    return int(pid)


def _check_kept(session: Connection, kept: _Kept) -> None:
    """Raises SourceUnreachable where the copy of the slot isn't to be seen from this session: its own may be lost, or on another server,
    as behind an address that has moved to a standby which was promoted.
    """
    query = "select 1 from pg_replication_slots where slot_name = %s and temporary and active_pid = %s"
    if session.execute(query, (kept.name, kept.pid)).fetchone() is None:
        raise SourceUnreachable(
            f"the session that holds {kept.name!r}, the way back, was lost before anything was consumed: the changes are landed; run again"
        )


def _check_alone(connection: Connection, move: SlotMove) -> None:
    """Raises LateWriter when another run has moved the slot meanwhile: what is got behind it is nothing, which is no mismatch."""
    if confirmed_lsn(connection, move.slot).value >= move.lsn:
        raise LateWriter(f"slot {move.slot!r} was moved to {Lsn(move.lsn)} by another run meanwhile: run again")


def _get_in_binary(sessions: Sessions, source: Source, move: SlotMove, kept: _Kept) -> Transactions | None:
    """The same call, for whose answer nobody has to print values; None where they have to be, and nothing was given away.

    In a session of its own: nothing is decoded in one any more in which that has failed, and the copy, which is temporary, goes with any
    error of its own session.
    """
    with sessions() as session:
        if not is_plain(session, source.publication_names):
            return None
        _check_kept(session, kept)
        try:
            return _counted(session, "get", in_binary(whole(source)), Lsn(move.lsn))
        except psycopg.Error as err:  # the slot moves behind the last message
            if not is_refused(err):
                raise
            log.info("slot=%s is counted by the texts of its values: %s", source.slot, err.diag.message_primary)
            return None


def _agree(connection: Connection, one: Transactions, other: Transactions) -> bool:
    rolled_back = _rolled_back(connection, [rows.xid for rows in (*one.in_prepared, *other.in_prepared)])
    return one.without(rolled_back) == other.without(rolled_back)


def _count(connection: Connection, changes: str, *, two_phase: bool) -> Transactions:
    """What the server gives away, added up there; rows of prepared transactions one transaction each."""
    if two_phase:
        query = _PREPARED_HERE.format(changes=changes) + _TALLY.format(xid=_XID_PREPARED, changes="changes")
    else:
        query = _TALLY.format(xid="null::bigint", changes=f"({changes})")
    sums: Counter[str] = Counter()
    in_prepared: dict[int, Counter[str]] = {}
    for xid, kind, rows, xid_sum, lsn_sum in connection.execute(query.encode()):
        counted = {_FIELDS[kind]: int(rows)} if kind in _FIELDS else {}
        if xid is None:
            sums.update(counted, xid_sum=int(xid_sum), end_lsn_sum=int(lsn_sum))
        else:
            in_prepared.setdefault(int(xid), Counter()).update(counted)
    prepared = (PreparedRows(xid, **of) for xid, of in in_prepared.items())
    return Transactions(**sums, in_prepared=tuple(sorted(prepared)))


def _rolled_back(connection: Connection, xids: Sequence[int]) -> set[int]:
    """Those of some recent transactions that were rolled back.

    Of a prepared transaction that is rolled back before, or while, it is decoded, pgoutput sends all its rows, some or none, as
    it happens to notice.
    """
    if not xids:
        return set()
    rows = connection.execute(
        """
        select x
        from unnest(%s::bigint[]) as x,
             lateral (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next) as s
        where pg_xact_status((next - (next - x) %% (1::bigint << 32))::text::xid8) = 'aborted'
        """,
        (list(xids),),
    )
    return {int(xid) for (xid,) in rows.fetchall()}


def check_no_mismatch(connection: Connection, slot: str) -> None:
    """Raises ConsumeMismatch while the copy of an earlier mismatch is kept: no run goes on over what it stands for."""
    if (kept := kept_copy(connection, slot)) is not None:
        raise ConsumeMismatch(
            f"the slot {kept!r} is left from a mismatch and holds WAL: compare its changes with the change log, then drop it "
            f"with select pg_drop_replication_slot('{kept}')"
        )


def kept_copy(connection: Connection, slot: str) -> str | None:
    """The name of the copy that an earlier mismatch left, if there is one."""
    kept = name_of_kept(slot)
    found = connection.execute("select 1 from pg_replication_slots where slot_name = %s", (kept,)).fetchone()
    return kept if found is not None else None


def name_of_kept(slot: str) -> str:
    """What the copy of a slot is called that a mismatch leaves."""
    return f"{short_name(slot)}_mismatch"


@contextmanager
def _named_use(slot: str) -> Iterator[None]:
    """Name what the server says when somebody else reads the slot at that moment."""
    try:
        yield
    except (psycopg.errors.ObjectInUse, *NO_ROOM) as err:
        raise peek_error(slot, str(err)) from err


def _copy_slot(connection: Connection, slot: str) -> str:
    name = name_of_copy(slot)
    leftover = connection.execute(_HOLDER, (name,)).fetchone()
    if leftover is not None:
        raise SlotInUse(
            f"a slot {name!r} is there already ({leftover[0]}), which this run would make to keep a way back; nothing was "
            f"consumed, the changes are landed: end its session, or drop it (select pg_drop_replication_slot('{name}'))"
        )
    # After a mismatch the copy is copied once more, to stay: without room for that, nothing would be left of the changes.
    free = "select current_setting('max_replication_slots')::int - count(*) >= 2 from pg_replication_slots"
    if connection.execute(free).fetchone() != (True,):
        raise NoFreeSlot(
            f"two free replication slots are needed to consume slot {slot!r}, for a copy that keeps a way back and for keeping "
            "it after a mismatch: drop unused slots, or raise max_replication_slots; nothing was consumed, the changes are "
            "landed"
        )
    connection.execute("select pg_copy_logical_replication_slot(%s, %s, true)", (slot, name))
    return name


def _keep_copy(connection: Connection, slot: str, temporary: str) -> str:
    kept = name_of_kept(slot)
    connection.execute("select pg_copy_logical_replication_slot(%s, %s, false)", (temporary, kept))
    return kept


def _advance(connection: Connection, slot: str, lsn: int) -> None:
    if confirmed_lsn(connection, slot).value >= lsn:
        return
    statement = sql.SQL("select pg_replication_slot_advance({}, {}::pg_lsn)")
    with _named_use(slot):
        connection.execute(statement.format(sql.Literal(slot), sql.Literal(str(Lsn(lsn)))))


def _check_moved(connection: Connection, slot: str, lsn: int) -> None:
    confirmed = confirmed_lsn(connection, slot)
    if confirmed.value < lsn:
        raise SlotStuck(
            f"slot {slot!r} should have moved to {Lsn(lsn)} but stands at {confirmed}: WAL piles up on the server; check "
            f"pg_replication_slots and the server's log"
        )


_HOLDER = """
select coalesce('of pid ' || s.active_pid || coalesce(' (' || nullif(a.application_name, '') || ')', ''), 'of no session')
from pg_replication_slots s
left join pg_stat_activity a on a.pid = s.active_pid
where s.slot_name = %s
"""

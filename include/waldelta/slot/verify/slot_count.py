"""Counts, on the server, what the slot functions return; each transaction counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import psycopg

from waldelta.config import Source
from waldelta.errors import raised_as
from waldelta.lake.changelog import Transactions
from waldelta.lake.changelog.transaction_counts import PreparedRows
from waldelta.lsn import Lsn
from waldelta.pgoutput.envelope import STREAM_ABORT
from waldelta.postgres import Connection
from waldelta.postgres.published_tables import MEMBERS
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.read import peek_error
from waldelta.slot.read.peek import NO_ROOM, call

# A message that isn't transactional gets kind 0: it may come after the last transaction, or between
# two calls. A message that can't be read may have any length.
_KIND = (
    "lsn, xid, case when length(data) = 0 then 0 when get_byte(data, 0) = 77 and substr(data, 2, 1)"
    " = '\\x00' then 0 else get_byte(data, 0) end as kind"
)
# The kinds by the fields of Transactions: Commit, Prepare, Commit Prepared, Rollback Prepared,
# Insert, Update, Delete, Truncate, Message.
_FIELDS = {
    67: "commits", 80: "prepares", 75: "prepared_commits", 114: "prepared_rollbacks",
    73: "inserts", 85: "updates", 68: "deletes", 84: "truncates", 77: "messages",
}  # fmt: skip
# One row for each kind, and for each prepared transaction: the server evaluates very little per
# message.
_COUNTED = """
select {xid}, kind, count(*),
       coalesce(sum(xid::text::bigint) filter (where kind in (67, 80, 75, 114)), 0),
       coalesce(sum(lsn - '0/0'::pg_lsn) filter (where kind in (67, 80, 75, 114)), 0)
from {changes} as changes
group by 1, 2
"""
# Rows of transactions prepared in this range are separated from all others.
_WITH_PREPARED = """
with changes as materialized ({changes}),
     prepared as (select distinct xid from changes where kind = 80)
"""
# The server's answer is read up to the first message that counts.
_FIRST = """
with changes as materialized ({changes})
select (select data from changes where substr(data, 1, 1) <> '\\x{abort:02x}' limit 1),
       (select count(*) from (select from changes limit {most}) as given)
"""
_MORE = 16
_XID_PREPARED = (
    "case when kind in (73, 85, 68, 84, 77) and xid in (select xid from prepared) then"
    " xid::text::bigint end"
)
# For fewer changes, the check and the extra session don't pay.
BINARY_COUNT_FROM = 100_000


def counted(connection: Connection, verb: str, source: Source, upto: Lsn) -> Transactions:
    """Return what a call of the slot functions returns up to a position, counted on the server.

    It reads the ``whole`` source: the counts are the same however the landed messages were
    streamed. Rows of prepared transactions are counted by transaction.
    """
    changes = call(verb, source, upto, None, _KIND)
    if source.options.two_phase:
        query = _WITH_PREPARED.format(changes=changes) + _COUNTED.format(
            xid=_XID_PREPARED, changes="changes"
        )
    else:
        query = _COUNTED.format(xid="null::bigint", changes=f"({changes})")
    sums: Counter[str] = Counter()
    in_prepared: dict[int, Counter[str]] = {}
    with named_use(source.slot):
        counts = connection.execute(query.encode()).fetchall()
    for xid, kind, rows, xid_sum, lsn_sum in counts:
        of_kind = {_FIELDS[kind]: int(rows)} if kind in _FIELDS else {}
        if xid is None:
            sums.update(of_kind, xid_sum=int(xid_sum), end_lsn_sum=int(lsn_sum))
        else:
            in_prepared.setdefault(int(xid), Counter()).update(of_kind)
    prepared = (PreparedRows(xid, **of) for xid, of in in_prepared.items())
    return Transactions(**sums, in_prepared=tuple(sorted(prepared)))


def agree(connection: Connection, one: Transactions, other: Transactions) -> bool:
    """Return whether both are equal, except for prepared transactions that were rolled back."""
    rolled_back = _rolled_back(
        connection, [rows.xid for rows in (*one.in_prepared, *other.in_prepared)]
    )
    return one.without(rolled_back) == other.without(rolled_back)


def _rolled_back(connection: Connection, xids: Sequence[int]) -> set[int]:
    """Return those of some recent transactions that were rolled back.

    When a prepared transaction is rolled back before, or while, it is decoded, pgoutput may send
    all of its rows, some or none.
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


def first_message(connection: Connection, source: Source, upto: Lsn) -> bytes | None:
    """Return the first message that the slot has for us up to a position; None without any.

    It reads the ``whole`` source, of which landing discards every Stream Abort (envelope). The
    server's limit counts those, so more messages are requested while nothing else comes.
    """
    most = 1
    while True:
        query = _FIRST.format(
            changes=call("peek", source, upto, most, "data"), abort=STREAM_ABORT, most=most
        )
        ((found, given),) = connection.execute(query.encode()).fetchall()
        first = bytes(found) if found is not None else None
        if first is not None or given < most:
            return first
        most *= _MORE


def named_use(slot: str) -> AbstractContextManager[None]:
    """Name the server's error when another process reads the slot at that moment."""
    return raised_as(
        lambda err: peek_error(slot, ServerError.of(err)), (psycopg.errors.ObjectInUse, *NO_ROOM)
    )


def is_plain(connection: psycopg.Connection[Any], publication_names: Sequence[str]) -> bool:
    """Return whether all published columns have types whose binary form comes from PostgreSQL
    itself.

    Printing values takes a tenth of decoding. But a send function may refuse a value that an output
    function prints, and an error during decoding is dangerous: before PostgreSQL 15.15, 16.11, 17.7
    and 18.1 the next decoding in the same session may crash the server ("Fix
    access-to-already-freed-memory issue in pgoutput"). So the catalogs are checked first.

    Types without a binary form are fine, too: their values are sent as text. Arrays, rows and
    ranges are excluded, because they may contain other types.
    """
    row = connection.execute(
        _UNPLAIN.encode(), {"publications": list(publication_names)}
    ).fetchone()
    return row == (False,)


def is_refused(err: psycopg.Error) -> bool:
    """Return whether an error is about values, for example of a column that was dropped since.

    Errors about the server, the slot or privileges aren't.
    """
    others = (
        psycopg.OperationalError
        | psycopg.errors.InsufficientPrivilege
        | psycopg.errors.UndefinedObject
    )
    return not isinstance(err, others)


# PostgreSQL's own functions have oids below 16384 (FirstNormalObjectId). Domains and enums use
# those of their base types.
_UNPLAIN = (
    MEMBERS
    + """
select exists (
    select
    from member m
    join pg_attribute a on a.attrelid = m.relid and a.attnum > 0 and not a.attisdropped
    join pg_type t on t.oid = a.atttypid
    where t.typsend::oid >= 16384
       or t.typsend::oid in (
           'pg_catalog.array_send'::regproc, 'pg_catalog.record_send'::regproc,
           'pg_catalog.range_send'::regproc,
           'pg_catalog.multirange_send'::regproc
       )
)
"""
)

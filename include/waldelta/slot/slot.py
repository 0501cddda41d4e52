"""The logical replication slot: its state on the server, whether it is usable, creating and
dropping it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime

import psycopg
from psycopg import sql

from waldelta.errors import (
    ConfigError,
    SlotForeign,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SourceError,
    StandbyAway,
    TransactionsStillOpen,
)
from waldelta.lsn import Lsn
from waldelta.postgres import Connection, fetch, limited, open_transactions
from waldelta.slot.read.peek import reader_name

PLUGIN = "pgoutput"
log = logging.getLogger(__name__)

CREATE_TIMEOUT_S = 60
# How to keep a slot on a standby from being lost again, by reason. PostgreSQL reports the reason
# from version 17 on.
_CONFLICT = (
    "check that the standby has hot_standby_feedback on and a primary_slot_name"
    " (docs/how-to/read-from-a-standby.md)"
)
_PREVENTIONS = {
    "rows_removed": _CONFLICT,
    "conflicting": f"{_CONFLICT}, and the primary wal_level logical",
    "wal_level_insufficient": "keep the primary's wal_level logical",
    "idle_timeout": "raise idle_replication_slot_timeout or run more often",
}


@dataclass(frozen=True, slots=True)
class SlotState:
    """One row of pg_replication_slots, with related data.

    ``retained_bytes`` is the WAL that the slot keeps, ``active_by`` the application_name of its
    current reader. ``invalidation_reason`` and ``inactive_since`` are known from PostgreSQL 17 on.
    """

    name: str
    plugin: str | None
    slot_type: str
    database: str | None
    in_this_database: bool
    temporary: bool
    active: bool
    active_pid: int | None
    active_by: str | None
    confirmed_flush_lsn: Lsn
    restart_lsn: Lsn | None
    wal_status: str | None
    safe_wal_size: int | None
    two_phase: bool
    invalidation_reason: str | None
    inactive_since: datetime | None
    retained_bytes: int
    system_identifier: str
    timeline: int
    # Transactions that were decoded for the slot since the server's statistics were reset.
    decoded: int = 0
    # How many of these didn't fit into logical_decoding_work_mem, and what the server wrote to disk
    # for them.
    spilled: int = 0
    spilled_bytes: int = 0
    # The number of transactions by which vacuum of the catalogs lags because of the slot.
    catalog_xmin_age: int | None = None
    # `failover`: PostgreSQL copies the slot to standbys. `synced`: PostgreSQL created it as such a
    # copy, on a server that was then a standby. Both from PostgreSQL 17 on.
    failover: bool = False
    synced: bool = False
    # Whether its server is a standby now.
    in_recovery: bool = False
    # Standbys of synchronized_standby_slots that aren't connected: until they are, a failover slot
    # returns nothing.
    standbys_away: tuple[str, ...] = ()
    # The server's average WAL rate since its statistics were reset; None when that was too recent.
    wal_bytes_per_hour: float | None = None

    @property
    def is_synced(self) -> bool:
        """Whether the slot is on a standby, where PostgreSQL synchronizes it from the primary's
        slot.

        Such a slot can't be read, moved or dropped.
        """
        return self.synced and self.in_recovery


def read_slot(conn: Connection, name: str) -> SlotState | None:
    """Returns the slot's current state on the server; None when no slot has this name."""
    if (row := next(iter(fetch(conn, _SLOT, {"name": name})), None)) is None:
        return None
    return SlotState(
        **row._asdict()
        | {
            "confirmed_flush_lsn": Lsn.parse(row.confirmed_flush_lsn or "0/0"),
            "restart_lsn": Lsn.parse(row.restart_lsn) if row.restart_lsn else None,
            "standbys_away": tuple(row.standbys_away),
        }
    )


def check_health(
    slot: SlotState | None, name: str, *, two_phase: bool | None = None, standby: str | None = None
) -> SlotState:
    """Returns the slot when a run can use it.

    Raises SlotMissing, SlotForeign, SlotLost, SlotInUse, StandbyAway or ConfigError. ``standby``
    names the server that should have the slot, where that is source.read_from's. ``two_phase`` is
    the pipeline file's setting (None: not checked). It must match the slot's own, because a call
    with the option would turn it on permanently. A reader that an earlier attempt of ours left
    doesn't count as use: the holder of the slot's lock ends it.
    """
    if slot is None:
        raise missing_slot(name, standby)
    check_ours(slot)
    if slot.wal_status == "lost" or slot.invalidation_reason:
        raise lost_slot(name, slot.confirmed_flush_lsn, slot.invalidation_reason)
    if two_phase is not None and slot.two_phase != two_phase:
        raise ConfigError(
            f"slot {name!r} was created with two_phase {'on' if slot.two_phase else 'off'}, but"
            " the pipeline file says otherwise: correct source.options.two_phase, or run teardown"
            " and setup, which recreate the slot, then resync"
        )
    if slot.standbys_away:
        raise StandbyAway(
            f"slot {name!r} is a failover slot, and PostgreSQL returns its changes only after the"
            " standbys of synchronized_standby_slots have received them;"
            f" {', '.join(slot.standbys_away)} has no standby connected: start it, or remove"
            " the slot from the setting and reload"
        )
    if slot.active and slot.active_by != reader_name(name):
        raise SlotInUse(
            f"slot {name!r} is in use by pid {slot.active_pid} ({slot.active_by or 'no name'}): "
            "stop that reader, or give this pipeline a slot of its own"
        )
    return slot


def missing_slot(name: str, standby: str | None = None) -> SlotMissing:
    """The error of a slot that doesn't exist, on the primary or on this standby."""
    return SlotMissing(
        f"slot {name!r} does not exist{f' on the standby {standby}' if standby else ''}: run"
        " resync; if it was never created, run setup, then the initial sync"
    )


def lost_slot(name: str, confirmed: Lsn | str, invalidation_reason: str | None = None) -> SlotLost:
    """The error of a slot whose WAL the server removed behind the position ``confirmed``."""
    reason = invalidation_reason or "wal_status=lost"
    return SlotLost(
        f"slot {name!r} is lost ({reason}): changes since {confirmed} are gone; run resync, and"
        f" {_PREVENTIONS.get(reason, 'raise max_slot_wal_keep_size or run more often')}"
    )


def check_ours(slot: SlotState) -> None:
    """Raise SlotForeign when the slot can't be read as pgoutput from this database."""
    name, remedy = slot.name, "choose another slot name in the pipeline file"
    checks = [
        (
            slot.slot_type != "logical",
            f"slot {name!r} is a {slot.slot_type} slot, not a logical one: {remedy}",
        ),
        (
            slot.plugin != PLUGIN,
            f"slot {name!r} uses the plugin {slot.plugin!r}, not {PLUGIN!r}: {remedy}",
        ),
        (
            not slot.in_this_database,
            f"slot {name!r} belongs to database {slot.database!r}: {remedy}",
        ),
        (slot.temporary, f"slot {name!r} is another session's temporary slot: {remedy}"),
        (
            slot.is_synced,
            (
                f"slot {name!r} on the standby is PostgreSQL's copy of the primary's failover slot"
                f" of that name, which can't be read there: {remedy}, or drop the primary's slot"
                " once no program reads it, which removes the copy too"
            ),
        ),
    ]
    for is_foreign, why in checks:
        if is_foreign:
            raise SlotForeign(why)


def create_slot(
    conn: Connection,
    name: str,
    *,
    two_phase: bool = False,
    failover: bool = False,
    timeout_s: float = CREATE_TIMEOUT_S,
    primary: Connection | None = None,
) -> SlotState:
    """Create the slot; the result's ``confirmed_flush_lsn`` is where its changes begin.

    ``failover`` needs PostgreSQL 17. PostgreSQL waits for every transaction that is open or
    prepared. Raises TransactionsStillOpen with their names after ``timeout_s``; then nothing was
    created. On a standby, the ``primary`` knows them. Raises StandbyAway when there are none, but
    the standby wasn't informed of that.
    """
    # Before PostgreSQL 17 the function doesn't have the last argument.
    arguments = (name, PLUGIN, False, two_phase, *([True] if failover else []))
    create = sql.SQL("select pg_create_logical_replication_slot({})").format(
        sql.SQL(", ").join(map(sql.Literal, arguments))
    )
    if open_now := open_transactions(primary or conn):
        log.info(
            "slot %s is created once older transactions end, within %g s: %s",
            name,
            timeout_s,
            "; ".join(f"{who} since {since}" for who, since in open_now),
        )
    try:
        with limited(conn, "statement_timeout", timeout_s):
            conn.execute(create)
    except psycopg.errors.QueryCanceled as err:
        raise _not_created(conn, primary, name, timeout_s) from err
    except psycopg.errors.ConfigurationLimitExceeded as err:
        raise SourceError(
            f"slot {name!r} can't be created: {err.diag.message_primary}; drop unused slots or"
            " raise max_replication_slots"
        ) from err
    slot = read_slot(conn, name)
    if slot is None:
        raise SlotMissing(f"slot {name!r} was dropped right after its creation: run setup again")
    return slot


def drop_slot(conn: Connection, name: str) -> bool:
    """Drop the slot; False when there was none. Raises SlotInUse while another process reads it."""
    try:
        conn.execute("select pg_drop_replication_slot(%s)", (name,))
    except psycopg.errors.UndefinedObject:
        return False
    except psycopg.errors.ObjectInUse as err:
        raise SlotInUse(
            f"slot {name!r} can't be dropped, {err.diag.message_primary}: stop that reader"
        ) from err
    return True


def _not_created(
    conn: Connection, primary: Connection | None, name: str, timeout_s: float
) -> TransactionsStillOpen | StandbyAway:
    """Returns why a slot wasn't created in time."""
    rows = open_transactions(primary or conn)
    if primary is None or rows:
        lines = (
            "\n".join(f"  - {who}, since {since}" for who, since in rows)
            or "  - (they have ended just now)"
        )
        return TransactionsStillOpen(
            f"slot {name!r} can't be created while older transactions are open; after"
            f" {timeout_s:g} s these were still open:\n{lines}\nend them"
            " (pg_terminate_backend(pid), rollback prepared 'gid'), or wait, and run setup again"
        )
    return StandbyAway(
        f"slot {name!r} can't be created, because the standby wasn't informed within {timeout_s:g}"
        " s of the transactions that run on its primary: check that it is connected; on the"
        f" primary, grant execute on function pg_log_standby_snapshot() to {primary.info.user}, or"
        " run that function; then run this again (docs/how-to/read-from-a-standby.md)"
    )


def check_received(conn: Connection, name: str, upto: Lsn) -> None:
    """Raise StandbyAway when a standby hasn't received WAL up to a position.

    Before that, a failover slot doesn't return it. Whether the standby is connected doesn't matter:
    a connected one may receive nothing for hours. The reader waits for it as for a slow server.
    """
    rows = conn.execute(_NOT_RECEIVED, {"slot": name, "upto": str(upto)}).fetchall()
    if rows:
        listed = ", ".join(f"{standby} (up to {lsn or 'nowhere'})" for standby, lsn in rows)
        raise StandbyAway(
            f"slot {name!r} returns no changes up to {upto} before the standbys of"
            f" synchronized_standby_slots have received them; behind: {listed}: let that standby"
            " catch up, or remove it from synchronized_standby_slots"
        )


_NOT_RECEIVED = """
select trim(both ' "' from listed.name), held.restart_lsn::text
from pg_replication_slots s,
     string_to_table(nullif(current_setting('synchronized_standby_slots', true), ''), ',')
       as listed (name)
left join pg_replication_slots held on held.slot_name = trim(both ' "' from listed.name)
where s.slot_name = %(slot)s
  and (to_jsonb(s) ->> 'failover')::boolean
  and (held.restart_lsn < %(upto)s::pg_lsn) is not false
"""
WAL_PER_HOUR = """
    select trunc(wal_bytes * 3600 / extract(epoch from now() - stats_reset))::bigint
    from pg_stat_wal
    where stats_reset < now() - interval '10 minutes'
"""
_SLOT = f"""
select s.slot_name as name,
       s.plugin,
       s.slot_type,
       s.database,
       s.database is not distinct from current_database() as in_this_database,
       s.temporary,
       s.active,
       s.active_pid,
       a.application_name as active_by,
       s.confirmed_flush_lsn::text,
       s.restart_lsn::text,
       case
           when pg_is_in_recovery() and s.wal_status <> 'lost' and safe.bytes < 0 then 'unreserved'
           else s.wal_status
       end as wal_status,
       safe.bytes as safe_wal_size,
       s.two_phase,
       pg_is_in_recovery() as in_recovery,
       coalesce(
           versioned.columns ->> 'invalidation_reason',
           case when (versioned.columns ->> 'conflicting')::boolean then 'conflicting' end
       ) as invalidation_reason,
       (versioned.columns ->> 'inactive_since')::timestamptz as inactive_since,
       (versioned.columns -> 'failover')::boolean is true as failover,
       (versioned.columns -> 'synced')::boolean is true as synced,
       greatest(0, pg_wal_lsn_diff(w.lsn, s.restart_lsn))::bigint as retained_bytes,
       c.system_identifier::text,
       coalesce(greatest(t.total_txns, sign(t.total_bytes)::bigint), 0) as decoded,
       coalesce(t.spill_txns, 0) as spilled,
       coalesce(t.spill_bytes, 0) as spilled_bytes,
       age(s.catalog_xmin) as catalog_xmin_age,
       array(
           select trim(both ' "' from listed.name)
           from string_to_table(
               nullif(current_setting('synchronized_standby_slots', true), ''), ','
           ) as listed (name)
           left join pg_replication_slots held on held.slot_name = trim(both ' "' from listed.name)
           where held.active is not true and (versioned.columns -> 'failover')::boolean
       ) as standbys_away,
       ({WAL_PER_HOUR}) as wal_bytes_per_hour,
       case
           when pg_is_in_recovery() then (select timeline_id from pg_control_checkpoint())
           else ('x' || substr(pg_walfile_name(w.lsn), 1, 8))::bit(32)::int
       end as timeline
from pg_replication_slots s
left join pg_stat_activity a on a.pid = s.active_pid
left join pg_stat_replication_slots t on t.slot_name = s.slot_name
cross join pg_control_system() c
-- Not every version has all of these columns.
cross join to_jsonb(s) versioned (columns)
cross join lateral (
    select case when pg_is_in_recovery() then pg_last_wal_replay_lsn()
      else pg_current_wal_lsn() end as lsn
) w
-- A standby computes both from the WAL position that it writes, which it hasn't:
-- so here they are as pg_get_replication_slots()
-- has them on a primary, from what a restartpoint goes by.
cross join lateral (
    select pg_size_bytes(current_setting('wal_segment_size')) as segment,
           pg_size_bytes(current_setting('max_slot_wal_keep_size')) as slot_keep,
           pg_size_bytes(current_setting('wal_keep_size')) as keep,
           pg_wal_lsn_diff(greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()), '0/0')
             as reached
) wal
cross join lateral (
    select case
        when not pg_is_in_recovery() then s.safe_wal_size
        when s.wal_status = 'lost' or wal.slot_keep < 0 then null
        else (div(pg_wal_lsn_diff(s.restart_lsn, '0/0'), wal.segment)
              + greatest(wal.slot_keep, wal.keep) / wal.segment + 1)
            * wal.segment - wal.reached
    end::bigint as bytes
) safe
where s.slot_name = %(name)s
"""  # noqa: S608 - no value in it

"""Slots on the source that no pipeline file names. Each keeps WAL until it is dropped.

A slot has no comment, but the publications that setup created have one, which names their slot. So
the source itself shows what waldelta left there, even when pipeline file and lake are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from waldelta.errors import ConfigError, PrivilegeMissing
from waldelta.pipeline.advisory_locks import advisory_lock, slot_lock_name
from waldelta.postgres import Connection
from waldelta.quantities import size
from waldelta.slot.acknowledge import name_of_kept
from waldelta.slot.slot import PLUGIN, SlotState, drop_slot, read_slot
from waldelta.stages.setup.facts.publications import Mark, PublicationState, plan_drop, read_marked
from waldelta.stages.setup.setup import run_statements


@dataclass(frozen=True, slots=True)
class SlotWithoutPipeline:
    """A slot that no pipeline file names, and the publications whose marks name it.

    ``pipeline`` is the one whose file created them; None for a slot that no mark names, whose owner
    is unknown. The publications don't include what they publish.
    """

    slot: SlotState
    pipeline: str | None
    publications: tuple[PublicationState, ...]

    def describe(self) -> str:
        """Returns one line: what the slot is, how much WAL it keeps, and how to drop it."""
        slot = self.slot
        since = (
            f", not read since {slot.inactive_since:%Y-%m-%d %H:%M} UTC"
            if slot.inactive_since
            else ""
        )
        where = " on the standby" if slot.in_recovery else ""
        summary = f"slot {slot.name}{where} keeps {size(slot.retained_bytes)} of WAL{since}"
        if slot.active:
            return f"{summary}: in use by pid {slot.active_pid} ({slot.active_by or 'no name'})"
        if self.pipeline is None:
            return (
                f"{summary}: no publication says whose it is (a subscription, another program, or a"
                " pipeline whose publications are a DBA's): ask before you run select"
                f" pg_drop_replication_slot('{slot.name}'){where and ' there'}"
            )
        with_it = ", ".join(publication.name for publication in self.publications)
        return (
            f"{summary}: made by pipeline {self.pipeline!r}, whose file isn't here; --drop"
            f" {slot.name} drops it and publication {with_it}; to use the pipeline again later,"
            " run its initial sync again"
        )


def find_slots_without_pipeline(
    conn: Connection, slot_names: Collection[str], slot_conn: Connection | None = None
) -> list[SlotWithoutPipeline]:
    """Returns the pgoutput slots of this database except ``slot_names``, those of pipeline files.

    Slots left by a mismatch of named slots are not included: a run reports those. ``slot_conn``
    connects to a standby whose own slots count too. Slots that PostgreSQL synchronizes there from
    the primary don't.
    """
    of_pipelines = {*slot_names, *map(name_of_kept, slot_names)}
    marks = [
        (p, mark) for p in read_marked(conn).values() if (mark := Mark.parse(p.comment)) is not None
    ]
    slots: list[SlotWithoutPipeline] = []
    for server in _servers(conn, slot_conn):
        for (name,) in server.execute(_SLOTS, (PLUGIN,)).fetchall():
            if name not in of_pipelines and (slot := read_slot(server, name)) is not None:
                publications_of_slot = [
                    (publication, mark) for publication, mark in marks if mark.slot == name
                ]
                pipeline = publications_of_slot[0][1].pipeline if publications_of_slot else None
                publications = tuple(publication for publication, _ in publications_of_slot)
                slots.append(SlotWithoutPipeline(slot, pipeline, publications))
    return slots


def drop_slots_without_pipeline(
    conn: Connection,
    conninfo: str,
    slots: Sequence[SlotWithoutPipeline],
    names: Sequence[str],
    slot_conn: Connection | None = None,
) -> list[str]:
    """Drop these slots and the publications that only they read; returns what was dropped or stays.

    ``slot_conn`` connects to the standby that was searched too, if any. A publication stays when
    the other server has any slot of that name. Raises before anything is dropped: ConfigError for a
    slot that isn't one of waldelta's without a pipeline, or that exists twice, and PrivilegeMissing
    for another role's publications. Raises LockHeld while a run works on the slot.
    """
    by_name = {item.slot.name: item for item in slots}
    _check_droppable(slots, by_name, names)
    servers = _servers(conn, slot_conn)
    dropped: list[str] = []
    for name in names:
        with advisory_lock(conninfo, slot_lock_name(name), f"waldelta lock {name}"):
            drop_slot(servers[-1] if by_name[name].slot.in_recovery else conn, name)
            publications = [publication.name for publication in by_name[name].publications]
            dropped.append(f"slot {name}")
            twins = [slot for server in servers if (slot := read_slot(server, name)) is not None]
            if any(not slot.is_synced for slot in twins):
                stays = f"stays: another server has a slot {name} too"
                dropped += [f"publication {publication} {stays}" for publication in publications]
                continue
            why = f"was read by slot {name} alone"
            run_statements(conn, [plan_drop(p, f"publication {p} {why}") for p in publications])
            dropped += [f"publication {publication}" for publication in publications]
    return dropped


def _check_droppable(
    slots: Sequence[SlotWithoutPipeline],
    by_name: Mapping[str, SlotWithoutPipeline],
    names: Sequence[str],
) -> None:
    for name in names:
        if sum(item.slot.name == name for item in slots) > 1:
            raise ConfigError(
                f"the primary and the standby both have a slot {name!r}, and teardown can't know"
                " which one to drop: nothing was dropped; run select"
                f" pg_drop_replication_slot('{name}') on the server where no program reads it,"
                " then run this again for the other"
            )
        if name not in by_name or by_name[name].pipeline is None:
            raise ConfigError(
                f"slot {name!r} wasn't made by waldelta, or a pipeline file names it: nothing was"
                " dropped; teardown --orphans lists the slots that can be dropped"
            )
        if not_owned := [p.name for p in by_name[name].publications if not p.owned]:
            raise PrivilegeMissing(
                f"publication {', '.join(not_owned)} belongs to another role, nothing was dropped:"
                " let its owner run this"
            )


def _servers(conn: Connection, slot_conn: Connection | None) -> list[Connection]:
    """Returns the primary's connection, and the standby's if it was searched too."""
    return [conn] if slot_conn is None or slot_conn is conn else [conn, slot_conn]


_SLOTS = """
select slot_name::text
from pg_replication_slots s
where plugin = %s and database = current_database() and not temporary
  and not (pg_is_in_recovery() and coalesce((to_jsonb(s) ->> 'synced')::boolean, false))
order by slot_name
"""

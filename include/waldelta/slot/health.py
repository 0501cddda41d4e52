"""The slot's health: how much WAL it keeps, and how long until that is too much if it doesn't move.

A slot that isn't moved keeps all WAL that the server writes. Beyond ``max_slot_wal_keep_size`` it
is lost, and with it the changes. Without that setting the disk fills up, and the application stops.

Finds the oldest pending commit, by the slot and by the change log.

A source without changes has none, however long ago the last run was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import psycopg

from waldelta.config.pipeline_file import SlotLimits
from waldelta.errors import PeekTimeout, StateError
from waldelta.lake.changelog import Snapshot
from waldelta.lake.ledger import SlotMove, SlotReading, TableState
from waldelta.lsn import Lsn
from waldelta.pgoutput.commit_time import shown_at
from waldelta.pgoutput.messages import begun_at
from waldelta.pipeline import Job, slot_lock
from waldelta.pipeline.targets import Watermarks
from waldelta.postgres import limited
from waldelta.quantities import duration, size
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.acknowledge import confirmed_lsn, first_message
from waldelta.slot.read.decode_failure import Refusal
from waldelta.slot.read.peek import with_options
from waldelta.slot.slot import SlotState

log = logging.getLogger(__name__)

HealthLevel = Literal["warning", "critical"]

# Over a shorter time, a rate isn't reliable.
_SHORTEST = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class SlotWarning:
    """A warning about the slot, with figures."""

    severity: HealthLevel
    text: str

    def __str__(self) -> str:
        return self.text if self.severity == "warning" else f"critical: {self.text}"


def reading(slot: SlotState, lag_bytes: int, at: datetime) -> SlotReading:
    """Returns the figures of the slot that a run's result contains."""
    return SlotReading(
        at.isoformat(), slot.wal_status, lag_bytes, slot.retained_bytes, slot.safe_wal_size
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """When the slot reaches its limit if nothing moves it.

    ``limit`` is the setting that limits it (max_slot_wal_keep_size or slot_limits.disk_budget_mb).
    ``remaining_bytes`` is the WAL until then, ``hours`` the time at the current rate; None while no
    rate is known.
    """

    limit: str
    remaining_bytes: int
    bytes_per_hour: float | None
    hours: float | None


def wal_rate(slot: SlotState, last_move: SlotMove | None, at: datetime) -> float | None:
    """Returns bytes of WAL per hour.

    It is the larger of the server's average and the rate since the slot's last move.
    """
    rates = [] if slot.wal_bytes_per_hour is None else [slot.wal_bytes_per_hour]
    if last_move and slot.restart_lsn is not None and (passed := at - last_move.at) >= _SHORTEST:
        written = slot.restart_lsn.value + slot.retained_bytes - last_move.lsn
        rates.append(max(0, written) / (passed / timedelta(hours=1)))
    return max(rates, default=None)


def forecast(
    slot: SlotState, limits: SlotLimits, last_move: SlotMove | None, at: datetime
) -> Forecast | None:
    """Forecast the slot's limit at the rate since its last move; None without a limit."""
    return forecast_at(slot, limits, wal_rate(slot, last_move, at))


def forecast_at(
    slot: SlotState | SlotReading, limits: SlotLimits, rate: float | None
) -> Forecast | None:
    """Forecast the nearer of the server's limit and the pipeline file's budget; None without
    either. ``rate`` is the WAL of an hour.
    """
    headroom = {}
    if slot.safe_wal_size is not None:
        headroom["max_slot_wal_keep_size"] = max(0, slot.safe_wal_size)
    if limits.disk_budget_mb is not None:
        headroom["slot_limits.disk_budget_mb"] = max(
            0, (limits.disk_budget_mb << 20) - slot.retained_bytes
        )
    if not headroom:
        return None
    limit = min(headroom, key=headroom.__getitem__)
    return Forecast(limit, headroom[limit], rate, headroom[limit] / rate if rate else None)


def slot_warnings(
    slot: SlotState, limits: SlotLimits, last_move: SlotMove | None, at: datetime
) -> list[SlotWarning]:
    """Returns warnings about the slot before a run; none within the pipeline file's limits."""
    return [
        *_about_to_go(slot),
        *_backlog(slot, limits),
        *_running_out(slot, limits, forecast(slot, limits, last_move, at)),
    ]


def _about_to_go(slot: SlotState) -> Iterator[SlotWarning]:
    if slot.wal_status == "unreserved":
        yield SlotWarning(
            "critical",
            f"slot {slot.name!r} keeps more WAL than max_slot_wal_keep_size allows and is lost at"
            " the next checkpoint: let the pipeline run now, or raise the setting and reload",
        )


def _backlog(slot: SlotState, limits: SlotLimits) -> Iterator[SlotWarning]:
    is_critical = slot.retained_bytes > limits.critical_mb << 20
    limit, bound = (
        ("critical_mb", limits.critical_mb) if is_critical else ("warn_mb", limits.warn_mb)
    )
    loss = (
        f", and is lost after {size(slot.safe_wal_size)} more"
        if slot.safe_wal_size is not None
        else ""
    )
    spilled = (
        f"; of its transactions {slot.spilled} didn't fit into logical_decoding_work_mem"
        f" ({size(slot.spilled_bytes)} spilled)"
        if slot.spilled
        else ""
    )
    if slot.retained_bytes > bound << 20:
        yield SlotWarning(
            "critical" if is_critical else "warning",
            f"slot {slot.name!r} keeps {size(slot.retained_bytes)} of WAL{loss};"
            f" slot_limits.{limit} is {size(bound << 20)}: run the pipeline more often, and look"
            f" for long-open transactions (restart_lsn {slot.restart_lsn}, confirmed_flush_lsn"
            f" {slot.confirmed_flush_lsn}){spilled}",
        )


def _running_out(
    slot: SlotState, limits: SlotLimits, prediction: Forecast | None
) -> Iterator[SlotWarning]:
    if (
        prediction is not None
        and prediction.hours is not None
        and prediction.bytes_per_hour is not None
        and prediction.hours < limits.warn_hours
    ):
        end = "is lost" if prediction.limit == "max_slot_wal_keep_size" else "exceeds its budget"
        yield SlotWarning(
            "critical" if prediction.hours < limits.critical_hours else "warning",
            f"slot {slot.name!r} {end} in {duration(prediction.hours * 3600)} unless it moves:"
            f" {size(prediction.remaining_bytes)} are left of {prediction.limit}, and the server"
            f" writes {size(round(prediction.bytes_per_hour))} of WAL an hour: run the pipeline"
            " more often, or raise the limit",
        )


def log_warnings(warnings: Iterable[SlotWarning]) -> list[str]:
    """Log these warnings, critical ones as errors, and return their texts."""
    texts = []
    for warning in warnings:
        log.log(logging.ERROR if warning.severity == "critical" else logging.WARNING, "%s", warning)
        texts.append(str(warning))
    return texts


def critical(warnings: Iterable[SlotWarning]) -> list[str]:
    """Returns the texts of critical warnings, which must be reported however the run ends."""
    return [warning.text for warning in warnings if warning.severity == "critical"]


# A dead pipeline's first change is found at once. WAL without any of ours is searched for this
# long.
SEARCH_BUDGET_S = 30.0


def oldest_unread(connection: psycopg.Connection[Any], job: Job, upto: Lsn) -> datetime | None:
    """Returns the commit time of the first transaction that the slot still has for us up to a
    position.

    Returns None without any. Raises LockHeld and SlotInUse while a run reads the slot, PeekTimeout
    when there is too much WAL to search, PeekTooLarge or SourceDiskFull when the server has no room
    for the answer, and StateError while the slot is behind what has landed.
    """
    source, identity = job.pipeline.source, job.read_identity()
    landed = Lsn(job.change_log(identity).end_after(identity.floor))
    try:
        with slot_lock(job), limited(connection, "statement_timeout", SEARCH_BUDGET_S):
            confirmed = confirmed_lsn(connection, source.slot)
            if confirmed < landed:
                raise StateError(
                    f"slot {source.slot!r} is at {confirmed}, behind {landed}, the end of its"
                    " landed changes, as after an immediate stop of its server: the next run moves"
                    " the slot"
                )
            # Messages that aren't transactional have no commit time, and targets have none of them.
            first = first_message(
                connection, with_options(source, streaming="off", messages=False), upto
            )
    except PeekTimeout as err:
        raise PeekTimeout(
            f"slot {source.slot!r} has more pending WAL than the search can read in"
            f" {SEARCH_BUDGET_S:g} s"
        ) from err
    except psycopg.DatabaseError as err:
        if Refusal.of(ServerError.of(err)) is None:
            raise
        raise StateError(
            f"PostgreSQL can't decode the oldest pending change in slot {source.slot!r}: the next"
            " run reports why"
        ) from err
    if first is None:
        return None
    at = begun_at(first)
    if at is None:
        raise StateError(
            f"the oldest pending change in slot {source.slot!r} belongs to no transaction and has"
            " no commit time"
        )
    return shown_at(at)


def oldest_unapplied(job: Job, states: Sequence[TableState]) -> dict[str, datetime]:
    """Returns, by target, the oldest commit that has landed but isn't applied.

    Targets that can't be read are left out.
    """
    watermarks, commits = Watermarks(job, job.read_identity()), {}
    change_log = watermarks.change_log
    last = change_log.last_batch() or 0
    for state in states:
        try:
            applied = watermarks.of(state)
        except StateError:
            continue
        if applied >= last:
            continue
        stream, snapshot = change_log.stream(applied, last), Snapshot.parse(state.snapshot)
        if (at := change_log.oldest_commit(stream, state.relation_ids, snapshot)) is not None:
            commits[state.table_name] = at
    return commits

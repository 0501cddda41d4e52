"""The slot's health: how much WAL it keeps, and how long until that is too much if it doesn't move.

A slot that isn't moved keeps all WAL that the server writes. Beyond ``max_slot_wal_keep_size`` it
is lost, and with it the changes. Without that setting the disk fills up, and the application stops.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from waldelta.config.pipeline_file import SlotLimits
from waldelta.lake.ledger import SlotMove, SlotReading
from waldelta.quantities import duration, size
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
    """Return what a run records of the slot."""
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
    """Return bytes of WAL per hour.

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
    """Forecast the nearer of the server's limit and the pipeline file's budget; None without
    either.
    """
    left = {}
    if slot.safe_wal_size is not None:
        left["max_slot_wal_keep_size"] = max(0, slot.safe_wal_size)
    if limits.disk_budget_mb is not None:
        left["slot_limits.disk_budget_mb"] = max(
            0, (limits.disk_budget_mb << 20) - slot.retained_bytes
        )
    if not left:
        return None
    limit = min(left, key=left.__getitem__)
    rate = wal_rate(slot, last_move, at)
    return Forecast(limit, left[limit], rate, left[limit] / rate if rate else None)


def slot_warnings(
    slot: SlotState, limits: SlotLimits, last_move: SlotMove | None, at: datetime
) -> list[SlotWarning]:
    """Return warnings about the slot before a run; none within the pipeline file's limits."""
    found = [
        _about_to_go(slot),
        _backlog(slot, limits),
        _running_out(slot, limits, forecast(slot, limits, last_move, at)),
    ]
    return [warning for warning in found if warning is not None]


def _about_to_go(slot: SlotState) -> SlotWarning | None:
    if slot.wal_status != "unreserved":
        return None
    return SlotWarning(
        "critical",
        f"slot {slot.name!r} keeps more WAL than max_slot_wal_keep_size allows and is lost at the"
        " next checkpoint: let the pipeline run now, or raise the setting and reload",
    )


def _backlog(slot: SlotState, limits: SlotLimits) -> SlotWarning | None:
    is_critical = slot.retained_bytes > limits.critical_mb << 20
    limit, bound = (
        ("critical_mb", limits.critical_mb) if is_critical else ("warn_mb", limits.warn_mb)
    )
    if slot.retained_bytes <= bound << 20:
        return None
    left = (
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
    return SlotWarning(
        "critical" if is_critical else "warning",
        f"slot {slot.name!r} keeps {size(slot.retained_bytes)} of WAL{left}; slot_limits.{limit}"
        f" is {bound}: run the pipeline more often, and look for long-open transactions"
        f" (restart_lsn {slot.restart_lsn}, confirmed_flush_lsn"
        f" {slot.confirmed_flush_lsn}){spilled}",
    )


def _running_out(
    slot: SlotState, limits: SlotLimits, prediction: Forecast | None
) -> SlotWarning | None:
    if (
        prediction is None
        or prediction.hours is None
        or prediction.bytes_per_hour is None
        or prediction.hours >= limits.warn_hours
    ):
        return None
    end = "is lost" if prediction.limit == "max_slot_wal_keep_size" else "exceeds its budget"
    return SlotWarning(
        "critical" if prediction.hours < limits.critical_hours else "warning",
        f"slot {slot.name!r} {end} in {duration(prediction.hours * 3600)} unless it moves:"
        f" {size(prediction.remaining_bytes)} are left of {prediction.limit}, and the server writes"
        f" {size(round(prediction.bytes_per_hour))} of WAL an hour: run the pipeline more often,"
        " or raise the limit",
    )


def log_warnings(found: Iterable[SlotWarning]) -> list[str]:
    """Log these warnings, critical ones as errors, and return their texts."""
    texts = []
    for warning in found:
        log.log(logging.ERROR if warning.severity == "critical" else logging.WARNING, "%s", warning)
        texts.append(str(warning))
    return texts


def critical(found: Iterable[SlotWarning]) -> list[str]:
    """Return the texts of critical warnings, which must be reported however the run ends."""
    return [warning.text for warning in found if warning.severity == "critical"]

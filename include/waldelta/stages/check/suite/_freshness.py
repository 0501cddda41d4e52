"""Freshness: how far a target is behind the source when a run checks it. Pure.

It doesn't depend on the target's last change: a source without changes has an up-to-date target.
Seconds are the age of the moment up to which the target has every commit; bytes are the unread WAL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from waldelta.config.quality import Freshness

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Lag:
    """A target's lag; None for what is unknown or isn't judged in this run."""

    seconds: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FreshnessLimit:
    """A limit and the measured lag, in the same unit."""

    severity: Literal["warning", "critical"]
    behind: float
    limit: int
    unit: Literal["s", "MB of WAL"]

    @property
    def is_met(self) -> bool:
        """Returns whether the target is fresh enough."""
        return self.behind <= self.limit

    @property
    def meaning(self) -> str:
        """Returns the expectation in words."""
        return f"at most {self.limit:,} {self.unit} behind the source"

    @property
    def observed(self) -> str:
        """Returns the measured lag in words."""
        return f"{self.behind:,.0f} {self.unit} behind"


def freshness_limits(lag: Lag, wanted: Freshness) -> Iterator[FreshnessLimit]:
    """Yields the limits that can be judged, warnings first."""
    mb = None if lag.bytes is None else lag.bytes / _MB
    limits: list[tuple[Literal["warning", "critical"], int | None, int | None]] = [
        ("warning", wanted.warn_seconds, wanted.warn_mb),
        ("critical", wanted.critical_seconds, wanted.critical_mb),
    ]
    for severity, seconds, size in limits:
        if lag.seconds is not None and seconds is not None:
            yield FreshnessLimit(severity, max(0.0, lag.seconds), seconds, "s")
        if mb is not None and size is not None:
            yield FreshnessLimit(severity, mb, size, "MB of WAL")

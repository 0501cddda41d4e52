"""Lag: how far the lake or a target is behind its source, and what counts as late.

The check's freshness, the pages, the metrics and the alerts read this definition. It doesn't depend
on the last change: a source without changes has an up-to-date target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from waldelta.config.expectation_files import Severity
from waldelta.config.quality import Freshness, LagUnit
from waldelta.quantities import size

# Airflow's scheduler runs every few seconds.
_OVERDUE_AFTER = timedelta(minutes=10)
# Most stages take minutes.
_SILENT_AFTER = timedelta(hours=1)
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Lag:
    """A replication lag; a value is None if it is unknown or isn't judged.

    ``seconds`` is the age of the latest time up to which the lake has every commit. ``bytes`` is
    the WAL after the position that was read.
    """

    seconds: float | None = None
    bytes: int | None = None

    @classmethod
    def since(cls, complete_upto: datetime | None, at: datetime, size: int | None = None) -> Lag:
        """Returns the lag at a time; the source's clock may be ahead, so it is never negative."""
        age = None if complete_upto is None else (at - complete_upto).total_seconds()
        return cls(None if age is None else max(0.0, age), size)

    @property
    def is_overdue(self) -> bool:
        """Returns whether ``seconds``, as the delay of a scheduled run, exceed ten minutes."""
        return self.seconds is not None and self.seconds > _OVERDUE_AFTER.total_seconds()

    @property
    def is_silent(self) -> bool:
        """Returns whether a running run with this age of its last record may have been killed."""
        return self.seconds is not None and self.seconds >= _SILENT_AFTER.total_seconds()

    def limits(self, freshness: Freshness) -> Iterator[FreshnessLimit]:
        """Yields each limit with the lag in its unit, where that is known."""
        values: dict[LagUnit, float | None] = {
            "seconds": self.seconds,
            "mb": None if self.bytes is None else self.bytes / _MB,
        }
        for unit, value in values.items():
            if value is not None:
                for severity, limit in freshness.limits(unit).items():
                    yield FreshnessLimit(severity, value, limit, unit)


@dataclass(frozen=True, slots=True)
class FreshnessLimit:
    """A limit and the measured lag, in the same unit."""

    severity: Severity
    behind: float
    limit: int
    unit: LagUnit

    @property
    def is_met(self) -> bool:
        """Returns whether the target is fresh enough."""
        return self.behind <= self.limit

    @property
    def meaning(self) -> str:
        """Returns the expectation in words."""
        return f"at most {self._words(self.limit)} behind the source"

    @property
    def observed(self) -> str:
        """Returns the measured lag in words."""
        return f"{self._words(self.behind)} behind"

    def _words(self, value: float) -> str:
        return f"{value:,.0f} s" if self.unit == "seconds" else f"{size(round(value * _MB))} of WAL"

"""What a measurement yields, whichever part of the benchmark made it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Measured:
    """One row of the result: seconds, what they are compared with, and what else was seen."""

    name: str
    seconds: float
    baseline: str | None = None
    ratio: float | None = None
    notes: dict[str, float] = field(default_factory=dict)

"""What preflight finds: problems refuse set-up, warnings come with figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing preflight found; a ``problem`` refuses set-up.

    ``lacks_privilege``: whoever asks lacks a right on the source or the lake; a grant takes the problem away, and a DBA who
    runs the plan's SQL hasn't got it.
    """

    severity: Literal["problem", "warning"]
    text: str
    lacks_privilege: bool = False

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


def problem(text: str) -> Finding:
    """A finding that refuses set-up."""
    return Finding("problem", text)


def lacking(text: str) -> Finding:
    """A finding that refuses set-up by this role: the privilege for it is missing."""
    return Finding("problem", text, lacks_privilege=True)


def warning(text: str) -> Finding:
    """A finding that is a matter of policy."""
    return Finding("warning", text)


def size(size_bytes: int) -> str:
    """Bytes for a message.

    >>> size(8 << 30)
    '8 GB'
    """
    value = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"

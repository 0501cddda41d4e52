"""Formats quantities for messages and pages: a number and what it counts, bytes, a time, a
few of many names.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

# A message with more names is hard to read.
MOST_NAMED = 5


def counted(number: float, one: str, more: str | None = None) -> str:
    """Returns a number and what it counts, in the right grammatical number.

    >>> counted(1, "row"), counted(2500, "row"), counted(0, "batch", "batches")
    ('1 row', '2,500 rows', '0 batches')
    """
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def duration(seconds: float) -> str:
    """Returns a time for a message, in its largest unit.

    >>> duration(4.2), duration(150), duration(900), duration(12_960), duration(360_000)
    ('5 seconds', '2.5 minutes', '15 minutes', '3.6 hours', '4.2 days')
    """
    if (whole := max(1, ceil(seconds))) < 60:
        return counted(whole, "second")
    number, unit = round(seconds / 60, 1), "minute"
    if number >= 60:
        number, unit = round(seconds / 3600, 1), "hour"
    if unit == "hour" and number >= 48:
        number, unit = round(seconds / 86_400, 1), "day"
    return counted(int(number) if number.is_integer() else number, unit)


def size(size_bytes: int) -> str:
    """Returns bytes for a message.

    >>> size(8 << 30)
    '8 GB'
    """
    value = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"


def first_of(names: Sequence[str], most: int = MOST_NAMED, between: str = ", ") -> str:
    """Returns the first of these names, and how many more there are.

    >>> first_of(["a", "b"]), first_of(list("abcde"), 3)
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{between.join(names[:most])}{more}"

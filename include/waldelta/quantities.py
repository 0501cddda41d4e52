"""Formats quantities for messages and pages: a number and what it counts, bytes, a few of many
names.
"""

from __future__ import annotations

from collections.abc import Sequence

# A message with more names is hard to read.
MOST_NAMED = 5


def counted(number: float, one: str, more: str | None = None) -> str:
    """Returns a number and what it counts, in the right grammatical number.

    >>> counted(1, "row"), counted(2500, "row"), counted(0, "batch", "batches")
    ('1 row', '2,500 rows', '0 batches')
    """
    return f"{number:,} {one if number == 1 else more or one + 's'}"


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

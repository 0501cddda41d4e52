"""Failing rows: how many rows of a target don't meet an expectation, and some of their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The most failing values or keys that a report shows.
MOST_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class FailingRows:
    """The number of rows that don't meet an expectation, and values or keys of some of them.

    ``judged`` is the number of rows that the expectation applies to, ``total`` that of all rows
    read; None where they weren't counted.
    """

    rows: int = 0
    examples: tuple[Any, ...] = ()
    judged: int | None = None
    total: int | None = None

    def are_few(self, mostly: float) -> bool:
        """Returns whether enough rows meet the expectation.

        Divides as Great Expectations does, because 0.55 * 100 is more than 55.

        >>> [FailingRows(rows, judged=100).are_few(0.55) for rows in (0, 45, 46)]
        [True, True, False]
        """
        if not self.rows or self.judged is None:
            return not self.rows
        return (self.judged - self.rows) / self.judged >= mostly

"""The fence before an effect that only one run may have: a lock, or a lock and a watermark."""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """Locks that a run must still hold when it commits.

    The fence is verified after reading the table on which the commit depends. Another run that took
    the locks changes that table's version first, so this commit fails.
    """

    def verify(self) -> object:
        """Raise a WaldeltaError when this run may not write any more."""


class _Unfenced:
    def verify(self) -> None:
        """Allow the effect: any run may have it."""


UNFENCED = _Unfenced()

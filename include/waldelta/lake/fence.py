"""The fence before an effect that only one run may have: a lock, or a lock and a watermark."""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """What a run must still hold when it commits.

    It is verified after the table was read that a commit depends on. A run that takes over later
    changes that table's version, so that the commit fails.
    """

    def verify(self) -> object:
        """Raise a WaldeltaError when this run may not write any more."""


class _Unfenced:
    def verify(self) -> None:
        """Allow the effect: any run may have it."""


UNFENCED = _Unfenced()

"""The fence before an effect that only one run may have: a lock, or a lock and a watermark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from waldelta.lake.delta_target import TargetVersion


class Fence(Protocol):
    """What a run must still hold when it commits.

    It is verified after the table was read that a commit depends on. A run that takes over later
    changes that table's version, so that the commit fails.
    """

    def verify(self) -> object:
        """Raise a WaldeltaError when this run may not write any more."""


@runtime_checkable
class VersionFence(Fence, Protocol):
    """A fence that reads the table that is about to be written."""

    def verify_at(self, table: TargetVersion) -> object:
        """Do what verify() does, by the version of the table that the commit depends on."""


def verify_at(fence: Fence, table: TargetVersion) -> None:
    """Verify a fence before a commit that is a compare-and-swap on this version of a table.

    What was committed up to this version is in it, and what is committed after it makes the commit
    fail. So the table isn't read again.
    """
    if isinstance(fence, VersionFence):
        fence.verify_at(table)
    else:
        fence.verify()


class _Unfenced:
    def verify(self) -> None:
        """Allow the effect: any run may have it."""


UNFENCED = _Unfenced()

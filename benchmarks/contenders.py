"""The contenders: each catches up with a backlog, or copies the tables, in its own way."""

from __future__ import annotations

from typing import Protocol

from benchmarks.baselines import CopyOfPeek, CopyTables, Naive, RecvLogical
from benchmarks.ours import Waldelta
from benchmarks.place import Place
from benchmarks.subscriber import Subscriber
from benchmarks.workloads import COPY, FRESH, NAIVE, NATIVE, PEEK, RECVLOGICAL, TASKS, WARM, Variant


class Contender(Protocol):
    """A program that takes part in a workload."""

    name: str
    baseline: bool

    def trees(self) -> list[int]:
        """Returns the process ids of long-lived processes that work for it."""

    def prepare(self) -> None:
        """Start from the tables as they are."""

    def apply(self) -> dict[str, float] | None:
        """Catch up with the slot; returns notes for the result."""

    def copy(self) -> dict[str, float] | None:
        """Copy the tables, again if need be."""

    def settle(self) -> None:
        """Get ready for the next round; this isn't measured."""

    def verify(self) -> None:
        """Raise RuntimeError when its copy differs from the source after its last action.

        It does nothing for a contender that keeps no data, and isn't measured.
        """

    def close(self) -> None:
        """Clean up, leaving no slot."""


BASELINES = {
    PEEK: CopyOfPeek,
    RECVLOGICAL: RecvLogical,
    COPY: CopyTables,
    NATIVE: Subscriber,
    NAIVE: Naive,
}


def make(name: str, place: Place, variants: tuple[Variant, ...]) -> list[Contender]:
    """Returns the contenders of one name; ours has one for each variant."""
    if name in BASELINES:
        return [BASELINES[name](place)]
    assert name in (WARM, TASKS, FRESH)
    return [Waldelta(place, name, variant, number) for number, variant in enumerate(variants)]

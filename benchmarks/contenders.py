"""Those who take part: each catches up with a backlog, or copies the tables, in the way it has."""

from __future__ import annotations

from typing import Protocol

from benchmarks.baselines import CopyOfPeek, CopyTables, Naive, RecvLogical
from benchmarks.ours import Waldelta
from benchmarks.place import Place
from benchmarks.subscriber import Subscriber
from benchmarks.workloads import COPY, FRESH, NAIVE, NATIVE, PEEK, RECVLOGICAL, TASKS, WARM, Variant


class Contender(Protocol):
    """Somebody who takes part."""

    name: str
    baseline: bool

    def trees(self) -> list[int]:
        """Process ids of standing processes that work for it."""

    def prepare(self) -> None:
        """Start from the tables as they are."""

    def apply(self) -> dict[str, float] | None:
        """Catch up with the slot; what the result notes of it."""

    def copy(self) -> dict[str, float] | None:
        """Copy the tables, again if need be."""

    def settle(self) -> None:
        """What isn't measured: get ready for the next round."""

    def verify(self) -> None:
        """Raise RuntimeError when it isn't where the source is after what it did last, where it
        keeps anything; isn't measured.
        """

    def close(self) -> None:
        """Leave no slot behind."""


BASELINES = {
    PEEK: CopyOfPeek,
    RECVLOGICAL: RecvLogical,
    COPY: CopyTables,
    NATIVE: Subscriber,
    NAIVE: Naive,
}


def make(name: str, place: Place, variants: tuple[Variant, ...]) -> list[Contender]:
    """The contenders of one name: of ours one for each variant."""
    if name in BASELINES:
        return [BASELINES[name](place)]
    assert name in (WARM, TASKS, FRESH)
    return [Waldelta(place, name, variant, number) for number, variant in enumerate(variants)]

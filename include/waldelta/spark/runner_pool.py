"""Works on several targets at once, each piece on a Spark session that no other piece uses.

Settings and temporary views belong to a session, and Great Expectations gives the views of all
queries the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self, TypeVar

from waldelta.spark import Runner

T = TypeVar("T")
R = TypeVar("R")

# On Spark, small targets are bound by round trips, not by cores, so more run at once than two cores
# could compute. In this process, more than two would wait for each other: Python runs one thread at
# a time.
MOST_AT_ONCE, MOST_IN_PROCESS = 4, 2


@dataclass(frozen=True, slots=True)
class RunnerPool:
    """The given session and as many siblings as the pieces of work need."""

    _size: int
    _free: SimpleQueue[Runner]

    @classmethod
    @contextmanager
    def open(cls, runner: Runner, pieces: int, *, reads: bool = False) -> Iterator[Self]:
        """Open the siblings that ``pieces`` of work need, until the block's end.

        ``reads``: the work writes nothing (Runner.sibling()).
        """
        most = MOST_AT_ONCE if runner.is_started else MOST_IN_PROCESS
        pool = cls(max(1, min(pieces, most)) if runner.has_siblings else 1, SimpleQueue())
        pool._free.put(runner)
        with ExitStack() as siblings:
            for number in range(1, pool._size):
                pool._free.put(siblings.enter_context(runner.sibling(number, reads=reads)))
            yield pool

    def map(self, work: Callable[[Runner, T], R], items: Sequence[T]) -> list[R]:
        """Return the results in the items' order.

        The first error is raised, and work that hasn't begun by then never does.
        """

        def run(item: T) -> R:
            session = self._free.get()
            try:
                return work(session, item)
            finally:
                self._free.put(session)

        if self._size == 1:
            return [run(item) for item in items]
        executor = ThreadPoolExecutor(self._size, "targets")
        try:
            return list(executor.map(run, items))
        finally:
            # Don't wait: when the run is being ended, leaving the pool interrupts what still runs.
            executor.shutdown(wait=False, cancel_futures=True)

"""Works on several targets at once, each piece on a Spark session that no other piece uses.

Settings and temporary views belong to a session, and Great Expectations gives the views of all
queries the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar

from waldelta.spark import Runner

T = TypeVar("T")
R = TypeVar("R")

# Small targets are bound by round trips, not by cores, so more run at once than two cores could
# compute.
MOST_AT_ONCE = 4


class RunnerPool:
    """The given session and as many siblings as ``pieces`` of work need.

    Leaving the ``with`` block ends the siblings. ``reads``: the work writes nothing
    (Runner.sibling()).
    """

    def __init__(self, runner: Runner, pieces: int, *, reads: bool = False) -> None:
        self._reads = reads
        self._first, self._size = (
            runner,
            max(1, min(pieces, MOST_AT_ONCE)) if runner.has_siblings else 1,
        )
        self._free: SimpleQueue[Runner] = SimpleQueue()
        self._leave = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as unwind:
            self._free.put(self._first)
            for number in range(1, self._size):
                self._free.put(unwind.enter_context(self._first.sibling(number, reads=self._reads)))
            self._leave = unwind.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave.__exit__(kind, err, trace)

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

"""Applies landed apply batches of a backlog while the next ones land.

Landing waits for the server's decoding and then uses one core; merging uses the others. The slot
moves as soon as a batch has landed, whatever is applied, and landing continues when applying fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, Timer
from types import TracebackType
from typing import TYPE_CHECKING, Self

from waldelta.errors import LateWriter, WaldeltaError
from waldelta.lake import Fence
from waldelta.lake.changelog import ChangeLog, Landed
from waldelta.permissions import private_files
from waldelta.pipeline import Job
from waldelta.spark import Runner
from waldelta.spark.runner import CONCURRENT
from waldelta.stages.apply._apply_batches import measures, whole_upto

if TYPE_CHECKING:
    from waldelta.stages.apply.outcome import Applied

log = logging.getLogger(__name__)


class Overlap:
    """Applies complete apply batches of the landed batches in its own thread, one at a time.

    ``apply_upto`` gets the last landed batch of an apply batch, and this object as a fence, which
    raises LateWriter once the run no longer waits. It returns the batch reached; where that is an
    earlier one, it is called again. An apply batch may take ``limit_s`` seconds, and ``grace_s``
    more to end after an interrupt. Exiting waits for the current one, unless the run is being
    ended; the rest stays to be applied. If one fails or takes too long, it is logged, and no more
    follow: the apply that follows meets the error again.
    """

    def __init__(
        self,
        whole: Callable[[Sequence[Landed]], int | None],
        apply_upto: Callable[[int, Fence], int],
        limit_s: float,
        grace_s: float = 30.0,
    ) -> None:
        self._whole, self._apply_upto = whole, apply_upto
        self._limit_s, self._grace_s = limit_s, grace_s
        self._deadline: float | None = None
        self._executor = ThreadPoolExecutor(1, "applying")
        self._lock = Lock()
        self._waiting: list[Landed] = []
        self._at_work: Future[None] | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def add(self, batch: Landed) -> None:
        """Queue a landed and consumed batch for apply, while more batches land."""
        with self._lock:
            self._waiting.append(batch)
            if self._at_work is None and not self._is_over:
                self._at_work = self._executor.submit(self._apply_whole_batches)

    def _apply_whole_batches(self) -> None:
        try:
            while True:
                waiting = self._still_waiting()
                upto = self._whole(waiting) if waiting else None
                if upto is not None and self._still_waiting():
                    reached = self._apply_upto(upto, self)
                    with self._lock:
                        self._waiting = [batch for batch in self._waiting if batch.batch > reached]
                elif self._is_idle(waiting):
                    return
        except Exception as err:
            unnamed = not isinstance(err, WaldeltaError)
            log.warning("no more apply batches run until landing ends: %s", err, exc_info=unnamed)
            self._is_over = True

    def _still_waiting(self) -> list[Landed]:
        with self._lock:
            return [] if self._is_over else list(self._waiting)

    def _is_idle(self, judged: Sequence[Landed]) -> bool:
        """Returns whether no batch has landed since these were judged.

        If none has, the work ends here, and the next batch that lands begins it again.
        """
        with self._lock:
            if self._is_over or len(self._waiting) <= len(judged):
                self._at_work = None
                return True
            return False

    @contextmanager
    def limited(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """Limit the time of the apply batch inside; after an interrupt no other begins."""

        def end() -> None:
            self._is_over = True
            log.warning(
                "an apply batch that ran during landing took more than %g minutes: the run"
                " interrupts it",
                self._limit_s / 60,
            )
            interrupt()

        self._deadline = time.monotonic() + self._limit_s
        timer = Timer(self._limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._deadline = None

    def verify(self) -> None:
        """Raise LateWriter when the run no longer waits for the current apply batch."""
        if self._is_over:
            raise LateWriter(
                "the run no longer waits for this apply batch: the apply stage applies the rest"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            at_work, is_ended = self._at_work, kind is not None and not issubclass(kind, Exception)
            self._is_over = is_ended or self._is_over
            # The current apply batch ends normally; no other begins.
            self._waiting = []
        self._executor.shutdown(wait=False)
        if at_work is None or is_ended:
            return
        try:
            at_work.result(self._step_wait_s())
        except TimeoutError:
            log.warning(
                "the apply batch that ran during landing doesn't end: the apply stage continues"
                " without it, except for a target that it still keeps locked"
            )
        finally:
            self._is_over = True

    def _step_wait_s(self) -> float:
        """Returns how long to wait for the current apply batch."""
        if self._deadline is None:
            return self._limit_s
        return max(0.0, self._deadline - time.monotonic()) + self._grace_s


def applying(runner: Runner, applied: Applied, report: Callable[[], object]) -> Overlap:
    """Returns an overlap that applies the backlog of its job; ``report`` is called after each apply
    batch.

    ``applied`` gets their results.
    """

    def apply_upto(upto: int, caller: Fence) -> int:
        # Imported only now, when landing has finished its imports: two threads could each meet
        # modules that the other has partly imported.
        from waldelta.stages.apply.apply import apply_concurrently

        # Commit settings belong to a session: an apply batch still running must not share those of
        # what follows.
        with (
            private_files(),
            runner.sibling(CONCURRENT) as sibling,
            overlap.limited(sibling.interrupt),
        ):
            try:
                return apply_concurrently(sibling, applied, upto, caller)
            finally:
                report()

    overlap = Overlap(
        WholeApplyBatches(applied.job) if runner.has_siblings else lambda _: None,
        apply_upto,
        60.0 * applied.job.pipeline.batch.apply_timeout_minutes,
    )
    return overlap


class WholeApplyBatches:
    """Finds out while changes land whether the first apply batch is complete.

    It is when another landed batch of the last one's size doesn't fit into it. Each batch's size is
    read once.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._change_log: ChangeLog | None = None
        self._bytes: dict[int, int] = {}

    def __call__(self, landed: Sequence[Landed]) -> int | None:
        """Returns the batch that ends it, of landed batches in their order; None until then."""
        return whole_upto(
            *measures(self._job, {batch.batch: batch.rows for batch in landed}, self._bytes_of)
        )

    def _bytes_of(self, after: int, upto: int) -> Mapping[int, int]:
        if self._change_log is None:
            self._change_log = self._job.change_log(self._job.read_identity())
        self._bytes = {batch: size for batch, size in self._bytes.items() if batch > after}
        self._bytes |= self._change_log.bytes_of_batches(max(self._bytes, default=after), upto)
        return self._bytes

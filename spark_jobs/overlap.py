"""Overlap: of a backlog of several steps, those that have landed are applied while the next ones land.

Landing waits for the server's decoding, then for one core; merging for the others. The slot is emptied at the pace of landing, which
waits for nothing that is applied, and goes on when applying fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from types import TracebackType
from typing import Self

from spark_jobs.steps import measures, whole_upto
from waldelta.errors import StageTimeout
from waldelta.job import Job
from waldelta.tally import Landed

log = logging.getLogger(__name__)


class Overlap:
    """Applies in a thread of its own what is ``whole`` of the batches that it is told of, a step at a time.

    Leaving it waits for the step under way, at most ``limit_s`` seconds (raises StageTimeout), unless the run is being ended; what landed
    last is left to be applied. What ``apply_upto`` raises is told in the log and keeps it from being called again: whoever applies what is
    left meets it anew.
    """

    def __init__(
        self,
        whole: Callable[[Sequence[Landed]], int | None],
        apply_upto: Callable[[int], object],
        limit_s: float,
    ) -> None:
        self._whole, self._apply_upto, self._limit_s = whole, apply_upto, limit_s
        self._executor = ThreadPoolExecutor(1, "applying")
        self._lock = Lock()
        self._waiting: list[Landed] = []
        self._at_work: Future[None] | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def landed(self, batch: Landed) -> None:
        """Tell of a batch that is landed and consumed, behind which more are to come."""
        with self._lock:
            self._waiting.append(batch)
            if self._at_work is None and not self._is_over:
                self._at_work = self._executor.submit(self._apply_steps)

    def _apply_steps(self) -> None:
        try:
            while (upto := self._next_step()) is not None:
                self._apply_upto(upto)
        except Exception as err:
            log.warning("nothing more is applied before all has landed: %s", err)
            self._is_over = True

    def _next_step(self) -> int | None:
        with self._lock:
            upto = None if self._is_over else self._whole(self._waiting)
            if upto is None:
                self._at_work = None
            else:
                self._waiting = [batch for batch in self._waiting if batch.batch > upto]
            return upto

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over, at_work = True, self._at_work
        self._executor.shutdown(wait=False)
        if at_work is None or (kind is not None and not issubclass(kind, Exception)):
            return
        try:
            at_work.result(self._limit_s)
        except TimeoutError:
            raise StageTimeout(
                f"what is applied while more lands took more than {self._limit_s / 60:g} minutes behind the landing "
                "(batch.apply_timeout_minutes); what was landed and committed stays"
            ) from err


def whole_step(job: Job, landed: Sequence[Landed]) -> int | None:
    """The batch with which the first step of these ends, once another batch like the last wouldn't fit into it."""
    change_log = job.change_log(job.slot_identity())
    return whole_upto(*measures(job, change_log, {batch.batch: batch.rows for batch in landed}))

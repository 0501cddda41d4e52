"""Overlap: of a backlog of several steps, those that have landed are applied while the next ones land.

Landing waits for the server's decoding, then for one core; merging for the others. The slot is emptied at the pace of landing, which
waits for nothing that is applied, and goes on when applying fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from spark_jobs.steps import measures, whole_upto
from waldelta.job import Job
from waldelta.tally import Landed

T = TypeVar("T")
log = logging.getLogger(__name__)


def overlap(
    land: Callable[[Callable[[Landed], object]], T],
    whole: Callable[[Sequence[Landed]], int | None],
    apply_upto: Callable[[int], object],
) -> T:
    """Run ``land`` in a thread, which tells of each batch that it is done with, and meanwhile apply here what is ``whole`` of them.

    Returns what ``land`` returns, or raises what it raises, once neither is at work; what landed last is left to be applied. What
    ``apply_upto`` raises is told in the log, and keeps it from being called again: whoever applies what is left meets it anew.
    """
    landed: SimpleQueue[Landed | None] = SimpleQueue()
    has_left = False

    def on_landed(batch: Landed) -> None:
        if has_left:
            raise InterruptedError("the run that this landing is part of is being ended")
        landed.put(batch)

    executor = ThreadPoolExecutor(1, "landing")
    try:
        landing = executor.submit(land, on_landed)
        landing.add_done_callback(lambda _: landed.put(None))
        _apply_meanwhile(_arrivals(landed), whole, apply_upto)
        return landing.result()
    finally:
        has_left = True
        # Not waited for: when the run is being ended, leaving its session ends the read that is under way.
        executor.shutdown(wait=False)


def _arrivals(landed: SimpleQueue[Landed | None]) -> Iterator[list[Landed]]:
    """What has come since it was asked for last, as often as anything has; not what came with the end."""
    while True:
        found = [landed.get()]
        while not landed.empty():
            found.append(landed.get())
        batches = [batch for batch in found if batch is not None]
        if len(batches) < len(found):
            return
        yield batches


def _apply_meanwhile(
    arrivals: Iterator[list[Landed]],
    whole: Callable[[Sequence[Landed]], int | None],
    apply_upto: Callable[[int], object],
) -> None:
    waiting: list[Landed] = []
    is_well = True
    for batches in arrivals:
        waiting += batches
        try:
            upto = whole(waiting) if is_well else None
            if upto is not None:
                apply_upto(upto)
                waiting = [batch for batch in waiting if batch.batch > upto]
        except Exception as err:
            log.warning("nothing more is applied before all has landed: %s", err)
            is_well = False


def whole_step(job: Job, landed: Sequence[Landed]) -> int | None:
    """The batch with which the first step of these ends, once another batch like the last wouldn't fit into it."""
    change_log = job.change_log(job.slot_identity())
    return whole_upto(*measures(job, change_log, {batch.batch: batch.rows for batch in landed}))

"""Copy progress: logs how far a table's copy is while Spark reads it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from waldelta.background import run_concurrently
from waldelta.errors import WaldeltaError
from waldelta.postgres import TableId
from waldelta.quantities import counted
from waldelta.snapshot import Chunk, SnapshotHolder

log = logging.getLogger(__name__)

_EVERY_S = 5.0


@contextmanager
def progress(
    holder: SnapshotHolder, table_id: TableId, tasks: Sequence[Sequence[Chunk]]
) -> Iterator[None]:
    """Log how far the copy is, from the server's view of its readers; works wherever Spark's tasks
    run.
    """

    def watch(ended: threading.Event) -> None:
        started = 0
        while not ended.wait(_EVERY_S):
            try:
                active = holder.active_tasks()
            except WaldeltaError as err:
                log.warning("table=%s %s", table_id, err)
                return
            started = max([started, *(task + 1 for task in active)])
            log.info("table=%s %s", table_id, describe_progress(tasks, started, active))

    with run_concurrently(watch, f"progress {table_id}"):
        yield


def describe_progress(
    tasks: Sequence[Sequence[Chunk]], started: int, active: dict[int, int]
) -> str:
    """Returns how much is read.

    Spark starts its tasks in order, so those before ``started`` that aren't active are done.
    """
    sizes = [max(1, sum(chunk.size_bytes for chunk in task)) for task in tasks]
    done = sum(size for number, size in enumerate(sizes[:started]) if number not in active)
    reading = (
        f", reading {len(active)} ({counted(sum(active.values()), 'row')} so far)" if active else ""
    )
    return (
        f"{100 * done // sum(sizes or [1])}%: {started - len(active)} of"
        f" {counted(len(tasks), 'task')} done{reading}"
    )

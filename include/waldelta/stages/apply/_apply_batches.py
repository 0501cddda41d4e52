"""Apply batches: which landed batches are applied together, in one commit to each target.

Landing decides it too, in a process that shouldn't load what applying needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from waldelta.pipeline import Job
from waldelta.quantities import counted

log = logging.getLogger(__name__)

# A full landed batch and the short one after it are applied together, because every MERGE rewrites
# the files that it touches.
LANDED_PER_APPLY_BATCH = 2
# The size of each landed batch (messages or bytes), and the most of it in an apply batch of
# several.
_BatchSizes = tuple[Mapping[int, int], int]


def measures(
    job: Job, sizes: Mapping[int, int], bytes_of: Callable[[int, int], Mapping[int, int]]
) -> tuple[_BatchSizes, _BatchSizes]:
    """Returns the sizes by which apply batches are planned: messages and bytes per landed batch.

    An apply batch contains at most LANDED_PER_APPLY_BATCH full landed batches, because its changes
    are collapsed in memory. ``bytes_of`` returns the bytes of the batches after one, up to another.
    """
    batch = job.pipeline.batch
    # A single landed batch is one apply batch, whatever its size.
    weights = bytes_of(min(sizes) - 1, max(sizes)) if len(sizes) > 1 else {}
    return (sizes, LANDED_PER_APPLY_BATCH * batch.max_changes), (
        weights,
        (LANDED_PER_APPLY_BATCH * batch.wal_window_mb) << 20,
    )


def plan_apply_batches(*measures: _BatchSizes) -> list[int]:
    """Returns the last landed batch of each apply batch.

    No apply batch of several landed batches exceeds the limit of any measure.

    >>> plan_apply_batches(({1: 40, 2: 50, 3: 20, 4: 500}, 100))
    [2, 3, 4]
    """
    ends: list[int] = []
    sizes_taken = [0] * len(measures)
    for batch in sorted(measures[0][0]):
        sizes_of_batch = [sizes.get(batch, 0) for sizes, _ in measures]
        together = [
            size_taken + size for size_taken, size in zip(sizes_taken, sizes_of_batch, strict=True)
        ]
        if ends and all(size <= most for size, (_, most) in zip(together, measures, strict=True)):
            ends.pop()
            sizes_taken = together
        else:
            sizes_taken = sizes_of_batch
        ends.append(batch)
    return ends


def whole_upto(*measures: _BatchSizes) -> int | None:
    """Returns the end of the first apply batch while more batches are landing.

    Returns None when another landed batch of the last one's size would fit into it.

    >>> whole_upto(({1: 40, 2: 50, 3: 80, 4: 80}, 100))
    2
    >>> whole_upto(({1: 40, 2: 50}, 100))
    2
    >>> whole_upto(({1: 40}, 100))
    """
    last = max(measures[0][0], default=0)
    expected = [({**sizes, last + 1: sizes.get(last, 0)}, most) for sizes, most in measures]
    return next(iter(plan_apply_batches(*expected)[:-1]), None)


def reported_batches(sizes: Mapping[int, int], ends: Sequence[int]) -> Iterator[int]:
    """Yields the ends of the apply batches one by one, and logs the rest and its estimated time."""
    began = time.monotonic()
    for number, upto in enumerate(ends, 1):
        yield upto
        messages = sum(size for batch, size in sizes.items() if batch <= upto)
        remaining = sum(sizes.values()) - messages
        if number < len(ends):
            seconds = (time.monotonic() - began) * remaining / max(messages, 1)
            log.info(
                "apply batch %d of %d done, up to batch %d: %s left, about %.0f s",
                number, len(ends), upto, counted(remaining, "message"), seconds,
            )  # fmt: skip

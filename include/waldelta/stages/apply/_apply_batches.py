"""Steps: which landed batches are applied together, and how far an apply has come with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from waldelta.pipeline import Job
from waldelta.quantities import counted

log = logging.getLogger(__name__)

# A full batch and the short one behind it are one step: every MERGE rewrites the files it touches.
LANDED_PER_APPLY_BATCH = 2
# How much each batch has of something, and the most of it that a step of several takes.
_BatchSizes = tuple[Mapping[int, int], int]


def measures(
    job: Job, sizes: Mapping[int, int], bytes_of: Callable[[int, int], Mapping[int, int]]
) -> tuple[_BatchSizes, _BatchSizes]:
    """What steps of these batches are planned by, of which each has so many messages: messages and
    bytes.

    A step holds about as much as so many full batches: its changes are collapsed in memory.
    ``bytes_of`` gives the bytes of the batches behind one, up to another.
    """
    batch = job.pipeline.batch
    # One batch is one step, whatever its bytes are.
    weights = bytes_of(min(sizes) - 1, max(sizes)) if len(sizes) > 1 else {}
    return (sizes, LANDED_PER_APPLY_BATCH * batch.max_changes), (
        weights,
        (LANDED_PER_APPLY_BATCH * batch.wal_window_mb) << 20,
    )


def plan_apply_batches(*measures: _BatchSizes) -> list[int]:
    """The batches after which a step ends, so that no step of several batches takes more than the
    most of any measure.

    >>> plan_apply_batches(({1: 40, 2: 50, 3: 20, 4: 500}, 100))
    [2, 3, 4]
    """
    ends: list[int] = []
    taken = [0] * len(measures)
    for batch in sorted(measures[0][0]):
        more = [sizes.get(batch, 0) for sizes, _ in measures]
        together = [held + size for held, size in zip(taken, more, strict=True)]
        if ends and all(size <= most for size, (_, most) in zip(together, measures, strict=True)):
            ends.pop()
            taken = together
        else:
            taken = more
        ends.append(batch)
    return ends


def whole_upto(*measures: _BatchSizes) -> int | None:
    """The batch with which the first step ends, while more are to come: None when another one like
    the last would fit into it.

    >>> whole_upto(({1: 40, 2: 50, 3: 80, 4: 80}, 100))
    2
    >>> whole_upto(({1: 40, 2: 50}, 100))
    2
    >>> whole_upto(({1: 40}, 100))
    """
    last = max(measures[0][0], default=0)
    expected = [({**held, last + 1: held.get(last, 0)}, most) for held, most in measures]
    return next(iter(plan_apply_batches(*expected)[:-1]), None)


def reported_batches(sizes: Mapping[int, int], ends: Sequence[int]) -> Iterator[int]:
    """The ends of the steps one by one; after each but the last the log says what is left, and for
    how long at this rate.
    """
    began = time.monotonic()
    for number, upto in enumerate(ends, 1):
        yield upto
        done = sum(size for batch, size in sizes.items() if batch <= upto)
        left = sum(sizes.values()) - done
        if number < len(ends):
            seconds = (time.monotonic() - began) * left / max(done, 1)
            log.info(
                "step %d of %d applied, up to batch %d: %s left, about %.0f s",
                number, len(ends), upto, counted(left, "message"), seconds,
            )  # fmt: skip

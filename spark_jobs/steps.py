"""Steps: which landed batches are applied together, and how far an apply has come with them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

log = logging.getLogger(__name__)


def plan_steps(*measures: tuple[Mapping[int, int], int]) -> list[int]:
    """The batches after which a step ends, so that no step of several batches takes more than the most of any measure.

    A measure is how much each batch has of something, messages or bytes, and the most of it that a step takes.

    >>> plan_steps(({1: 40, 2: 50, 3: 20, 4: 500}, 100))
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


def told_steps(sizes: Mapping[int, int], ends: Sequence[int]) -> Iterator[int]:
    """The ends of the steps one by one; after each but the last the log says what is left, and for how long at this rate."""
    began = time.monotonic()
    for number, upto in enumerate(ends, 1):
        yield upto
        done = sum(size for batch, size in sizes.items() if batch <= upto)
        left = sum(sizes.values()) - done
        if number < len(ends):
            seconds = (time.monotonic() - began) * left / max(done, 1)
            log.info(
                "step %d of %d applied, up to batch %d: %d messages left, about %.0f s",
                number, len(ends), upto, left, seconds,
            )  # fmt: skip

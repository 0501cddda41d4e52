"""Measurements that run in the background while Great Expectations is imported and prepared."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from waldelta.lake import READ_FAILURES
from waldelta.spark import Runner
from waldelta.spark.runner_pool import MOST_AT_ONCE
from waldelta.stages.check.measure.duplicate_keys import DuplicateKeys
from waldelta.stages.check.measure.profile import Measured, profile_by_values
from waldelta.stages.check.measure.references import Reference
from waldelta.stages.check.suite.kinds import KINDS, SuitePlan, kind_of
from waldelta.stages.check.suite.target_facts import CheckedTarget
from waldelta.stages.check.suite.target_kinds import CountedKind

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

# Counts of duplicate keys by the key's columns, which Spark is computing, and a mirror's profile.
Measurements = tuple[
    Mapping[tuple[str, ...], "Future[DuplicateKeys]"], "Future[Measured | None] | None"
]


@contextmanager
def in_background() -> Iterator[ThreadPoolExecutor]:
    """Yields an executor for background work; after an error the caller does not wait for it."""
    executor = ThreadPoolExecutor(1 + MOST_AT_ONCE, "ahead")
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def measure_early(
    background: ThreadPoolExecutor,
    runner: Runner,
    target: CheckedTarget,
    references: Sequence[Reference],
    met: int | None = None,
    types: Iterable[str] = KINDS,
) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
    """Have Spark count rows that don't meet expectations of these types, in the background.

    ``met`` is a version whose rows are known to meet the suite.
    """
    return {
        lookup_key: count
        for kind in map(kind_of, types)
        if isinstance(kind, CountedKind)
        for lookup_key, count in kind.start_counts(
            background=background, runner=runner, target=target, references=references, met=met
        ).items()
    }


def profile_early(
    background: ThreadPoolExecutor, target: CheckedTarget, plan: SuitePlan | Exception
) -> Future[Measured | None] | None:
    """Measure a mirror's profile in the background, where the plan has an expectation about it.

    Returns None when the plan has none, or when only Spark can measure the target.
    """
    planned = () if isinstance(plan, Exception) else plan.expectations
    asked = [one for one in planned if kind_of(one.type).needs_profile]
    if not asked or target.state.kept_as.keeps_rows:
        return None

    def measure() -> Measured | None:
        try:
            return profile_by_values(target.open(), asked[0].kwargs["columns"])
        except (*READ_FAILURES, KeyError) as err:
            log.info(
                "table=%s can't be measured on the driver, so Spark measures it: %s",
                target.state.table_name,
                err,
            )
            return None

    return background.submit(measure)

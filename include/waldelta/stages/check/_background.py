"""Measurements that run in the background while Great Expectations is imported and prepared."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from waldelta.lake.ledger import TableState
from waldelta.lake.storage import open_version
from waldelta.spark.session_pool import MOST_AT_ONCE
from waldelta.stages.check._incremental import At
from waldelta.stages.check.measure import DuplicateKeys, Measured, Reference, find_duplicate_keys
from waldelta.stages.check.measure.duplicate_keys import IntegerKey
from waldelta.stages.check.measure.kept_rows import KEPT_ROWS, find_broken_rows
from waldelta.stages.check.measure.profile import profile_by_values
from waldelta.stages.check.measure.rows_without_parent import count_rows_without_parent
from waldelta.stages.check.suite import SuitePlan
from waldelta.stages.check.suite.plan import AS_BEFORE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

# Counts of duplicate keys by the key's columns, which Spark is computing, and a mirror's profile.
Measurements = tuple[
    Mapping[tuple[str, ...], "Future[DuplicateKeys]"], "Future[Measured | None] | None"
]


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A target to check, as one Delta version."""

    state: TableState
    version: int
    uri: str

    def open(self, storage_options: Mapping[str, str] | None) -> DeltaTable:
        """Opens the target's version without Spark."""
        return open_version(self.uri, self.version, storage_options)

    @property
    def at(self) -> At:
        """Returns the state and version that earlier checks are compared with."""
        return At(self.state, self.version)

    def frame(self, spark: SparkSession) -> DataFrame:
        """Returns the rows that the source has now, as a mirror would hold them."""
        return self.state.kept_as.live_rows(self.kept(spark), self.state.key_columns)

    def kept(self, spark: SparkSession) -> DataFrame:
        """Returns all rows, including those that are no longer in the source (unlike ``frame``)."""
        return spark.read.format("delta").option("versionAsOf", self.version).load(self.uri)


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
    spark: SparkSession,
    target: CheckedTarget,
    storage_options: dict[str, str] | None,
    references: Sequence[Reference],
    met: int | None = None,
) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
    """Have Spark search for duplicate keys and for rows without a parent in the background.

    ``met`` is a version whose keys are known to be unique: only keys of rows written since then are
    compared.
    """
    asked = measure_references(background, spark, storage_options, references)
    return asked | _measure_keys(background, spark, target, storage_options, met)


def measure_references(
    background: ThreadPoolExecutor,
    spark: SparkSession,
    storage_options: dict[str, str] | None,
    references: Sequence[Reference],
) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
    """Have Spark count rows whose foreign key has no parent row, in the background."""
    return {
        reference.lookup_key: background.submit(
            count_rows_without_parent, spark, reference, storage_options
        )
        for reference in references
    }


def _measure_keys(
    background: ThreadPoolExecutor,
    spark: SparkSession,
    target: CheckedTarget,
    storage_options: dict[str, str] | None,
    met: int | None,
) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
    columns, mode = tuple(target.state.key_columns), target.state.kept_as
    asked: dict[tuple[str, ...], Future[DuplicateKeys]] = {}
    if rules := mode.invariants:
        found = background.submit(lambda: find_broken_rows(target.kept(spark), rules, columns))
        # These tasks wait for the first, and are behind it in the queue.
        for rule in rules:
            asked[KEPT_ROWS, rule.label] = background.submit(
                lambda label: found.result()[label], rule.label
            )
    if not columns:
        return asked

    def ask() -> DuplicateKeys:
        alone, since = len(columns) == 1, None if mode.keeps_rows else met
        key = None
        if alone or since is not None:
            key = IntegerKey.open(target.uri, target.version, columns[0], storage_options)
        if key is None:
            return find_duplicate_keys(target.frame(spark), columns)
        if since is not None:
            key = key.written_since(since)
        if alone and not mode.keeps_rows and key.is_unique():
            return DuplicateKeys(0)
        return find_duplicate_keys(
            key.rows_in_question(target.frame(spark)), columns, dense=alone and key.is_dense
        )

    return asked | {columns: background.submit(ask)}


def profile_early(
    background: ThreadPoolExecutor,
    target: CheckedTarget,
    plan: SuitePlan | Exception,
    storage_options: dict[str, str] | None,
) -> Future[Measured | None] | None:
    """Measure a mirror's profile in the background, where the plan has an expectation about it.

    Returns None when the plan has none, or when only Spark can measure the target.
    """
    asked = (
        [] if isinstance(plan, Exception) else [p for p in plan.expectations if p.type == AS_BEFORE]
    )
    if not asked or target.state.kept_as.keeps_rows:
        return None

    def measure() -> Measured | None:
        try:
            return profile_by_values(target.open(storage_options), asked[0].kwargs["columns"])
        except (DeltaError, OSError, pa.ArrowException, KeyError) as err:
            log.info(
                "table=%s can't be measured on the driver, so Spark measures it: %s",
                target.state.table_name,
                err,
            )
            return None

    return background.submit(measure)

"""What a check needs besides Great Expectations' own questions, on its way while that
is imported and prepared.
"""

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

from waldelta.changes.merge.live_rows import live_rows
from waldelta.config.target_mode import CHANGELOG, MIRROR
from waldelta.lake.ledger import TableState
from waldelta.lake.storage import open_version
from waldelta.metadata_columns import UNCHANGED
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

# Answers about keys, by the key's columns, that the server is working on, and what is being
# measured of a mirror.
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
        """The same without Spark."""
        return open_version(self.uri, self.version, storage_options)

    @property
    def at(self) -> At:
        """What earlier checks are compared with."""
        return At(self.state, self.version)

    def frame(self, spark: SparkSession) -> DataFrame:
        """The rows that the source has now, as a mirror would hold them."""
        return live_rows(self.kept(spark), self.state.kept_as, self.state.key_columns)

    def kept(self, spark: SparkSession) -> DataFrame:
        """All rows; ``frame`` are those that the source has now."""
        return spark.read.format("delta").option("versionAsOf", self.version).load(self.uri)


@contextmanager
def in_background() -> Iterator[ThreadPoolExecutor]:
    """What this process and the server do meanwhile; nobody waits for it after an error."""
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
    """Have the server look for duplicates of the target's key and for orphans, while Great
    Expectations is being imported here.

    ``met`` is a version whose keys are known to differ: only those that may be in two rows since
    then are compared.
    """
    asked = measure_references(background, spark, storage_options, references)
    return asked | _measure_keys(background, spark, target, storage_options, met)


def measure_references(
    background: ThreadPoolExecutor,
    spark: SparkSession,
    storage_options: dict[str, str] | None,
    references: Sequence[Reference],
) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
    """Have the server look for rows that refer to none."""
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
    if mode != MIRROR:
        # What waits for it stands behind it in the queue.
        found = background.submit(lambda: find_broken_rows(target.kept(spark), mode, columns))
        asked[KEPT_ROWS, mode] = background.submit(lambda: found.result()[0])
        if mode == CHANGELOG:
            asked[KEPT_ROWS, UNCHANGED] = background.submit(lambda: found.result()[1])
    if not columns:
        return asked

    def ask() -> DuplicateKeys:
        alone, since = len(columns) == 1, met if mode == MIRROR else None
        key = None
        if alone or since is not None:
            key = IntegerKey.open(target.uri, target.version, columns[0], storage_options)
        if key is None:
            return find_duplicate_keys(target.frame(spark), columns)
        if since is not None:
            key = key.written_since(since)
        if alone and mode == MIRROR and key.is_unique():
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
    """A mirror's profile, where the plan asks for it, measured beside Spark's scan; None where only
    Spark can tell.
    """
    asked = (
        [] if isinstance(plan, Exception) else [p for p in plan.expectations if p.type == AS_BEFORE]
    )
    if not asked or target.state.kept_as != MIRROR:
        return None

    def measure() -> Measured | None:
        try:
            return profile_by_values(target.open(storage_options), asked[0].kwargs["columns"])
        except (DeltaError, OSError, pa.ArrowException, KeyError) as err:
            log.info(
                "table=%s is measured by Spark, since it can't be here: %s",
                target.state.table_name,
                err,
            )
            return None

    return background.submit(measure)

"""Statements of Delta Lake that Spark runs: they create a table, set its properties, find a commit
in its history and maintain its files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import tenacity

from waldelta.lake.delta_target import (
    COLUMN_MAPPING,
    DELETION_VECTORS,
    WRITE_FAILURES,
    CommitConflict,
)
from waldelta.lake.layout import CHANGE_DATA_FEED, TableOptions
from waldelta.server_errors import texts
from waldelta.spark_sql import quote, string

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from waldelta.lake.delta_log import Tag
    from waldelta.lake.delta_target import DeltaTarget, TargetVersion

log = logging.getLogger(__name__)

# Parquet's own column names can't have these characters, so a table with one is written with column
# mapping.
_UNMAPPABLE = re.compile(r"[ ,;{}()\n\t=]")
_MAPPING = {
    COLUMN_MAPPING: "name",
    "delta.minReaderVersion": "2",
    "delta.minWriterVersion": "5",
}
# The settings that tag one statement's commit. A killed run leaves them in the session, and Delta
# would treat a later commit as a repetition.
COMMIT_SETTINGS = (TXN_APP, TXN_VERSION, USER_METADATA) = (
    "spark.databricks.delta.write.txnAppId",
    "spark.databricks.delta.write.txnVersion",
    "spark.databricks.delta.commitInfo.userMetadata",
)
# Whether a MERGE copies its source first.
MATERIALIZE_SOURCE = "spark.databricks.delta.merge.materializeSource"
# OPTIMIZE compacts smaller files than the first, into files of at most the second, in bytes.
SMALLEST_FILE, LARGEST_FILE = (
    "spark.databricks.delta.optimize.minFileSize",
    "spark.databricks.delta.optimize.maxFileSize",
)
PARQUET_CODEC = "spark.sql.parquet.compression.codec"
# OPTIMIZE of a clustered table sorts smaller cubes, in bytes, again together with new files. A cube
# is what one OPTIMIZE has sorted.
SMALLEST_CUBE = "spark.databricks.delta.optimize.clustering.mergeStrategy.minCubeSize.threshold"
# By this provider, the readers of a catalog take a table for one of Delta, and read its log.
CATALOG_PROVIDER = "delta"
# Delta refuses names of properties that it doesn't know, such as other engines' file size.
_ANY_PROPERTY = "spark.databricks.delta.allowArbitraryProperties.enabled"
_GENERATION = "waldelta.generation"
# How often properties are committed in all, when other writers commit first.
_ATTEMPTS = 3
_FILE_RETENTION, _LOG_RETENTION = "delta.deletedFileRetentionDuration", "delta.logRetentionDuration"
_FILE_HOURS, _LOG_HOURS = 7 * 24, 30 * 24  # Delta's defaults.


def query_at(target: DeltaTarget, version: int) -> str:
    """Returns the query of all rows of a version, for a view."""
    return f"SELECT * FROM {target.relation} VERSION AS OF {version}"  # noqa: S608 - quoted


def needs_mapping(columns: Iterable[str]) -> bool:
    """Returns whether Parquet can't use a column's name, so that columns have other names in
    files.
    """
    return any(_UNMAPPABLE.search(column) for column in columns)


def create_table(
    spark: SparkSession,
    target: DeltaTarget,
    columns: str,
    options: TableOptions,
    *,
    mapped: bool,
) -> None:
    """Create the empty table with these columns (as DDL), perhaps with column mapping."""
    statement = f"create table {target.relation} ({columns}) using delta"
    for clause, names in (
        ("partitioned by", options.partition_by),
        ("cluster by", options.cluster_by),
    ):
        statement += f" {clause} ({', '.join(map(quote, names))})" if names else ""
    if properties := _list_properties({**(_MAPPING if mapped else {}), **options.properties}):
        statement += f" tblproperties ({properties})"
    spark.conf.set(_ANY_PROPERTY, "true")
    spark.sql(statement)


def write_frame(
    target: DeltaTarget,
    frame: DataFrame,
    mode: Literal["append", "overwrite"],
    tag: Tag | None = None,
    options: Mapping[str, str] | None = None,
    partition_by: Sequence[str] = (),
) -> None:
    """Write rows in one commit, with this identity; it isn't durable yet.

    ``options`` are those of Delta's writer. Raises Spark's errors.
    """
    writer = frame.write.format("delta").mode(mode).options(**options or {})
    writer = writer.partitionBy(*partition_by)
    if tag is not None:
        writer = (
            writer.option("txnAppId", tag.app_id)
            .option("txnVersion", tag.number)
            .option("userMetadata", tag.metadata)
        )
    writer.save(target.uri)


def map_columns(spark: SparkSession, target: DeltaTarget) -> None:
    """Give the columns of a table other names in its files, which needs_mapping() asks for."""
    _set_properties(spark, target, _MAPPING)


def add_feature(spark: SparkSession, target: DeltaTarget, name: str) -> None:
    """Have a table list a feature, by Delta's name, so that its columns may need it."""
    _set_properties(spark, target, {f"delta.feature.{name}": "supported"})


def set_deletion_vectors(spark: SparkSession, target: DeltaTarget, wanted: bool) -> None:
    """Set whether later commits mark rows as deleted; existing marks stay readable either way."""
    _set_properties(spark, target, {DELETION_VECTORS: str(wanted).lower()})


def set_change_data_feed(
    spark: Callable[[], SparkSession], table: TargetVersion, enabled: bool | None
) -> None:
    """Set whether later commits show the rows that they change; None leaves it as it is.

    ``spark`` is as in set_retention().
    """
    if enabled not in (None, table.shows_changes):
        _commit_properties(spark, table, {CHANGE_DATA_FEED: str(enabled).lower()})


def set_clustering(
    spark: Callable[[], SparkSession], table: TargetVersion, by: Sequence[str] | None
) -> None:
    """Set the columns by which OPTIMIZE clusters a table's rows; None leaves them as they are.

    Delta clusters no partitioned table: its partitions stay. ``spark`` is as in set_retention().
    """
    if by is None or table.layout.partition_by or (not by and not table.is_clustered):
        return
    (row,) = spark().sql(f"describe detail {table.place.relation}").collect()
    if list(row["clusteringColumns"]) != list(by):
        listed = f"({', '.join(map(quote, by))})" if by else "none"
        spark().sql(f"alter table {table.place.relation} cluster by {listed}")
        table.update()


def set_retention(spark: Callable[[], SparkSession], table: TargetVersion, hours: int) -> None:
    """Set how long Delta keeps what an earlier version needs: the log, and the removed files.

    A VACUUM without RETAIN uses this time. After it, Delta forgets that a file was removed, and a
    VACUUM treats the file as unknown, whatever its retention is. ``spark`` gives a session where
    delta-rs can't write the table.
    """
    files, entries = f"interval {hours} hours", f"interval {max(hours, _LOG_HOURS)} hours"
    properties = {_FILE_RETENTION: files, _LOG_RETENTION: entries}
    usual = {
        _FILE_RETENTION: f"interval {_FILE_HOURS} hours",
        _LOG_RETENTION: f"interval {_LOG_HOURS} hours",
    }
    current = usual | table.properties
    if all(current[name] == value for name, value in properties.items()):
        return
    _commit_properties(spark, table, properties)


def set_generation(
    spark: Callable[[], SparkSession], table: TargetVersion, generation: int
) -> None:
    """Commit the target's generation: runs that still write an earlier one conflict with it."""
    _commit_properties(spark, table, {_GENERATION: str(generation)})


def set_properties(
    spark: Callable[[], SparkSession], table: TargetVersion, properties: Mapping[str, str]
) -> None:
    """Set those properties that differ from a table's; ``spark`` is as in set_retention()."""
    current = table.properties
    changed = {name: value for name, value in properties.items() if current.get(name) != value}
    if changed:
        _commit_properties(spark, table, changed)


def _commit_properties(
    spark: Callable[[], SparkSession], table: TargetVersion, properties: Mapping[str, str]
) -> None:
    """Commit properties by delta-rs, or by Spark where delta-rs can't write the table."""
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(CommitConflict),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        before_sleep=lambda _: table.update(),
        reraise=True,
    )
    if table.is_writable and not table.is_clustered:
        try:
            again(table.set_properties, properties)
        except WRITE_FAILURES as err:  # Spark commits, or reports why it can't.
            log.info("properties of %s are set by Spark: %s", table.place.uri, err)
        else:
            return
    _set_properties(spark(), table.place, properties)


def _set_properties(
    spark: SparkSession, target: DeltaTarget, properties: Mapping[str, str]
) -> None:
    spark.conf.set(_ANY_PROPERTY, "true")
    spark.sql(f"alter table {target.relation} set tblproperties ({_list_properties(properties)})")


def _list_properties(properties: Mapping[str, str]) -> str:
    return ", ".join(f"{string(name)} = {string(value)}" for name, value in properties.items())


def find_commit(
    spark: SparkSession, target: DeltaTarget, user_metadata: str
) -> tuple[int, Mapping[str, str]] | None:
    """Returns the newest commit with this userMetadata, as its version and its metrics.

    None when there is none among the last commits.
    """
    history = spark.sql(f"describe history {target.relation} limit 20")
    mine = (
        history.where(history.userMetadata == user_metadata)
        .select("version", "operationMetrics")
        .collect()
    )
    return max(((row[0], row[1]) for row in mine), key=lambda commit: commit[0], default=None)


def is_absent(err: Exception) -> bool:
    """Returns whether an error of Spark's says that there is no table."""
    return texts.TABLE_ABSENT.search(str(err)) is not None


def schema_option(existing: StructType | None, schema: StructType) -> str | None:
    """Returns the option by which DeltaTarget.write() changes the target's schema, if it must.

    Merging keeps its NOT NULL columns, overwriting makes all nullable. Tried on Delta 4.4:
    overwriteSchema, createOrReplace and CREATE OR REPLACE … AS SELECT all do; SET NOT NULL is
    refused afterwards, and so is CREATE OR REPLACE with other columns at a path. createOrReplace
    can add a CHECK constraint in the same commit, but that isn't NOT NULL in the schema and
    requires more of every writer.
    """
    former = (
        {field.name: field.dataType for field in existing.fields} if existing is not None else {}
    )
    added = {field.name: field.dataType for field in schema.fields}
    if former == added:
        return None
    return "mergeSchema" if former.items() <= added.items() else "overwriteSchema"


def purge_deleted_rows(spark: SparkSession, target: DeltaTarget) -> None:
    """Rewrite the files that have rows marked as deleted, without these rows."""
    spark.sql(f"reorg table {target.relation} apply (purge)").collect()


def dbt_properties(target: DeltaTarget) -> dict[str, str]:
    """Returns the properties by which dbt-duckdb finds a table; other adapters have a catalog."""
    table = target.open()
    if table.has_deletion_vectors or table.maps_columns:
        # dbt-duckdb's plugin reads by delta-rs into Arrow, which refuses such tables.
        return {"external_location": "delta_scan('{}')".format(target.uri.replace("'", "''"))}
    return {"plugin": "delta", "delta_table_path": target.uri}


def optimize(
    spark: SparkSession, target: DeltaTarget, z_order: Sequence[str] = (), *, full: bool = False
) -> None:
    """Compact small files, by the session's settings of file sizes, or sort the rows of all.

    With ``full``, a clustered table's rows are sorted even where other columns clustered them.
    """
    order = f" zorder by ({', '.join(map(quote, z_order))})" if z_order else ""
    spark.sql(f"optimize {target.relation}{' full' if full else ''}{order}").collect()


def vacuum(spark: SparkSession, target: DeltaTarget, hours: int) -> None:
    """Delete the files that no version of the last ``hours`` needs."""
    spark.sql(f"vacuum {target.relation} retain {int(hours)} hours").collect()

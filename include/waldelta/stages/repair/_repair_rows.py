"""Repair's rows: which rows a drifted target gets from a snapshot of the source, which it gives up,
and both as the source of one MERGE.

All of this is planned and staged before the repair's commit, and changes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_UPSERT, EventShape
from waldelta.changes.decode.decode import typed_key
from waldelta.changes.merge.snapshot_rows import staged_names, staged_shape
from waldelta.errors import NeedsSync
from waldelta.lake import write_parquet
from waldelta.lake.ledger import TableState
from waldelta.lake.storage import open_parquet
from waldelta.metadata_columns import RELID
from waldelta.pipeline import Job
from waldelta.pipeline.drift import Repair
from waldelta.pipeline.drift.moving_rows import moving_rows
from waldelta.pipeline.drift.repair_plan import is_dear, merges_partitions, within_leaves
from waldelta.row_filter import RowFilter, published_filter
from waldelta.row_filter.spark import spark_condition
from waldelta.snapshot import Choice, SnapshotHolder, TableCopy, plan_copy
from waldelta.snapshot.exported_snapshot import reader_name
from waldelta.snapshot.read_selected import read_choices, read_keys, whole_table
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.task_attempts import once
from waldelta.spark_sql import quote
from waldelta.stages.repair._by_driver import (
    MOST_KEYS,
    read_staged_texts,
    stage_net_in_driver,
    write_parts,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Why a row is among a repair's net changes.
ENTERS, LEAVES, TOUCHED = "enters", "leaves", "touched"
# Leaf partitions are read by at most this many tasks.
_MOST_TASKS = 16


@dataclass(frozen=True, slots=True)
class RepairRows:
    """What the snapshot shows, and what to do with it."""

    copy: TableCopy
    choices: tuple[Choice, ...]
    again: Choice
    key: tuple[tuple[str, str], ...]
    # Rows of the target leave it when this condition is true; None: no row leaves.
    leaves: str | None
    # What a whole copy would read; for one partition's target without its siblings' rows.
    whole: Choice
    # Keys that the source can't be queried for, as unheld_keys() finds them.
    unheld: frozenset[tuple[str, ...]] = frozenset()

    @property
    def shape(self) -> EventShape:
        """Returns the positions of the key among the copy's columns."""
        return staged_shape(self.copy, [column for column, _ in self.key])


def plan_rows(
    job: Job,
    drifted: Repair,
    own: RowFilter | None,
    holder: SnapshotHolder,
    connection: psycopg.Connection[Any],
) -> RepairRows:
    """Plan which rows to read and which to remove.

    Raises FilterNotTranslatable when Spark can't evaluate the rows to remove. Queries that lock a
    relation run on ``connection``: the holder's transaction would keep the lock, and a TRUNCATE or
    ALTER would wait for it, with all writers behind.
    """
    state, table = drifted.state, drifted.table
    files = holder.relfilenodes([leaf.oid for leaf in table.leaves if leaf.relkind == "r"])
    moving = moving_rows(drifted, own, files)
    with_metadata = job.pipeline.target.metadata_columns
    copy = plan_copy(
        table, holder.snapshot_id, files, holder.lsn.value if with_metadata else None,
        job.pipeline.target.types_of(state.table_name), own,
    )  # fmt: skip
    types = {column.name: column.type_name for column in state.columns}
    key = tuple((column, types[column]) for column in state.key_columns)
    stay = []
    if set(moving.after.parts) - set(moving.before.parts):
        stay.append(_spark_rule(state, table.row_filter, own, with_metadata=with_metadata))
    away = []
    if drifted.detached or drifted.replaced:
        bounds = _spark_bounds(drifted, connection, with_metadata=with_metadata)
        if drifted.detached:
            stay.append(_any(bounds.values()))
        # All current rows of such a leaf partition are read.
        away = [f"coalesce({bounds[leaf]}, false)" for leaf in sorted(drifted.replaced)]
    leaves_it = (
        " or ".join([*(f"not coalesce({condition}, false)" for condition in stay), *away]) or None
    )
    again = whole_table(table, within_leaves(drifted, moving.after.condition), files)
    whole = whole_table(
        table, own.analysed if own is not None and drifted.partition is not None else "true", files
    )
    return RepairRows(copy, moving.enter, again, key, leaves_it, whole)


def _spark_rule(
    state: TableState, published: str | None, own: RowFilter | None, *, with_metadata: bool
) -> str:
    """Returns the rows that the target takes, as a Spark condition."""
    filters = [
        *([published_filter(published)] if published is not None else []),
        *([own] if own is not None else []),
    ]
    # Without metadata columns there is no map of values that are stored raw.
    names: dict[str, str] | None = None if with_metadata else {}
    conditions = [spark_condition(one, state.columns, names) for one in filters]
    if len(conditions) < 2:
        return conditions[0] if conditions else "true"
    return f"(case when {conditions[0]} then {conditions[1]} else false end)"


def _any(conditions: Collection[str]) -> str:
    return f"({' or '.join(conditions)})" if conditions else "false"


def _spark_bounds(
    drifted: Repair, connection: psycopg.Connection[Any], *, with_metadata: bool
) -> dict[int, str]:
    """Returns by oid of each current leaf partition the Spark condition that a row belongs to it.

    In merged partitions the row itself has its partition's oid. Bounds never change while a
    partition is attached, and don't overlap, so rows of detached partitions match no condition. But
    a default partition takes the rows of detached ones: raises NeedsSync.
    """
    state, table = drifted.state, drifted.table
    if merges_partitions(drifted):
        return {leaf.oid: f"{quote(RELID)} = {leaf.oid:d}" for leaf in table.leaves}
    found = connection.execute(_BOUNDS, (drifted.partition or table.oid,)).fetchall()
    if drifted.detached and any(is_default for *_, is_default in found):
        raise NeedsSync(
            "partitions were detached or dropped, and its default partition takes over their bounds"
        )
    if {oid for oid, is_leaf, *_ in found if is_leaf} != {leaf.oid for leaf in table.leaves}:
        raise NeedsSync("its partitions changed again during the repair")
    names: dict[str, str] | None = None if with_metadata else {}
    return {
        oid: spark_condition(published_filter(text), state.columns, names)
        for oid, is_leaf, text, _ in found
        if is_leaf
    }


_BOUNDS = """
select c.oid::bigint, t.isleaf, pg_get_partition_constraintdef(c.oid), pg_get_expr(c.relpartbound,
  c.oid) = 'DEFAULT'
from pg_partition_tree(%s::oid) t
join pg_class c on c.oid = t.relid
where c.relispartition
  and (t.level > 0 or t.isleaf)
"""


def check_cost(connection: psycopg.Connection[Any], rows: RepairRows) -> float:
    """Returns the planner's estimate of the table's rows; raises NeedsSync when too many enter."""
    entering_rows = sum(
        _estimate(connection, choice.statement(rows.copy)) for choice in rows.choices
    )
    size = _estimate(connection, rows.whole.statement(rows.copy))
    if is_dear(entering_rows, size):
        raise NeedsSync(
            f"the target lacks about {entering_rows:,.0f} of {size:,.0f} rows, so a full copy"
            " costs no more"
        )
    return size


def _estimate(connection: psycopg.Connection[Any], statement: str) -> float:
    ((plan,),) = connection.execute(f"explain (format json) {statement}".encode()).fetchall()
    return float(plan[0]["Plan"]["Plan Rows"])


def stage_named(rows: RepairRows, keys: Collection[str], folder: str) -> int:
    """Write quarantined keys with the columns of touched keys; returns how many there are.

    The snapshot has such rows completely; a row that it doesn't have belongs in no target that
    continues from there. Raises NeedsSync when the key was renamed since.
    """
    if not keys:
        return 0
    types, held = dict(rows.copy.columns), [json.loads(key) for key in sorted(keys)]
    if any(column not in key for key in held for column, _ in rows.key):
        raise NeedsSync(
            f"its key was renamed while {len(keys)} of its rows are in quarantine, or were named"
            " by their keys"
        )
    texts = [[key[column] for key in held] for column, _ in rows.key]
    table = pa.table({f"t{k}": pa.array(values, pa.string()) for k, values in enumerate(texts)})
    present = np.ones(len(keys), np.bool_)
    for k, (column, _) in enumerate(rows.key):
        table = table.append_column(
            f"k{k}", typed_key(table[f"t{k}"], types[column], column, present)
        )
    write_parquet(folder, table)
    return len(keys)


def unheld_keys(
    connection: psycopg.Connection[Any], columns: Sequence[str], keys: Collection[str]
) -> frozenset[tuple[str, ...]]:
    """Returns the quarantined keys with characters that the source's encoding lacks.

    The source can't be queried for them. Only an external writer can have added such a row to the
    target.
    """
    if connection.info.parameter_status("server_encoding") == "UTF8":
        return frozenset()
    held = [json.loads(key) for key in keys]
    named = {tuple(key[column] for column in columns) for key in held if key.keys() >= set(columns)}
    return frozenset(texts for texts in named if not _has_key(connection, "".join(texts)))


def _has_key(connection: psycopg.Connection[Any], text: str) -> bool:
    try:
        return text.isascii() or bool(connection.execute("select %s::text", (text,)).rowcount)
    except psycopg.errors.UntranslatableCharacter:
        return False


def _without(
    batch: pa.RecordBatch, width: int, unheld: Collection[tuple[str, ...]]
) -> pa.RecordBatch:
    texts = zip(*(column.to_pylist() for column in batch.columns[:width]), strict=True)
    return batch.filter(pa.array([row not in unheld for row in texts], pa.bool_()))


def stage_rows(
    spark: SparkSession,
    job: Job,
    rows: RepairRows,
    holder: SnapshotHolder,
    staged: str,
    touched: Sequence[str],
) -> None:
    """Write the rows that enter and the rows of touched keys, as the snapshot has them.

    The columns are ``c<i>`` and the metadata columns. ``touched`` are the folders of keys to read
    again.
    """
    conninfo, copy, pid, count = (
        job.conninfo,
        rows.copy,
        holder.pid,
        min(len(rows.choices), _MOST_TASKS),
    )
    names = staged_names(copy)
    tasks = [rows.choices[n::count] for n in range(count)]
    again, key, unheld = rows.again, rows.key, rows.unheld
    staged_schema = pa.schema(
        [field.with_name(name) for field, name in zip(copy.schema, names, strict=True)]
    )

    def read_entering(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                name = reader_name(pid, number, copy.table)
                for found in read_choices(conninfo, copy, tasks[number], name):
                    yield found.rename_columns(names)

    def read_again(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = (_without(batch, len(key), unheld) for batch in batches) if unheld else batches
        for found in read_keys(conninfo, copy, again, key, wanted, reader_name(pid, 0, copy.table)):
            yield found.rename_columns(names)

    if _is_for_arrow(rows, touched):
        write_parquet(f"{staged}/entering", staged_schema.empty_table())
        write_parts(
            f"{staged}/again", read_again(read_staged_texts(touched, len(key))), staged_schema
        )
        return
    schema = ddl(staged_schema)
    numbers = spark.range(0, count, 1, max(1, count))
    numbers.mapInArrow(once(read_entering), schema).write.mode("overwrite").parquet(
        f"{staged}/entering"
    )
    if touched:
        keys = spark.read.parquet(*touched)
        keys.mapInArrow(once(read_again), schema).write.mode("overwrite").parquet(f"{staged}/again")


def _is_for_arrow(rows: RepairRows, touched: Sequence[str]) -> bool:
    """Returns whether only the rows of a few keys change, which the driver can stage without
    Spark.
    """
    if rows.choices or rows.leaves is not None or not touched:
        return False
    keys = sum(int(open_parquet(folder).count_rows()) for folder in touched)
    return keys <= MOST_KEYS


def stage_net(
    spark: SparkSession,
    job: Job,
    drifted: Repair,
    rows: RepairRows,
    staged: str,
    touched: Sequence[str],
) -> dict[str, int]:
    """Write the MERGE's net changes, one per key; returns row counts by reason and by action."""
    if (
        _is_for_arrow(rows, touched)
        and (counts := stage_net_in_driver(rows, staged, touched, TOUCHED)) is not None
    ):
        return counts
    places = rows.shape.key
    key = [f"b{k}" for k in range(len(places))]

    def read(part: str, why: str) -> DataFrame:
        held = spark.read.parquet(f"{staged}/{part}")
        bases = [F.col(f"c{i}").alias(base) for base, i in zip(key, places, strict=True)]
        return held.select(F.lit(why).alias("why"), *bases, "*")

    new, gone = read("entering", ENTERS), []
    if touched:
        numbered = [F.col(f"k{k}").alias(base) for k, base in enumerate(key)]
        touched_keys = spark.read.parquet(*touched).select(F.lit(TOUCHED).alias("why"), *numbered)
        # A key may have two printed forms, and was then read twice.
        gone.append(touched_keys.dropDuplicates(key))
        again = read("again", TOUCHED).dropDuplicates(key)
        new = new.join(gone[0], key, "left_anti").unionByName(again)
    if rows.leaves is not None:
        held = (
            spark.read.format("delta")
            .load(job.lake.target(drifted.state.table_name).uri)
            .where(rows.leaves)
        )
        columns = [
            F.col(quote(column)).alias(base)
            for (column, _), base in zip(rows.key, key, strict=True)
        ]
        leaving = held.select(F.lit(LEAVES).alias("why"), *columns)
        gone.append(leaving.join(gone[0], key, "left_anti") if touched else leaving)
    net = new.withColumn("action", F.lit(ACTION_UPSERT))
    for keys in gone:
        deletes = keys.join(new, key, "left_anti").withColumn("action", F.lit(ACTION_DELETE))
        net = net.unionByName(deletes, allowMissingColumns=True)
    return _written(spark, net, f"{staged}/net")


def _written(spark: SparkSession, net: DataFrame, folder: str) -> dict[str, int]:
    """Write net changes, and count them by reason and by action."""
    net.write.mode("overwrite").parquet(folder)
    counts: Counter[str] = Counter()
    for row in spark.read.parquet(folder).groupBy("why", "action").count().collect():
        counts[row["why"]] += row["count"]
        counts[row["action"]] += row["count"]
    return dict(counts)


def rows_to_judge(
    spark: SparkSession,
    rows: RepairRows,
    staged: str,
    waiting: str | None,
    keys: tuple[Collection[str], Collection[str]],
) -> DataFrame:
    """Returns the rows of stage_net() that a gate judges.

    These are rows in quarantine (keys in the first of ``keys``) and rows that the changes in
    ``waiting`` write. Accepted rows (the second) aren't judged. ``t<k>`` is the key in the
    quarantine's form, null for rows that aren't in quarantine.
    """
    judged, accepted = keys
    key = [f"b{k}" for k in range(len(rows.key))]
    found = spark.read.parquet(f"{staged}/net").where(
        (F.col("why") == TOUCHED) & (F.col("action") == ACTION_UPSERT)
    )
    texts = [f"t{k}" for k in range(len(key))]
    if stage_named(rows, judged, f"{staged}/judged"):
        numbered = [F.col(f"k{k}").alias(base) for k, base in enumerate(key)]
        named = spark.read.parquet(f"{staged}/judged").select(*numbered, *texts)
        found = found.join(named, key, "left")
    else:
        found = found.withColumns({text: F.lit(None).cast("string") for text in texts})
    if waiting is None:
        found = found.where(F.col("t0").isNotNull())
    else:
        brought = _keys(spark, rows, waiting).dropDuplicates(key).withColumn("waits", F.lit(True))
        found = (
            found.join(brought, key, "left")
            .where(F.col("t0").isNotNull() | F.col("waits"))
            .drop("waits")
        )
    if stage_named(rows, accepted, f"{staged}/accepted"):
        found = found.join(_keys(spark, rows, f"{staged}/accepted"), key, "left_anti")
    return found


def hold_back(
    spark: SparkSession, rows: RepairRows, staged: str, keys: Collection[str]
) -> tuple[str, dict[str, int]]:
    """Remove rows that stay in quarantine from stage_net()'s output.

    Returns the folder of the rest, and its counts.
    """
    stage_named(rows, keys, f"{staged}/still")
    key = [f"b{k}" for k in range(len(rows.key))]
    rest = spark.read.parquet(f"{staged}/net").join(
        _keys(spark, rows, f"{staged}/still"), key, "left_anti"
    )
    return f"{staged}/let", _written(spark, rest, f"{staged}/let")


def untouched(
    spark: SparkSession, rows: RepairRows, keys: Collection[str], staged: str, touched: int
) -> set[str]:
    """Returns those of these quarantined keys that aren't among the staged touched keys."""
    if not keys or not touched:
        return set(keys)
    stage_named(rows, keys, f"{staged}/untouched")
    texts = {tuple(json.loads(key)[column] for column, _ in rows.key): key for key in keys}
    bases = [f"b{k}" for k in range(len(rows.key))]
    held = spark.read.parquet(f"{staged}/untouched").withColumns(
        {base: F.col(f"k{base[1:]}") for base in bases}
    )
    left = held.join(_keys(spark, rows, f"{staged}/touched"), bases, "left_anti")
    return {
        texts[tuple(row)] for row in left.select(*(f"t{k}" for k in range(len(bases)))).collect()
    }


def _keys(spark: SparkSession, rows: RepairRows, folder: str) -> DataFrame:
    return spark.read.parquet(folder).select(
        *(F.col(f"k{k}").alias(f"b{k}") for k in range(len(rows.key)))
    )

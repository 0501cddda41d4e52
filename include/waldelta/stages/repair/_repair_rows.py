"""Repair's rows: which rows a drifted target gets from a snapshot of the source, which it gives up,
and both as the source of one MERGE.

All of this is planned and staged before the repair's commit, and changes nothing.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.arrow import Ints
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_UPSERT,
    EventShape,
    codes_of_both,
)
from waldelta.changes.decode.row_keys import named_keys
from waldelta.changes.merge.by_driver import NetChanges, commit_in_driver, read_within
from waldelta.changes.merge.statements import CommitTag, staged_names, staged_shape
from waldelta.changes.stage.net_files import parts_at_once
from waldelta.changes.stage.stage import Staged
from waldelta.errors import NeedsSync, without_values
from waldelta.lake import DeltaTarget, Fence, open_parquet, row_count, write_parquet
from waldelta.metadata_columns import RELID
from waldelta.pipeline import Job
from waldelta.pipeline.drift import Repair, is_dear
from waldelta.pipeline.drift.repair_plan import (
    MovingRows,
    merges_partitions,
    moving_rows,
    within_leaves,
)
from waldelta.postgres import Connection
from waldelta.postgres.planner_estimate import is_superuser, planned_rows
from waldelta.row_filter import RowFilter, published_filter
from waldelta.row_filter.spark.translate import spark_condition
from waldelta.snapshot import (
    Choice,
    KeyAttribute,
    SnapshotHolder,
    TableCopy,
    plan_copy,
    reader_name,
    whole_table,
)
from waldelta.snapshot.read_selected import KEYS_PER_READ, key_columns, read_choices, read_keys
from waldelta.spark import Runner
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.task_attempts import once
from waldelta.spark_sql import parquet, quote

# Why a row is among a repair's net changes.
ENTERS, LEAVES, TOUCHED = "enters", "leaves", "touched"
# Leaf partitions are read by at most this many tasks.
_MOST_TASKS = 16


@dataclass(frozen=True, slots=True)
class RepairRows:
    """What the snapshot shows of a drifted target, with the target's filter as of now, and what to
    do with it.
    """

    drifted: Repair
    own: RowFilter | None
    holder: SnapshotHolder
    copy: TableCopy
    choices: tuple[Choice, ...]
    again: Choice
    key: tuple[KeyAttribute, ...]
    # Rows of the target leave it when this condition is true; None: no row leaves.
    leaves: str | None
    # The planner's estimate of the rows that a whole copy would read.
    size: int
    # Keys that the source can't be queried for, as _unheld_keys() finds them.
    unheld: frozenset[tuple[str, ...]]

    @property
    def shape(self) -> EventShape:
        """Returns the positions of the key among the copy's columns."""
        return staged_shape(self.copy, [column.name for column in self.key])

    def named(self, keys: Iterable[str]) -> dict[tuple[str, ...], str]:
        """Returns quarantined keys by their texts, in the order of the key's columns."""
        return {tuple(json.loads(key)[column.name] for column in self.key): key for key in keys}


def plan_rows(
    job: Job,
    drifted: Repair,
    own: RowFilter | None,
    holder: SnapshotHolder,
    connection: psycopg.Connection[Any],
    named: Collection[str],
) -> RepairRows:
    """Plan which rows to read and which to remove; ``named`` are the quarantined keys to read.

    Raises FilterNotTranslatable when Spark can't evaluate the rows to remove, and NeedsSync when
    too many enter. Queries that lock a relation run on ``connection``: the holder's transaction
    would keep the lock, and a TRUNCATE or ALTER would wait for it, with all writers behind.
    """
    state, table = drifted.state, drifted.table
    files = holder.relfilenodes([leaf.oid for leaf in table.stored_leaves])
    moving = moving_rows(drifted, own, files)
    with_metadata = job.pipeline.target.metadata_columns
    copy = plan_copy(
        table, holder.snapshot_id, files, holder.lsn.value if with_metadata else None,
        job.pipeline.target.types_of(state.table_name), own,
    )  # fmt: skip
    key = key_columns(table, state.key_columns)
    again = whole_table(table, within_leaves(drifted, moving.after.condition), files)
    leaves = _leaving(drifted, moving, own, connection, with_metadata=with_metadata)
    # A target of one partition doesn't take its siblings' rows.
    taken = own.analysed if own is not None and drifted.partition is not None else "true"
    size, *entering = estimate_rows(
        connection,
        job.lake.target(state.table_name),
        [sql.SQL(c.statement(copy)) for c in (whole_table(table, taken, files), *moving.enter)],
    )
    if is_dear(sum(entering), size):
        raise NeedsSync(
            f"the target lacks about {sum(entering):,} of {size:,} rows, so a full copy costs no"
            " more"
        )
    unheld = _unheld_keys(connection, state.key_columns, named)
    return RepairRows(drifted, own, holder, copy, moving.enter, again, key, leaves, size, unheld)


def estimate_rows(
    connection: Connection, target: DeltaTarget, statements: Sequence[sql.Composable]
) -> list[int]:
    """Return the estimated rows of a table's SELECTs, of which the first reads the whole table.

    A superuser has no query planned for an estimate: the whole table is as large as its target, and
    nothing is known of the others.
    """
    if is_superuser(connection):
        return [row_count(target.open().files) or 0, *(0 for _ in statements[1:])]
    return [planned_rows(connection, statement) for statement in statements]


def _leaving(
    drifted: Repair,
    moving: MovingRows,
    own: RowFilter | None,
    connection: psycopg.Connection[Any],
    *,
    with_metadata: bool,
) -> str | None:
    """Returns the target's rows that leave it, as a Spark condition; None: no row leaves."""
    state, table = drifted.state, drifted.table
    # Without metadata columns there is no map of values that are stored raw.
    names: dict[str, str] | None = None if with_metadata else {}

    def as_spark(rule: RowFilter) -> str:
        return spark_condition(rule, state.columns, names)

    stay, away = [], []
    if set(moving.after.parts) - set(moving.before.parts):
        published = [published_filter(table.row_filter)] if table.row_filter is not None else []
        rules = [as_spark(rule) for rule in (*published, *([own] if own is not None else []))]
        # The second is evaluated only for rows that the first admits.
        stay.append(
            rules[0] if len(rules) == 1 else f"(case when {' then '.join(rules)} else false end)"
        )
    if drifted.detached or drifted.replaced:
        bounds = _spark_bounds(drifted, connection, as_spark)
        if drifted.detached:
            stay.append(" or ".join(bounds.values()) or "false")
        # All current rows of such a leaf partition are read.
        away = [f"coalesce({bounds[leaf]}, false)" for leaf in sorted(drifted.replaced)]
    leaving = [*(f"not coalesce({condition}, false)" for condition in stay), *away]
    return " or ".join(leaving) or None


def _spark_bounds(
    drifted: Repair, connection: psycopg.Connection[Any], as_spark: Callable[[RowFilter], str]
) -> dict[int, str]:
    """Returns by oid of each current leaf partition the Spark condition that a row belongs to it.

    In merged partitions the row itself has its partition's oid. Bounds never change while a
    partition is attached, and don't overlap, so rows of detached partitions match no condition. But
    a default partition takes the rows of detached ones: raises NeedsSync.
    """
    table = drifted.table
    if merges_partitions(drifted):
        return {leaf.oid: f"{quote(RELID)} = {leaf.oid:d}" for leaf in table.leaves}
    found = connection.execute(_BOUNDS, (drifted.partition or table.oid,)).fetchall()
    if drifted.detached and any(is_default for *_, is_default in found):
        raise NeedsSync(
            "partitions were detached or dropped, and its default partition takes over their bounds"
        )
    if {oid for oid, is_leaf, *_ in found if is_leaf} != {leaf.oid for leaf in table.leaves}:
        raise NeedsSync("its partitions changed again during the repair")
    return {oid: as_spark(published_filter(text)) for oid, is_leaf, text, _ in found if is_leaf}


_BOUNDS = """
select c.oid::bigint, t.isleaf, pg_get_partition_constraintdef(c.oid), pg_get_expr(c.relpartbound,
  c.oid) = 'DEFAULT'
from pg_partition_tree(%s::oid) t
join pg_class c on c.oid = t.relid
where c.relispartition
  and (t.level > 0 or t.isleaf)
"""


def stage_named(rows: RepairRows, keys: Collection[str], folder: str) -> int:
    """Write quarantined keys with the columns of touched keys; returns how many there are.

    The snapshot has such rows completely; a row that it doesn't have belongs in no target that
    continues from there. Raises NeedsSync when the key was renamed since.
    """
    types, names = dict(rows.copy.columns), [column.name for column in rows.key]
    if any(not json.loads(key).keys() >= {*names} for key in keys):
        raise NeedsSync(
            f"its key was renamed while {len(keys)} of its rows are in quarantine, or were named"
            " by their keys"
        )
    write_parquet(folder, named_keys(keys, [(name, types[name]) for name in names]))
    return len(keys)


def _read_keys(
    runner: Runner, rows: RepairRows, *folders: str, keys: Collection[str] | None = None
) -> DataFrame:
    """Returns staged keys, as ``b<k>`` and as their texts ``t<k>``; stages ``keys`` before that."""
    if keys is not None:
        stage_named(rows, keys, *folders)
    staged = runner.spark().read.parquet(*folders)  # Columns need a session that has started.
    bases = [F.col(f"k{k}").alias(base) for k, base in enumerate(rows.shape.bases)]
    return staged.select(*bases, *(f"t{k}" for k in range(len(bases))))


def _unheld_keys(
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
    runner: Runner,
    job: Job,
    rows: RepairRows,
    staged: str,
    touched: Mapping[str, int],
) -> None:
    """Write the rows that enter and the rows of touched keys, as the snapshot has them.

    The columns are ``c<i>`` and the metadata columns. ``touched`` are the folders of keys to read
    again, with the number of keys.
    """
    conninfo, copy, pid = job.source.conninfo, rows.copy, rows.holder.pid
    again, key, unheld = rows.again, rows.key, rows.unheld
    count = min(len(rows.choices), _MOST_TASKS)
    tasks = [rows.choices[n::count] for n in range(count)]
    names = staged_names(copy)
    schema = pa.schema([f.with_name(name) for f, name in zip(copy.schema, names, strict=True)])

    def read_entering(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            name = reader_name(pid, number, copy.table)
            for found in read_choices(conninfo, copy, tasks[number], name):
                yield found.rename_columns(names)

    def read_again(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wanted = (_without(batch, len(key), unheld) for batch in batches) if unheld else batches
        for found in read_keys(conninfo, copy, again, key, wanted, reader_name(pid, 0, copy.table)):
            yield found.rename_columns(names)

    if _is_for_arrow(rows, touched):
        write_parquet(f"{staged}/entering", schema.empty_table())
        write_parts(f"{staged}/again", read_again(read_staged_texts(touched, len(key))), schema)
        return
    staging = [
        (runner.spark().range(0, count, 1, max(1, count)), read_entering, f"{staged}/entering")
    ]
    if touched:
        staging.append((runner.spark().read.parquet(*touched), read_again, f"{staged}/again"))
    for wanted, read, folder in staging:
        wanted.mapInArrow(once(read), ddl(schema)).write.mode("overwrite").parquet(folder)


def _is_for_arrow(rows: RepairRows, touched: Mapping[str, int]) -> bool:
    """Returns whether only the rows of a few keys change, which the driver can stage without
    Spark.
    """
    only_keys = not rows.choices and rows.leaves is None
    return only_keys and 0 < sum(touched.values()) <= MOST_KEYS


def stage_net(
    runner: Runner,
    job: Job,
    rows: RepairRows,
    staged: str,
    touched: Mapping[str, int],
) -> Staged:
    """Write the MERGE's net changes, one per key, with counts by reason and by action."""
    folder, bases = f"{staged}/net", rows.shape.bases
    if (
        _is_for_arrow(rows, touched)
        and (counts := stage_net_in_driver(rows, staged, touched, TOUCHED)) is not None
    ):
        return Staged(folder, parquet(folder), counts)

    def read(part: str, why: str) -> DataFrame:
        found = runner.spark().read.parquet(f"{staged}/{part}").withColumn("why", F.lit(why))
        return found.withColumns(
            {base: F.col(f"c{i}") for base, i in zip(bases, rows.shape.key, strict=True)}
        )

    new, gone = read("entering", ENTERS), []
    if touched:
        # A key may have two printed forms, and was then read twice.
        keys = _read_keys(runner, rows, *touched).select(F.lit(TOUCHED).alias("why"), *bases)
        gone.append(keys.dropDuplicates(bases))
        again = read("again", TOUCHED).dropDuplicates(bases)
        new = new.join(gone[0], bases, "left_anti").unionByName(again)
    if rows.leaves is not None:
        held = job.lake.target(rows.drifted.state.table_name).frame(runner.spark())
        columns = [
            F.col(quote(column.name)).alias(base)
            for column, base in zip(rows.key, bases, strict=True)
        ]
        leaving = held.where(rows.leaves).select(F.lit(LEAVES).alias("why"), *columns)
        gone.append(leaving.join(gone[0], bases, "left_anti") if touched else leaving)
    net = new.withColumn("action", F.lit(ACTION_UPSERT))
    for keys in gone:
        deletes = keys.join(new, bases, "left_anti").withColumn("action", F.lit(ACTION_DELETE))
        net = net.unionByName(deletes, allowMissingColumns=True)
    return _written(runner, net, folder)


def _written(runner: Runner, net: DataFrame, folder: str) -> Staged:
    """Write net changes, and count them by reason and by action."""
    net.write.mode("overwrite").parquet(folder)
    counts: Counter[str] = Counter()
    for row in runner.spark().read.parquet(folder).groupBy("why", "action").count().collect():
        counts.update({row["why"]: row["count"], row["action"]: row["count"]})
    return Staged(folder, parquet(folder), dict(counts))


def rows_to_judge(
    runner: Runner,
    rows: RepairRows,
    staged: str,
    waiting: str | None,
    judged: Collection[str],
    accepted: Collection[str],
) -> DataFrame:
    """Returns the rows of stage_net() that a gate judges.

    These are the rows in quarantine with the keys in ``judged``, and rows that the changes in
    ``waiting`` write. Accepted rows aren't judged. ``t<k>`` is the key in the quarantine's form,
    null for rows that aren't in quarantine.
    """
    found = runner.spark().read.parquet(f"{staged}/net")
    bases, is_judged = rows.shape.bases, F.col("t0").isNotNull()
    found = found.where((F.col("why") == TOUCHED) & (F.col("action") == ACTION_UPSERT))
    found = found.join(_read_keys(runner, rows, f"{staged}/judged", keys=judged), bases, "left")
    if waiting is not None:
        brought = _read_keys(runner, rows, waiting).select(*bases).distinct()
        found = found.join(brought.withColumn("waits", F.lit(True)), bases, "left")
        is_judged |= F.col("waits")
    let = _read_keys(runner, rows, f"{staged}/accepted", keys=accepted)
    return found.where(is_judged).drop("waits").join(let, bases, "left_anti")


def hold_back(runner: Runner, rows: RepairRows, staged: str, keys: Collection[str]) -> Staged:
    """Write and count stage_net()'s output, without the rows that stay in quarantine."""
    still = _read_keys(runner, rows, f"{staged}/still", keys=keys)
    rest = runner.spark().read.parquet(f"{staged}/net").join(still, rows.shape.bases, "left_anti")
    return _written(runner, rest, f"{staged}/let")


def untouched(
    runner: Runner, rows: RepairRows, keys: Collection[str], staged: str, touched: str | None
) -> set[str]:
    """Returns those of these quarantined keys that aren't among the keys in folder ``touched``."""
    if not keys or touched is None:
        return set(keys)
    held = _read_keys(runner, rows, f"{staged}/untouched", keys=keys)
    left = held.join(_read_keys(runner, rows, touched), rows.shape.bases, "left_anti")
    names = rows.named(keys)
    return {names[tuple(row)] for row in left.drop(*rows.shape.bases).collect()}


log = logging.getLogger(__name__)

# One session in the driver reads up to this many keys; more keys are divided among Spark tasks.
MOST_KEYS = 20_000


def read_staged_texts(folders: Collection[str], width: int) -> Iterator[pa.RecordBatch]:
    """Yields the texts of the touched keys in these folders (columns ``t<k>``), in batches for one
    statement each.
    """
    for folder in folders:
        texts = open_parquet(folder).to_table([f"t{k}" for k in range(width)])
        yield from texts.combine_chunks().to_batches(KEYS_PER_READ)


def _read_staged_keys(folders: Collection[str], rows: RepairRows) -> pa.Table:
    """Returns the touched keys (columns ``k<k>``) cast to the target's types.

    Spark's files don't store these types exactly.
    """
    types = dict(rows.copy.columns)
    schema = pa.schema([(f"k{k}", types[column.name].arrow) for k, column in enumerate(rows.key)])
    return pa.concat_tables(
        [open_parquet(folder).to_table(schema.names).cast(schema) for folder in folders]
    )


def write_parts(folder: str, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
    """Replace a folder's files by these rows, with one file's rows in memory."""
    write_parquet(folder, schema.empty_table())
    for number, part in enumerate(parts_at_once(batches), 1):
        write_parquet(folder, part.cast(schema), number)


def net_changes(again: pa.Table, touched: pa.Table, places: Sequence[int]) -> pa.Table:
    """Returns one net change per touched key (columns ``k<k>``): the row read again, else a delete.

    ``places`` are the indexes of the key's columns in ``again``. A key may have two printed forms,
    and was then read twice.
    """
    bases = [f"b{k}" for k in range(len(places))]
    for base, place in zip(bases, places, strict=True):
        again = again.append_column(base, again[f"c{place}"])
    keys = pa.table({base: touched[f"k{k}"].cast(again[base].type) for k, base in enumerate(bases)})
    read, asked = codes_of_both([again[base] for base in bases], keys.columns)
    found = again.take(pa.array(_first_of_each(read)))
    first = _first_of_each(asked)
    gone = keys.take(pa.array(first[~np.isin(asked[first], read)]))
    parts = [(found, ACTION_UPSERT), (gone, ACTION_DELETE)]
    acting = [
        part.append_column("action", pa.array([action] * len(part), pa.string()))
        for part, action in parts
    ]
    return pa.concat_tables(acting, promote_options="default").combine_chunks()


def _first_of_each(codes: Ints) -> Ints:
    _, first = np.unique(codes, return_index=True)
    return np.asarray(np.sort(first), np.int64)


def stage_net_in_driver(
    rows: RepairRows, staged: str, touched: Collection[str], why: str
) -> dict[str, int] | None:
    """Write the net changes of the rows read again, as stage_net() does.

    Returns None when they don't fit in memory, or when Arrow can't compare keys of their types
    (arrays).
    """
    dataset = open_parquet(f"{staged}/again")
    if (again := read_within(dataset, dataset.schema)) is None:
        return None
    try:
        net = net_changes(again, _read_staged_keys(touched, rows), rows.shape.key)
    except pa.ArrowException as err:
        log.info(
            "Spark stages the rows of %s, since the driver can't: %s", staged, without_values(err)
        )
        return None
    write_parquet(
        f"{staged}/net", net.add_column(0, "why", pa.array([why] * len(net), pa.string()))
    )
    counts = Counter({why: len(net)})
    for found in pc.value_counts(net["action"]).to_pylist():
        counts[found["values"]] = found["counts"]
    return {name: count for name, count in counts.items() if count}


def merge_rows_in_driver(
    job: Job,
    table_name: str,
    rows: RepairRows,
    folder: str,
    tag: CommitTag,
    fence: Fence,
) -> bool:
    """Merge the rows staged in ``folder`` into a small target, as merge_rows() does.

    Returns False where Spark must merge. ``fence`` is verified as by merge_in_driver().
    """
    try:
        dataset = open_parquet(folder)
        net = read_within(dataset, dataset.schema)
    except (OSError, pa.ArrowException) as err:
        log.info("table=%s can't be merged on the driver: %s", table_name, without_values(err))
        return False
    if net is None:
        return False
    names = [name for name, _ in rows.copy.columns]
    changes = NetChanges.whole(net, names, rows.shape, metadata=rows.copy.lsn is not None)
    return commit_in_driver(job, table_name, changes, tag, fence) is not None

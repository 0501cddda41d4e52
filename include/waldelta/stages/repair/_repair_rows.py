"""Repair's rows: which rows a drifted target gets from a snapshot of the source, which it gives up,
and both as the source of one MERGE; which of them a gate judges, and which stay in quarantine.

All of this is planned and staged before the repair's commit, and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from psycopg import sql

from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_PURGE
from waldelta.changes.decode.net_rows import first_of_each, key_codes, named_keys, typed_columns
from waldelta.changes.stage.net_files import NetFiles, small_rows
from waldelta.errors import NeedsSync
from waldelta.lake import DeltaTarget, Lake, open_parquet, row_count, write_parquet
from waldelta.metadata_columns import RELID
from waldelta.pipeline import Job
from waldelta.pipeline.drift import (
    MovingRows,
    Repair,
    is_dear,
    merges_partitions,
    moving_rows,
    within_leaves,
)
from waldelta.postgres import Connection, is_superuser, planned_rows
from waldelta.quantities import counted
from waldelta.row_filter import RowFilter, published_filter
from waldelta.row_filter.spark.evaluate import evaluate
from waldelta.row_filter.spark.translate import spark_condition
from waldelta.snapshot.exported_snapshot import SnapshotHolder, reader_name
from waldelta.snapshot.read_selected import (
    KEYS_PER_READ,
    Choice,
    read_choices,
    read_keys,
    whole_table,
)
from waldelta.snapshot.read_table import TableCopy, plan_copy
from waldelta.snapshot.source_columns import KeyAttribute, key_columns
from waldelta.spark import Runner
from waldelta.spark.runner import Task
from waldelta.spark_sql import quote
from waldelta.stages.repair.mend.mend import STAGED_ROWS, ExpectedRows, NetRows, write_rows
from waldelta.types import TargetType

# Why a row is among a repair's net changes.
ENTERS, LEAVES, TOUCHED = "enters", "leaves", "touched"
# Leaf partitions are read by at most this many tasks.
_MOST_TASKS = 16
# A task reads the rows of this many keys.
KEYS_PER_TASK = 50_000
# The keys are in the driver's memory. With more, a copy is cheaper than reading by keys.
MOST_KEYS = 10_000_000


@dataclass(frozen=True, slots=True)
class RepairRows:
    """What the snapshot shows of a drifted target, with the target's filter as of now, and what to
    do with it.
    """

    drifted: Repair
    target_filter: RowFilter | None
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
    def key_types(self) -> list[TargetType]:
        """Returns the types of the key's columns."""
        types = dict(self.copy.columns)
        return [types[column.name] for column in self.key]

    def expected(self, lake: Lake, folder: str) -> ExpectedRows:
        """Returns the description of the rows that are staged in a folder."""
        return ExpectedRows(lake, folder, self.copy, [column.name for column in self.key])

    def named(self, keys: Iterable[str]) -> dict[tuple[str, ...], str]:
        """Returns quarantined keys by their texts, in the order of the key's columns."""
        return {tuple(json.loads(key)[column.name] for column in self.key): key for key in keys}


def plan_rows(
    job: Job,
    drifted: Repair,
    target_filter: RowFilter | None,
    holder: SnapshotHolder,
    connection: psycopg.Connection[Any],
    keys: Collection[str],
) -> RepairRows:
    """Plan which rows to read and which to remove; ``keys`` are the quarantined keys to read.

    Raises FilterNotTranslatable when Spark can't evaluate the rows to remove, and NeedsSync when
    too many enter. Queries that lock a relation run on ``connection``: the holder's transaction
    would keep the lock, and a TRUNCATE or ALTER would wait for it, with all writers behind.
    """
    state, table = drifted.state, drifted.table
    files = holder.relfilenodes([leaf.oid for leaf in table.stored_leaves])
    moving = moving_rows(drifted, target_filter, files)
    with_metadata = job.pipeline.target.metadata_columns
    copy = plan_copy(
        table, holder.snapshot_id, files, holder.lsn.value if with_metadata else None,
        job.pipeline.target.types_of(state.table_name), target_filter,
    )  # fmt: skip
    key = key_columns(table, state.key_columns)
    again = whole_table(table, within_leaves(drifted, moving.after.condition), files)
    leaves = _leaving(drifted, moving, target_filter, connection, with_metadata=with_metadata)
    # A target of one partition doesn't take its siblings' rows.
    condition = (
        target_filter.analysed
        if target_filter is not None and drifted.partition is not None
        else "true"
    )
    size, *entering = estimate_rows(
        connection,
        job.lake.target(state.table_name),
        [sql.SQL(c.statement(copy)) for c in (whole_table(table, condition, files), *moving.enter)],
    )
    if is_dear(sum(entering), size):
        raise NeedsSync(
            f"the target lacks about {sum(entering):,} of {size:,} rows, so a full copy costs no"
            " more"
        )
    unheld = _unheld_keys(connection, state.key_columns, keys)
    return RepairRows(
        drifted, target_filter, holder, copy, moving.enter, again, key, leaves, size, unheld
    )


def estimate_rows(
    connection: Connection, target: DeltaTarget, statements: Sequence[sql.Composable]
) -> list[int]:
    """Returns the estimated number of rows of each SELECT on a table; the first one reads the whole
    table.

    No query is planned as a superuser. The first number is then the target's row count, and the
    others are 0.
    """
    if is_superuser(connection):
        return [row_count(target.open().files) or 0, *(0 for _ in statements[1:])]
    return [planned_rows(connection, statement) for statement in statements]


def _leaving(
    drifted: Repair,
    moving: MovingRows,
    target_filter: RowFilter | None,
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
    if set(moving.after.parts) - set(moving.former.parts):
        published = [published_filter(table.row_filter)] if table.row_filter is not None else []
        rules = [
            as_spark(rule)
            for rule in (*published, *([target_filter] if target_filter is not None else []))
        ]
        # The second is evaluated only for rows that the first admits.
        stay.append(
            rules[0] if len(rules) == 1 else f"(case when {' then '.join(rules)} else false end)"
        )
    if drifted.detached or drifted.replaced_leaves:
        bounds = _spark_bounds(drifted, connection, as_spark)
        if drifted.detached:
            stay.append(" or ".join(bounds.values()) or "false")
        # All current rows of such a leaf partition are read.
        away = [f"coalesce({bounds[leaf]}, false)" for leaf in sorted(drifted.replaced_leaves)]
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
    rows = connection.execute(_BOUNDS, (drifted.partition or table.oid,)).fetchall()
    if drifted.detached and any(is_default for *_, is_default in rows):
        raise NeedsSync(
            "partitions were detached or dropped, and its default partition takes over their bounds"
        )
    if {oid for oid, is_leaf, *_ in rows if is_leaf} != {leaf.oid for leaf in table.leaves}:
        raise NeedsSync("its partitions changed again during the repair")
    return {oid: as_spark(published_filter(text)) for oid, is_leaf, text, _ in rows if is_leaf}


_BOUNDS = """
select c.oid::bigint, t.isleaf, pg_get_partition_constraintdef(c.oid), pg_get_expr(c.relpartbound,
  c.oid) = 'DEFAULT'
from pg_partition_tree(%s::oid) t
join pg_class c on c.oid = t.relid
where c.relispartition
  and (t.level > 0 or t.isleaf)
"""


def quarantined_keys(rows: RepairRows, keys: Collection[str]) -> pa.Table:
    """Returns quarantined keys with the columns of touched keys.

    The snapshot has such rows completely; a row that it doesn't have belongs in no target that
    continues from there. Raises NeedsSync when the key was renamed since.
    """
    names = [column.name for column in rows.key]
    if any(not json.loads(key).keys() >= {*names} for key in keys):
        raise NeedsSync(
            "its key was renamed, so the source can't be queried by old keys of rows that are in"
            f" quarantine or were found to differ ({counted(len(keys), 'key')})"
        )
    return named_keys(keys, list(zip(names, rows.key_types, strict=True)))


def _unheld_keys(
    connection: psycopg.Connection[Any], columns: Sequence[str], keys: Collection[str]
) -> frozenset[tuple[str, ...]]:
    """Returns the quarantined keys with characters that the source's encoding lacks.

    The source can't be queried for them. Only an external writer can have added such a row to the
    target.
    """
    if connection.info.parameter_status("server_encoding") == "UTF8":
        return frozenset()
    keys_by_column = [json.loads(key) for key in keys]
    key_texts = {
        tuple(key[column] for column in columns)
        for key in keys_by_column
        if key.keys() >= set(columns)
    }
    return frozenset(texts for texts in key_texts if not _has_key(connection, "".join(texts)))


def _has_key(connection: psycopg.Connection[Any], text: str) -> bool:
    try:
        return text.isascii() or bool(connection.execute("select %s::text", (text,)).rowcount)
    except psycopg.errors.UntranslatableCharacter:
        return False


def stage_rows(
    runner: Runner, job: Job, rows: RepairRows, keys: pa.Table, folder: str
) -> tuple[ExpectedRows, int]:
    """Stage the snapshot's rows: those that enter, those that leave, and those of ``keys``.

    Returns how many were staged, too. A key has one net change: its row, or, without one, a purge.
    """
    expected = rows.expected(job.lake, folder)
    bases, kinds, schema = expected.numbering.bases, expected.key_types, expected.schema
    leaving = _leaving_keys(runner, job, rows, f"{folder}/leaving")
    keys = keys.take(pa.array(first_of_each(*key_codes(kinds, typed_columns(keys)))))
    if (count := len(keys) + len(leaving)) > MOST_KEYS:
        raise NeedsSync(f"{count:,} of its keys would be read or removed one by one")
    parts = [keys.slice(first, KEYS_PER_TASK) for first in range(0, len(keys), KEYS_PER_TASK)]
    for number, part in enumerate(parts):
        write_parquet(f"{folder}/keys", part.select([f"t{k}" for k in range(len(kinds))]), number)
    tasks = len(parts) + min(len(rows.choices), _MOST_TASKS)
    reader = _reader(job.source.conninfo, expected, rows, len(parts))
    written = runner.run(tasks, STAGED_ROWS, reader)
    net, read = expected.bucket("expected", 0), schema.empty_table()
    if written:
        read = NetFiles.of(net, job.lake).read(bases)
    gone = {TOUCHED: typed_columns(keys), LEAVES: [leaving[base] for base in bases]}
    purges = removals(kinds, [read[base] for base in bases], gone, schema)
    write_parquet(net, purges, len(written) + 1)
    return expected, sum(row["rows"] for row in written) + len(purges)


def _reader(conninfo: str, expected: ExpectedRows, rows: RepairRows, shares_of_keys: int) -> Task:
    """Returns the function that stages one share of the rows in a task.

    The first ``shares_of_keys`` shares read rows by their keys, the others rows that enter the
    filter.
    """
    copy, files = expected.copy, expected.lake.files(expected.folder)
    choices, again, key, unheld = rows.choices, rows.again, rows.key, rows.unheld
    holder_pid = rows.holder.pid

    def write(number: int) -> pa.Table:
        name, first = reader_name(holder_pid, number, copy.table), number - shares_of_keys
        if first >= 0:
            entering = read_choices(conninfo, copy, choices[first::_MOST_TASKS], name)
            return expected.write(number, entering, ENTERS)
        with files.open_input_file(f"keys/part-{number}.parquet") as file:
            texts = pq.read_table(file)
        parts = (_without(part, unheld) for part in texts.to_batches(KEYS_PER_READ))
        return expected.write(number, read_keys(conninfo, copy, again, key, parts, name), TOUCHED)

    return write


def _without(batch: pa.RecordBatch, unheld: Collection[tuple[str, ...]]) -> pa.RecordBatch:
    if not unheld:
        return batch
    texts = zip(*(column.to_pylist() for column in batch.columns), strict=True)
    return batch.filter(pa.array([row not in unheld for row in texts], pa.bool_()))


def _leaving_keys(runner: Runner, job: Job, rows: RepairRows, folder: str) -> pa.Table:
    """Returns the keys (``b<k>``) of the target's rows that leave it."""
    bases, names = [f"b{k}" for k in range(len(rows.key))], [column.name for column in rows.key]
    fields = zip(bases, rows.key_types, strict=True)
    schema = pa.schema([(base, kind.arrow) for base, kind in fields])
    if rows.leaves is None:
        return schema.empty_table()
    target = job.lake.target(rows.drifted.state.table_name)
    if (small := small_rows(target.open())) is not None:
        leaves = evaluate(rows.leaves, small)
        if leaves is not None:
            return small.filter(leaves).select(names).rename_columns(bases).cast(schema)
    leaving = target.frame(runner.spark()).where(rows.leaves)
    columns = [f"{quote(name)} as {base}" for name, base in zip(names, bases, strict=True)]
    leaving.selectExpr(*columns).write.mode("overwrite").parquet(folder)
    # Spark's files don't store these types exactly.
    return open_parquet(folder).to_table().cast(schema)


def removals(
    kinds: Sequence[TargetType],
    read: Sequence[pa.ChunkedArray],
    gone: Mapping[str, Sequence[pa.ChunkedArray]],
    schema: pa.Schema,
) -> pa.Table:
    """Returns a purge for each key in ``gone``, by reason, of which no row was read."""
    of_read, *of_gone = key_codes(kinds, read, *gone.values())
    codes = np.concatenate(of_gone)
    first = first_of_each(codes)
    places = pa.array(first[~np.isin(codes[first], of_read)])
    why = np.repeat(list(gone), [len(part) for part in of_gone])
    columns = {
        "why": pa.array(why, pa.string()).take(places),
        "action": pa.array([ACTION_PURGE] * len(places), pa.string()),
    }
    for k, parts in enumerate(zip(*gone.values(), strict=True)):
        kind = schema.field(f"b{k}").type
        chunks = [chunk for part in parts for chunk in part.cast(kind).chunks]
        columns[f"b{k}"] = pa.chunked_array(chunks, kind).take(places)
    nothing = {f.name: pa.nulls(len(places), f.type) for f in schema if f.name not in columns}
    return pa.table(columns | nothing).select(schema.names).cast(schema)


def stage_to_judge(
    rows: RepairRows,
    net: NetRows,
    folder: str,
    brought: Sequence[pa.Table],
    judged: Collection[str],
    accepted: Collection[str],
) -> bool:
    """Write the rows that a gate judges; returns whether there are any.

    These are rows of the quarantined keys ``judged``, and rows that changes of the keys
    ``brought`` write. Accepted rows aren't judged. ``t<k>`` is the key in the quarantine's form,
    null for rows that aren't in quarantine.
    """
    rows_to_judge, let = (quarantined_keys(rows, keys) for keys in (judged, accepted))
    of_net, of_let, of_judged, *of_brought = key_codes(
        rows.key_types, net.bases, *map(typed_columns, (let, rows_to_judge, *brought))
    )
    mask = np.isin(of_net, np.concatenate([of_judged, *of_brought])) & ~np.isin(of_net, of_let)
    mask &= np.asarray(pc.not_equal(net.keys["action"], ACTION_DELETE))
    order = np.argsort(of_judged, kind="stable")
    at = np.searchsorted(of_judged, of_net, sorter=order).clip(max=max(len(order) - 1, 0))
    place = order[at] if len(order) else at
    is_quarantined = np.isin(of_net, of_judged)
    texts = rows_to_judge.select([f"t{k}" for k in range(len(rows.key))]).take(
        pa.array(place, mask=~is_quarantined)
    )
    write_rows(net.files, mask, folder, texts)
    return bool(mask.any())


def hold_back(rows: RepairRows, net: NetRows, folder: str, keys: Collection[str]) -> NetRows:
    """Returns the net changes without the rows that stay in quarantine."""
    still = typed_columns(quarantined_keys(rows, keys))
    of_net, of_still = key_codes(rows.key_types, net.bases, still)
    return net.filter(~np.isin(of_net, of_still), f"{folder}/let")


def untouched(rows: RepairRows, keys: Collection[str], touched: pa.Table | None) -> set[str]:
    """Returns those of these quarantined keys that aren't among the keys ``touched``."""
    if not keys or touched is None:
        return set(keys)
    key_rows = quarantined_keys(rows, keys)
    of_keys, of_touched = key_codes(rows.key_types, *map(typed_columns, (key_rows, touched)))
    names, are_left = sorted(keys), ~np.isin(of_keys, of_touched)
    return {name for name, is_left in zip(names, are_left.tolist(), strict=True) if is_left}


def untouched_keys(rows: RepairRows, touched: pa.Table, keys: Collection[str]) -> pa.Table:
    """Returns the keys ``touched`` without these quarantined keys."""
    key_rows = quarantined_keys(rows, keys)
    of_touched, of_keys = key_codes(rows.key_types, *map(typed_columns, (touched, key_rows)))
    return touched.filter(pa.array(~np.isin(of_touched, of_keys)))

"""Compare: whether a target holds exactly the rows that its publication gives of the source, value
by value.

The source is read as the sync reads it: one snapshot, the publications' filter and columns, the
same types. The answer means something when the target has applied what that snapshot sees: while
nobody writes, or after a run that caught up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import functions as F

from waldelta.changes.merge.statements import raw_entries
from waldelta.changes.merge.target_table import stored_frame
from waldelta.config import PipelineFile
from waldelta.errors import SchemaChanged, StateError
from waldelta.lake import DeltaTarget
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import RAW
from waldelta.pipeline.job import lake_of
from waldelta.pipeline.targets import ReplicatedTarget, filter_of
from waldelta.pipeline.targets.target_sources import read_target
from waldelta.postgres import TableId
from waldelta.snapshot.chunks import Chunk, plan_chunks, plan_tasks
from waldelta.snapshot.exported_snapshot import SnapshotHolder, reader_name
from waldelta.snapshot.read_table import TableCopy, plan_copy, read_chunks
from waldelta.spark import Runner
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.runner import once
from waldelta.spark_sql import quote
from waldelta.target_modes.mirror import MIRROR
from waldelta.types import stored_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from waldelta.pipeline import Job

log = logging.getLogger(__name__)

BYTES_PER_TASK = 64 << 20
KEYS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """What a comparison found; a changed row counts as one missing and one extra row.

    ``keys`` are a few of the rows concerned, as their key columns' texts (whole rows where there is
    no key).
    """

    table: str
    source_rows: int
    target_rows: int
    missing: int
    extra: int
    keys: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows that are on one side only; 0 means equal."""
        return self.missing + self.extra


def compare_target(
    runner: Runner,
    conninfo: str,
    pipeline: PipelineFile,
    state: TableState,
    version: int | None = None,
) -> Difference:
    """Compare a target (now, or at one of its versions) with the source's filtered rows: counts and
    full content.

    A mirror is compared in this process while Spark isn't started, so that a test that needs
    no Spark starts none. Raises SchemaChanged when the target lacks a published column or has one
    that isn't, StateError when the table isn't published any more.
    """
    table_id = TableId.parse(state.table_name)
    with SnapshotHolder(conninfo, f"waldelta compare {pipeline.source.slot} {table_id}") as holder:
        table = _fed_as_of(holder, pipeline, table_id).table
        leaves = [leaf for leaf in table.leaves if leaf.relkind == "r"]
        files = holder.relfilenodes([leaf.oid for leaf in leaves])
        with_metadata = pipeline.target.metadata_columns
        lsn = holder.lsn.value if with_metadata else None
        copy = plan_copy(
            table, holder.snapshot_id, files, lsn, pipeline.target.types_of(state.table_name),
            filter_of(state),
        )  # fmt: skip
        tasks = plan_tasks(plan_chunks(leaves, BYTES_PER_TASK), BYTES_PER_TASK)
        reader = _reader(conninfo, copy, tasks, holder.pid)
        names = [name for name, _ in copy.columns]
        if with_metadata:
            names.append(RAW)
        place = lake_of(pipeline).target(state.table_name)
        compared = (names, state.key_columns, state.table_name)
        held = None if runner.is_started else _read_here(place, state, copy, version)
        if held is not None:
            numbers = pa.RecordBatch.from_pydict({"id": list(range(len(tasks)))})
            rows = pa.Table.from_batches(reader(iter([numbers])), copy.schema)
            _check_columns(table_id, _kinds(rows), _kinds(held))
            found = difference_here(rows, held, *compared)
        else:
            source = (
                runner.spark()
                .range(0, len(tasks), 1, max(1, len(tasks)))
                .mapInArrow(once(reader), ddl(copy.schema))
            )
            source = stored_frame(source, copy.columns)
            target = state.target_mode.live_rows(
                _read_target(runner, place.uri, version), state.key_columns
            )
            _check_columns(table_id, source.dtypes, target.dtypes)
            found = difference(source, target, *compared)
    log.info(
        "table=%s compared source_rows=%d target_rows=%d missing=%d extra=%d", found.table,
        found.source_rows, found.target_rows, found.missing, found.extra,
    )  # fmt: skip
    return found


def differing(runner: Runner, job: Job, *names: str) -> dict[str, Difference]:
    """Return the targets, of these or of all, that don't hold what their sources do."""
    states = job.read_states()
    found = {
        name: compare_target(runner, job.source.conninfo, job.pipeline, states[name])
        for name in names or states
    }
    return {name: difference for name, difference in found.items() if difference.rows}


def difference(
    source: DataFrame,
    target: DataFrame,
    names: Sequence[str],
    key_columns: Sequence[str],
    table: str,
) -> Difference:
    """Compares two frames as multisets of rows over these columns (EXCEPT ALL both ways)."""
    columns = [f"c{n}" for n in range(len(names))]
    sides = [
        _exact(frame, names, columns).withColumn("side", F.lit(side))
        for frame, side in ((source, 1), (target, -1))
    ]
    rows = sides[0].unionAll(sides[1]).groupBy(*columns).agg(
        F.sum("side").alias("balance"), F.count("*").alias("copies")
    )  # fmt: skip
    counts = rows.select(
        F.sum((F.col("copies") + F.col("balance")) / 2).cast("bigint"),
        F.sum((F.col("copies") - F.col("balance")) / 2).cast("bigint"),
        F.sum(F.greatest("balance", F.lit(0))),
        F.sum(F.greatest(-F.col("balance"), F.lit(0))),
    ).collect()[0]
    source_rows, target_rows, missing, extra = (int(count or 0) for count in counts)
    keys: tuple[str, ...] = ()
    if missing or extra:
        shown = [columns[names.index(name)] for name in key_columns] or columns
        keys = _some_keys(rows, shown, [*key_columns] or list(names))
    return Difference(table, source_rows, target_rows, missing, extra, keys)


def _exact(frame: DataFrame, names: Sequence[str], columns: Sequence[str]) -> DataFrame:
    """The columns by position, in a form in which equal means identical."""
    types = dict(frame.dtypes)
    return frame.select(
        *(
            F.expr(
                raw_entries(RAW) if name == RAW else stored_type(types[name]).exact_sql(quote(name))
            ).alias(alias)
            for name, alias in zip(names, columns, strict=True)
        )
    )


def _some_keys(rows: DataFrame, columns: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    texts = [
        F.concat(F.lit(f"{name}="), F.coalesce(F.col(column).cast("string"), F.lit("null")))
        for name, column in zip(names, columns, strict=True)
    ]
    side = F.when(F.col("balance") > 0, "missing ").otherwise("extra ")
    text = F.concat(side, F.concat_ws(", ", *texts))
    found = (
        rows.where("balance <> 0")
        .select(text.alias("text"))
        .orderBy(F.substring_index("text", " ", -1))
        .limit(KEYS_SHOWN)
    )
    return tuple(row[0] for row in found.collect())


def _fed_as_of(
    holder: SnapshotHolder, pipeline: PipelineFile, table_id: TableId
) -> ReplicatedTarget:
    target = read_target(holder.connection, pipeline, table_id)
    if target is not None:
        return target
    names = ", ".join(pipeline.source.publication_names)
    raise StateError(f"{table_id} isn't in the publications {names}: it can't be compared")


def _read_target(runner: Runner, uri: str, version: int | None) -> DataFrame:
    reader = runner.spark().read.format("delta")
    return (reader if version is None else reader.option("versionAsOf", version)).load(uri)


def _read_here(
    place: DeltaTarget, state: TableState, copy: TableCopy, version: int | None
) -> pa.Table | None:
    """The target's rows as delta-rs reads them; None where Spark has to."""
    is_variant = any(kind.stored_sql("x") != "x" for _, kind in copy.columns)
    if state.target_mode is not MIRROR or is_variant:
        return None
    table = DeltaTable(place.uri, version=version, storage_options=place.lake.storage_options)
    # delta-rs reads neither mapped columns nor deletion vectors.
    return table.to_pyarrow_table() if table.protocol().min_reader_version == 1 else None


def _kinds(rows: pa.Table) -> list[tuple[str, str]]:
    """Names and types, whatever width of offsets a reader chose."""
    return [(field.name, _kind(field.type)) for field in rows.schema]


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"map<{_kind(kind.key_type)}, {_kind(kind.item_type)}>"
    if isinstance(kind, pa.ListType | pa.LargeListType):
        return f"list<{_kind(kind.value_type)}>"
    return str(kind).removeprefix("large_").removesuffix("_view")


def difference_here(
    source: pa.Table, target: pa.Table, names: Sequence[str], key_columns: Sequence[str], table: str
) -> Difference:
    """The same of a few rows, without Spark."""
    ours, theirs = ([*_exact_rows(rows.select(list(names)))] for rows in (source, target))
    texts = dict([*ours, *theirs])
    (published, held) = (Counter(exact for exact, _ in rows) for rows in (ours, theirs))
    sides = {"missing": published - held, "extra": held - published}
    keys = [*key_columns] or list(names)
    shown = sorted(
        f"{side} " + ", ".join(f"{name}={texts[row][names.index(name)]}" for name in keys)
        for side, rows in sides.items()
        for row in rows
    )
    missing, extra = (rows.total() for rows in sides.values())
    return Difference(table, len(ours), len(theirs), missing, extra, tuple(shown[:KEYS_SHOWN]))


def _exact_rows(rows: pa.Table) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Each row in a form in which equal means identical (-0 isn't 0, NaN is NaN), and as texts."""
    columns = [_values(name, rows[name]) for name in rows.column_names]
    for row in zip(*columns, strict=True):
        yield (
            tuple(map(repr, row)),
            tuple("null" if value is None else str(value) for value in row),
        )


def _values(name: str, column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if pa.types.is_timestamp(kind):  # Python's end with the year 9999, in each time zone.
        column = column.cast(pa.int64())
    values: list[Any] = column.to_pylist()
    if pa.types.is_map(kind):  # Its entries have no order, and no raw values are none.
        entries = [value and sorted(value, key=repr) for value in values]
        return [(value or None) if name == RAW else value for value in entries]
    return values


def _check_columns(
    table: TableId, source: Iterable[tuple[str, str]], target: Iterable[tuple[str, str]]
) -> None:
    """Names and types: a union of int and bigint would be made equal in silence."""
    published, held = (
        {(name, kind) for name, kind in side if not name.startswith("_wd_")}
        for side in (source, target)
    )
    if published != held:
        lacks, odd = (
            ", ".join(" ".join(pair) for pair in sorted(some))
            for some in (published - held, held - published)
        )
        raise SchemaChanged(
            f"{table}: its target lacks [{lacks}] and has [{odd}] instead: sync it again"
        )


def _reader(
    conninfo: str, copy: TableCopy, tasks: Sequence[Sequence[Chunk]], holder_pid: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What Spark's tasks run: each row of the range stands for one task's chunks."""

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                yield from read_chunks(
                    conninfo, copy, tasks[task], reader_name(holder_pid, task, copy.table)
                )

    return read

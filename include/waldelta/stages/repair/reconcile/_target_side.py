"""The lake's side of a reconciliation: sums, rows and values of one version of a target, read by
the driver or by Spark's tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from waldelta.arrow import storage
from waldelta.changes.stage.net_files import batches
from waldelta.errors import without_values
from waldelta.lake import MOST_DRIVER_BYTES, READ_FAILURES, DeltaTarget
from waldelta.lake.storage import row_group_bytes
from waldelta.metadata_columns import RAW
from waldelta.spark import Runner
from waldelta.spark.arrow_schema import ddl
from waldelta.spark_sql import quote, string
from waldelta.stages.repair.reconcile._checksum import (
    Fingerprint,
    Hashes,
    Sums,
    buckets_of,
    hash_keys,
    hash_rows,
    in_parts,
    target_texts,
)
from waldelta.stages.repair.reconcile._row_differences import TEXT_SHOWN, HashedRows, Valued
from waldelta.types import TargetType

log = logging.getLogger(__name__)

Batches = Iterator[pa.RecordBatch]
# One core hashes this many rows or bytes in seconds. Spark takes as long to start, but divides more
# among tasks.
_MOST_HASHED_ROWS, _MOST_HASHED_FILE_BYTES = 1_000_000, 64 << 20
_SUMS = pa.schema([("bucket", pa.int64()), ("rows", pa.int64()), ("total", pa.int64())])


@dataclass(frozen=True, slots=True)
class TargetSide:
    """One version of a target; ``shown`` are the columns that name its rows.

    ``small`` are its rows where the driver reads them (read_small()).
    """

    runner: Runner
    target: DeltaTarget
    version: int
    plan: Fingerprint
    shown: tuple[str, ...]
    small: ds.Dataset | None = None

    def sums(self, aside: Hashes) -> Sums:
        """Returns the sums of all rows except those whose key hashes are in ``aside`` (sorted)."""
        plan = self.plan

        def sum_up(batches: Batches) -> Batches:
            part_sums = Sums(plan.buckets)
            for batch in (part for whole in batches for part in in_parts(whole)):
                keys, rows = hash_rows(batch, plan)
                is_compared = ~is_among(keys, aside)
                part_sums.add(keys[is_compared], rows[is_compared])
            filled = np.flatnonzero(part_sums.rows)
            columns = [filled, part_sums.rows[filled], part_sums.totals[filled].view(np.int64)]
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=_SUMS)

        total = Sums(plan.buckets)
        parts = self._run(sum_up, _SUMS)
        buckets, rows, totals = (parts[name].to_numpy() for name in _SUMS.names)
        total.add_sums(buckets, rows, totals.view(np.uint64))
        return total

    def rows(self, buckets: Sequence[int], aside: Hashes) -> HashedRows:
        """Returns the rows of these buckets except those in ``aside``: hashes, and keys as
        texts.
        """
        plan, labels, numbers = self.plan, self.shown, np.sort(np.array(buckets, np.int64))
        names = [name for name, _ in plan.columns]
        places, schema = [names.index(name) for name in labels], HashedRows.schema(len(labels))

        def choose(batches: Batches) -> Batches:
            for batch in (part for whole in batches for part in in_parts(whole)):
                keys, rows = hash_rows(batch, plan)
                mask = is_among(buckets_of(keys, plan.buckets), numbers) & ~is_among(keys, aside)
                selection = batch.filter(pa.array(mask))
                raws = plan.raws_of(selection)
                texts = [
                    _readable_texts(
                        selection.column(n), plan.columns[n][1], raws[n], whole=bool(plan.key)
                    )
                    for n in places
                ]
                columns = [pa.array(keys[mask]), pa.array(rows[mask]), *texts]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

        return HashedRows(self._run(choose, schema))

    def values(self, hashes: Collection[int]) -> dict[int, Valued]:
        """Returns by key hash each column's shown text and canonical text, of the rows with these
        keys.
        """
        plan, key_hashes = self.plan, np.sort(np.array(list(hashes), np.int64))
        names, count = [name for name, _ in plan.columns], len(plan.columns)
        schema = pa.schema([("k", pa.int64()), *((f"c{n}", pa.string()) for n in range(2 * count))])

        def read(batches: Batches) -> Batches:
            for batch in (part for whole in batches for part in in_parts(whole)):
                keys = hash_keys([batch.column(names.index(name)) for name in plan.key], plan)
                mask = is_among(keys, key_hashes)
                selection = batch.filter(pa.array(mask))
                raws = plan.raws_of(selection)
                texts = [
                    _readable_texts(selection.column(n), kind, raws[n], whole=True)
                    for n, (_, kind) in enumerate(plan.columns)
                ]
                exact = [
                    target_texts([(selection.column(n), kind)], [raws[n]], plan.marks)
                    for n, (_, kind) in enumerate(plan.columns)
                ]
                yield pa.RecordBatch.from_arrays(
                    [pa.array(keys[mask]), *texts, *exact], schema=schema
                )

        table = self._run(read, schema)
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        return {row[0]: Valued(row[1 : 1 + count], row[1 + count :]) for row in rows}

    def _run(self, task: Callable[[Batches], Batches], schema: pa.Schema) -> pa.Table:
        if self.small is not None:
            try:
                return pa.Table.from_batches(
                    task(self._batches(self.small)), schema
                ).combine_chunks()
            except READ_FAILURES as err:
                log.info("%s is read by Spark: %s", self.target.uri, without_values(err))
        return self._run_by_spark(task, schema)

    def _batches(self, dataset: ds.Dataset) -> Batches:
        """Yields the rows with the column names that Spark's tasks use."""
        columns = {f"c{n}": pc.field(name) for n, (name, _) in enumerate(self.plan.columns)}
        verbatim = self.plan.raw_columns
        for batch in batches(dataset, columns | ({RAW: pc.field(RAW)} if verbatim else {})):
            values = batch.columns[: len(columns)]
            raws = [pc.map_lookup(batch[RAW], name, "first") for name in verbatim]
            names = [*columns, *(f"r{n}" for n in range(len(raws)))]
            yield pa.RecordBatch.from_arrays([*values, *raws], names)

    def _run_by_spark(self, task: Callable[[Batches], Batches], schema: pa.Schema) -> pa.Table:
        frame = self.target.frame(self.runner.spark(), self.version)
        columns = [f"{quote(name)} as c{n}" for n, (name, _) in enumerate(self.plan.columns)]
        # The map itself isn't passed: Spark's time to compute its size grows with the square of a
        # batch's rows.
        raws = [
            f"try_element_at({RAW}, {string(name)}) as r{n}"
            for n, name in enumerate(self.plan.raw_columns)
        ]
        compared = frame.selectExpr(*columns, *raws)
        return compared.mapInArrow(task, ddl(schema)).toArrow().cast(schema).combine_chunks()


def read_small(target: DeltaTarget, version: int | None = None) -> ds.Dataset | None:
    """Returns the rows of a small target's version (None: the newest) for the driver.

    Returns None where Spark must read them.
    """
    try:
        table = target.open(version)
        is_small = table.is_at_most(_MOST_HASHED_ROWS, _MOST_HASHED_FILE_BYTES)
        if not (table.is_writable and is_small):
            return None
        dataset = table.dataset()
        # The driver reads one row group at a time.
        return dataset if max(row_group_bytes(dataset), default=0) <= MOST_DRIVER_BYTES else None
    except READ_FAILURES as err:
        log.info("%s is read by Spark: %s", target.uri, without_values(err))
        return None


def is_among(values: Hashes, members: Hashes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns which values are among the sorted ``members``."""
    if not len(members):
        return np.zeros(len(values), np.bool_)
    at = np.minimum(np.searchsorted(members, values), len(members) - 1)
    return np.asarray(members[at] == values)


def _readable_texts(
    values: pa.Array, kind: TargetType, raw: pa.Array | None, *, whole: bool
) -> pa.Array:
    """Returns values as readable text; used only for the few rows that are reported."""
    texts = kind.pg_text(storage(values))
    texts = texts if raw is None else pc.coalesce(raw, texts)
    return texts if whole else pc.utf8_slice_codeunits(texts, 0, TEXT_SHOWN)

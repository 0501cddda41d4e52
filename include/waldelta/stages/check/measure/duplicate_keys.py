"""Keys that stand in more than one row of a target: the check's dearest question, so it is asked
first.

The server works on it while Great Expectations is imported here. Needs no Great Expectations;
``lake_expectations`` makes an expectation of the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import functions as F

from waldelta.lake import files_of
from waldelta.lake.storage import SPARKS_TIMESTAMPS, has_deletion_vectors, open_version
from waldelta.spark_sql import quote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

# Keys that a failed expectation shows.
MOST_EXAMPLES = 5
# Spark's bitmaps have a bit for each of so many neighbouring integers.
_BITS = 32_768
_BYTES_PER_KEY = 8
# Here a byte stands for each integer between the least and the most.
_MOST_BYTES_IN_DRIVER = 64 << 20
_ROWS_AT_ONCE = 1 << 18
# More ranges would make a filter that costs more than it saves.
_MOST_RANGES = 100


@dataclass(frozen=True, slots=True)
class DuplicateKeys:
    """How many rows share their key with another row, and some of those keys, as text."""

    rows: int
    examples: tuple[str, ...] = ()


def find_duplicate_keys(
    frame: DataFrame, columns: Sequence[str], *, dense: bool = False
) -> DuplicateKeys:
    """Look at every row of the frame; nulls are equal here.

    ``dense``: the key is one integer whose values lie close together. Then a bitmap tells, at a
    third of the price, whether there is anything to be found.
    """
    if dense and not _may_have_duplicates(frame, columns[0]):
        return DuplicateKeys(0)
    keys = [F.col(quote(name)).alias(f"k{i}") for i, name in enumerate(columns)]
    names = [f"k{i}" for i in range(len(keys))]
    shared = frame.select(*keys).groupBy(*names).agg(F.count("*").alias("n")).where("n > 1")
    rows = shared.agg(F.sum("n")).collect()[0][0] or 0
    if not rows:
        return DuplicateKeys(0)
    texts = [F.coalesce(F.col(name).cast("string"), F.lit("null")) for name in names]
    found = shared.orderBy(*names).limit(MOST_EXAMPLES).select(F.concat_ws(", ", *texts))
    return DuplicateKeys(rows, tuple(row[0] for row in found.collect()))


class IntegerKey:
    """A column of integers in a target's key, by the statistics of its files and by Arrow alone.

    ``ranges`` are those that the rows in question lie in, least and most; None: all rows are in
    question.
    """

    def __init__(
        self,
        table: DeltaTable,
        column: str,
        files: pa.Table,
        storage_options: Mapping[str, str] | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._table, self._column, self._files, self._ranges = table, column, files, ranges
        self._storage_options = storage_options
        self._least, self._most, rows = (
            files[name].combine_chunks() for name in _statistics(column)
        )
        self._rows = int(pc.sum(rows).as_py() or 0)

    @classmethod
    def open(
        cls, uri: str, version: int, column: str, storage_options: Mapping[str, str] | None = None
    ) -> IntegerKey | None:
        """None for a key of another type, or one whose range not all files tell; then only Spark
        can say.
        """
        try:
            table = open_version(uri, version, storage_options)
            # Statistics go by the files' own names of columns, which a mapping may have given to
            # another one.
            if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
                return None
            files = files_of(table)
        except Exception as err:
            log.info("keys are grouped, since the statistics of %s can't be read: %s", uri, err)
            return None
        told = _statistics(column)
        if not files.num_rows or not set(told) <= set(files.column_names):
            return None
        is_integer = pa.types.is_integer(files.schema.field(told[0]).type)
        if not is_integer or any(files[name].null_count for name in told):
            return None
        return cls(table, column, files, storage_options)

    def written_since(self, version: int) -> IntegerKey:
        """The same, of the rows that may share their key with one written since a version whose
        keys all differ.

        Of two rows that share a key one was written since then, and so both lie where the files
        written since have keys. All rows, where that can't be told.
        """
        if has_deletion_vectors(
            self._table
        ):  # which a RESTORE may take away again from a file that was there
            return self
        try:
            known = open_version(self._table.table_uri, version, self._storage_options)
            held = files_of(known)["path"]
        except (DeltaError, OSError, pa.ArrowException) as err:
            log.info(
                "all keys of %s are compared, since version %d can't be read: %s",
                self._table.table_uri,
                version,
                err,
            )
            return self
        new = self._files.filter(
            pc.invert(pc.is_in(self._files["path"], value_set=held.combine_chunks()))
        )
        nulls = f"null_count.{self._column}"
        if (
            nulls not in new.column_names
            or new[nulls].null_count
            or (pc.sum(new[nulls]).as_py() or 0)
        ):
            return self
        ranges = _joined(
            zip(*(new[name].to_pylist() for name in _statistics(self._column)[:2]), strict=True)
        )
        if len(ranges) > _MOST_RANGES:
            return self
        touched = [
            any(low <= most and least <= high for low, high in ranges)
            for least, most in zip(self._least.to_pylist(), self._most.to_pylist(), strict=True)
        ]
        files = self._files.filter(pa.array(touched, pa.bool_()))
        return IntegerKey(self._table, self._column, files, self._storage_options, ranges)

    def rows_in_question(self, frame: DataFrame) -> DataFrame:
        """Of the target's rows those whose keys have to be compared."""
        if self._ranges is None:
            return frame
        column = F.col(quote(self._column))
        return frame.where(
            reduce(or_, [column.between(low, high) for low, high in self._ranges], F.lit(False))
        )

    def is_unique(self) -> bool:
        """Whether Arrow, without Spark, finds no value in two rows; False also where only Spark can
        tell.

        It reads that column alone, and holds at most 64 MB of marks. A second of Spark's is tenths
        of one here.
        """
        if not self._rows:
            return True
        low, high = pc.min(self._least).as_py(), pc.max(self._most).as_py()
        among = None
        if self._ranges is not None:
            low, high = self._ranges[0][0], self._ranges[-1][1]
            key = ds.field(self._column)
            among = reduce(or_, [(key >= least) & (key <= most) for least, most in self._ranges])
        if high - low >= min(_MOST_BYTES_IN_DRIVER, self._rows * _BYTES_PER_KEY):
            return False
        try:
            dataset = self._table.to_pyarrow_dataset(parquet_read_options=SPARKS_TIMESTAMPS)
            scanner = dataset.scanner(
                [self._column],
                filter=among,
                batch_size=_ROWS_AT_ONCE,
                batch_readahead=2,
                fragment_readahead=1,
            )
            return _all_differ((batch.column(0) for batch in scanner.to_batches()), low, high)
        except Exception as err:
            log.info(
                "Spark looks for duplicate keys, since %s can't be read here: %s",
                self._table.table_uri,
                err,
            )
            return False

    @property
    def is_dense(self) -> bool:
        """Whether bitmaps of the values would be smaller than the values."""
        spans = zip(self._least.to_pylist(), self._most.to_pylist(), strict=True)
        buckets = sum(
            (high - low) // _BITS + 1 for low, high in spans
        )  # each file's, as tasks read them
        return bool(buckets * _BITS // 8 <= self._rows * _BYTES_PER_KEY)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that overlap, or touch, as one."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined


def _statistics(column: str) -> tuple[str, str, str]:
    return f"min.{column}", f"max.{column}", "num_records"


def _all_differ(parts: Iterable[pa.Array], low: int, high: int) -> bool:
    """Whether as many marks are set as there are values; raises IndexError for a value that isn't
    between the two.
    """
    marks, count = np.zeros(high - low + 1, bool), 0
    for part in parts:
        if part.null_count:
            return False
        places = part.cast(pa.int64()).to_numpy() - low
        if len(places) and places.min() < 0:
            raise IndexError(f"a value below the statistics' least of {low}")
        marks[places] = True
        count += len(places)
    return int(np.count_nonzero(marks)) == count


def _may_have_duplicates(frame: DataFrame, column: str) -> bool:
    """Whether fewer bits are set than there are rows; nulls set none."""
    key = F.col(quote(column)).cast("bigint")
    places = frame.select(
        F.bitmap_bucket_number(key).alias("bucket"), F.bitmap_bit_position(key).alias("place")
    )
    buckets = places.groupBy("bucket").agg(
        F.count("*").alias("rows"), F.bitmap_count(F.bitmap_construct_agg("place")).alias("keys")
    )
    return bool(buckets.agg(F.sum(F.col("rows") - F.col("keys"))).collect()[0][0])

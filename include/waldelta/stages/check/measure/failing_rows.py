"""Failing rows: how many rows of a target don't meet an expectation, and some of their values;
queries that find them, in SQL that Spark and DataFusion read alike; and duplicate keys, which occur
in more than one row.

Duplicate keys are the check's most expensive question, so it is asked beside the others. This
process answers it where the keys fit into its memory, Spark otherwise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from waldelta.errors import class_and_text
from waldelta.lake import MOST_DRIVER_BYTES, READ_FAILURES, TargetVersion, query
from waldelta.metadata_columns import PREFIX
from waldelta.spark_sql import quote, quote_in_template
from waldelta.target_modes.target_mode import TargetMode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

# The most failing values or keys that a report shows.
MOST_EXAMPLES = 5
# A value of an example has at most so many characters.
_LONGEST_VALUE = 200


@dataclass(frozen=True, slots=True)
class FailingRows:
    """The number of rows that don't meet an expectation, and some of them: values by column where
    single rows are judged, else keys as texts.

    ``judged`` is the number of rows that the expectation applies to, ``total`` that of all rows
    read; None where they weren't counted.
    """

    rows: int = 0
    examples: tuple[Any, ...] = ()
    judged: int | None = None
    total: int | None = None

    def plus(
        self,
        failing: pa.ChunkedArray,
        judged: pa.ChunkedArray,
        rows: pa.Table,
        most: int | None = MOST_EXAMPLES,
    ) -> FailingRows:
        """Returns the failing rows with those of one more batch, whose values are examples."""
        count, examples = pc.sum(failing).as_py() or 0, self.examples
        if count and (most is None or len(examples) < most):
            examples = (*examples, *rows.filter(failing).to_pylist())[:most]
        judged_rows = (self.judged or 0) + (pc.sum(judged).as_py() or 0)
        return FailingRows(
            self.rows + count, examples, judged_rows, (self.total or 0) + len(judged)
        )

    def are_few(self, mostly: float) -> bool:
        """Returns whether enough rows meet the expectation.

        Divides as Great Expectations does, because 0.55 * 100 is more than 55.

        >>> [FailingRows(rows, judged=100).are_few(0.55) for rows in (0, 45, 46)]
        [True, True, False]
        """
        if not self.rows or self.judged is None:
            return not self.rows
        return (self.judged - self.rows) / self.judged >= mostly


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows that the source has now of a version with more rows, by a query
    (TargetMode.live_query).
    """

    version: TargetVersion
    text: str


# The rows of a version that this process reads without Spark, all or the live ones; and those that
# either of them reads.
VersionRows = TargetVersion | LiveRows
Relation: TypeAlias = "DataFrame | VersionRows"


def rows_of(text: str, **relations: Relation) -> list[dict[str, Any]]:
    """Returns the rows of a query that names its relations in braces, by Spark or DataFusion.

    Raises what they raise: a version's query raises what delta-rs and Arrow raise.
    """
    versions, texts, frames = {}, {}, dict[str, Any]()
    for name, of in relations.items():
        if isinstance(of, LiveRows):
            versions[name], texts[name] = of.version, f"({of.text.format(rows=name)})"
        elif isinstance(of, TargetVersion):
            versions[name], texts[name] = of, name
        else:
            frames[name] = of
    if versions:
        rows = query(text.format(**texts), versions).read_all()
    else:
        rows = next(iter(frames.values())).sparkSession.sql(text, **frames).toArrow()
    dicts: list[dict[str, Any]] = rows.to_pylist()
    return dicts


@contextmanager
def leave_to_spark(what: str) -> Iterator[None]:
    """Suppress a block's failure to read a target, and log that Spark does ``what`` (such as
    "reads t") instead.
    """
    try:
        yield
    except (*READ_FAILURES, KeyError) as err:
        log.info("Spark %s: %s", what, class_and_text(err))


def examples_of(rows: Iterable[Mapping[str, Any]], key: Sequence[str]) -> Iterator[str]:
    """Yields rows as JSON: ``key``, and ``values`` of the other columns; null, or a text.

    >>> list(examples_of([{"id": 7, "amount": -1.5, "_wd_lsn": 1}], ["id"]))
    ['{"key": {"id": "7"}, "values": {"amount": "-1.5"}}']
    """
    for row in rows:
        texts = {
            name: value if value is None else _as_text(value)[:_LONGEST_VALUE]
            for name, value in row.items()
            if not name.startswith(PREFIX)
        }
        key_texts = {name: texts.pop(name) for name in key if name in texts}
        yield json.dumps({"key": key_texts, "values": texts})


_BYTES_PER_KEY = 8
# IntegerKey.is_unique() marks _MARKS neighbouring integers in one pass, each as one byte, and makes
# at most _MOST_PASSES passes.
_MARKS, _MOST_PASSES = MOST_DRIVER_BYTES, 16
_ROWS_AT_ONCE = 1 << 18
# More ranges would make a filter that costs more than it saves.
_MOST_RANGES = 100
# has_few_keys() returns False above this number of rows or bytes of files: then Spark compares.
_MOST_COMPARED_ROWS = 1_000_000
_MOST_FILE_BYTES = 1 << 30


def has_few_keys(table: TargetVersion, columns: Sequence[str]) -> bool:
    """Returns whether this process compares the keys of a version: they are few, and short.

    Raises what delta-rs and Arrow raise.
    """
    if not table.is_at_most(_MOST_COMPARED_ROWS, _MOST_FILE_BYTES):
        return False
    sizes, types = [], {field.name: field.type for field in table.schema}
    for name in columns:
        column, kind = quote_in_template(name), types.get(name)
        if kind is None or pa.types.is_nested(kind):
            return False
        if pa.types.is_binary(kind):
            column = f"encode({column}, 'base64')"
        if not pa.types.is_primitive(kind) and not pa.types.is_decimal(kind):
            sizes.append(f"coalesce(sum(octet_length({column})), 0)")
    if not sizes:
        return True
    size = " + ".join(sizes)
    (row,) = rows_of(f"select {size} as size from {{target}}", target=table)  # noqa: S608 - quoted
    return int(row["size"]) <= MOST_DRIVER_BYTES


def duplicate_keys(rows: Relation, columns: Sequence[str]) -> FailingRows:
    """Returns the rows that share their key with another row; nulls count as equal.

    Raises what rows_of() raises.
    """
    names = [quote_in_template(column) for column in columns]
    listed, order = ", ".join(names), ", ".join(f"{name} nulls last" for name in names)
    # The SQL contains only quoted columns.
    keys = f"select {listed}, count(*) as _wd_rows from {{keys}} group by {listed}"  # noqa: S608
    shared = f"{keys} having count(*) > 1"
    (counts,) = rows_of(f"select sum(_wd_rows) as n from ({shared}) as k", keys=rows)  # noqa: S608
    if not counts["n"]:
        return FailingRows()
    examples = rows_of(f"{shared} order by {order} limit {MOST_EXAMPLES}", keys=rows)
    return FailingRows(counts["n"], tuple(map(text_of, examples)))


def find_broken_rows(
    rows: Relation, columns: Sequence[str], mode: TargetMode, key: Sequence[str]
) -> dict[str, FailingRows]:
    """Returns how many rows of a target break each invariant of its mode, by its label.

    ``columns`` are the target's. Raises what rows_of() raises.
    """
    names, rules = ", ".join(map(quote_in_template, key)), mode.rules(key)
    # Windows must be computed before their results can be counted.
    broken = ", ".join(f"{r.broken.format(key=names)} as broken{n}" for n, r in enumerate(rules))
    counts = ", ".join(f"count(case when broken{n} then 1 end) as n{n}" for n in range(len(rules)))
    judged = f"select {broken} from ({mode.judged_query(columns, key)}) as j"  # noqa: S608 - quoted
    (row,) = rows_of(f"select {counts} from ({judged}) as b", rows=rows)  # noqa: S608 - quoted
    return {rule.label: FailingRows(row[f"n{n}"]) for n, rule in enumerate(rules)}


def text_of(row: Mapping[str, Any]) -> str:
    """Returns a row's values as a text, without columns of ours."""
    return ", ".join(_as_text(v) for name, v in row.items() if not name.startswith(PREFIX))


def _as_text(value: Any) -> str:
    """Returns a value as Spark casts it to a text.

    >>> [_as_text(value) for value in (None, True, b"a", 1, Decimal("1E-9"))]
    ['null', 'true', 'a', '1', '0.000000001']
    >>> _as_text(datetime(2026, 1, 1, 0, 0, 0, 500_000))
    '2026-01-01 00:00:00.5'
    """
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, datetime):
        text = str(value.replace(tzinfo=None))
        return text.rstrip("0") if value.microsecond else text
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


class IntegerKey:
    """A column of integers in a target's key, read from the files' statistics and by Arrow.

    ``ranges`` are the ranges (lowest, highest) of the keys to compare; None compares all rows.
    """

    def __init__(
        self,
        table: TargetVersion,
        column: str,
        files: pa.Table,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self._table, self._column = table, column
        self._files, self._ranges = files, ranges
        self._least, self._most, rows = (
            files[name].combine_chunks() for name in _statistics(column)
        )
        self._rows = int(pc.sum(rows).as_py() or 0)

    @classmethod
    def of(cls, table: TargetVersion, column: str) -> IntegerKey | None:
        """Returns the key, or None when only Spark can compare it.

        That is the case for a key of another type, or when a file has no range statistics.
        """
        # Statistics use the files' own column names, and with a column mapping such a name may
        # belong to another column.
        if table.maps_columns:
            return None
        files, names = table.files, _statistics(column)
        if not files.num_rows or not set(names) <= set(files.column_names):
            return None
        is_integer = pa.types.is_integer(files.schema.field(names[0]).type)
        if not is_integer or any(files[name].null_count for name in names):
            return None
        return cls(table, column, files)

    def written_since(self, version: int) -> IntegerKey:
        """Returns the key restricted to rows that may share it with a row written since a version.

        All keys of that version must differ. Of two rows that share a key, one was written since,
        so both are in key ranges of files written since. Where these are unknown, all rows are
        compared. Raises what delta-rs and Arrow raise.
        """
        # A RESTORE may remove deletion vectors from a file that existed before.
        if self._table.has_deletion_vectors:
            return self
        new, nulls = self._table.files_since(version), f"null_count.{self._column}"
        if (
            nulls not in new.column_names
            or new[nulls].null_count
            or (pc.sum(new[nulls]).as_py() or 0)
        ):
            return self
        ranges = _merge_ranges(
            zip(*(new[name].to_pylist() for name in _statistics(self._column)[:2]), strict=True)
        )
        if len(ranges) > _MOST_RANGES:
            return self
        touched = [
            any(low <= most and least <= high for low, high in ranges)
            for least, most in zip(self._least.to_pylist(), self._most.to_pylist(), strict=True)
        ]
        files = self._files.filter(pa.array(touched, pa.bool_()))
        return IntegerKey(self._table, self._column, files, ranges)

    def rows_in_question(self, frame: DataFrame) -> DataFrame:
        """Returns the target's rows whose keys must be compared."""
        if self._ranges is None:
            return frame
        column = quote(self._column)
        among = [f"{column} between {low} and {high}" for low, high in self._ranges]
        return frame.where(" or ".join(among) or "false")

    def is_unique(self) -> bool:
        """Returns whether Arrow finds no value in two rows; False also when only Spark can decide.

        It reads only that column, once for each 64 million neighbouring integers, and uses 64 MB.
        What takes Spark a second takes tenths of a second this way. Raises what delta-rs and Arrow
        raise.
        """
        if not self._rows:
            return True
        key, bounds = ds.field(self._column), (pc.min(self._least), pc.max(self._most))
        ranges = self._ranges or [(bounds[0].as_py(), bounds[1].as_py())]
        low, high = ranges[0][0], ranges[-1][1]
        if high - low >= min(_MOST_PASSES * _MARKS, self._rows * _BYTES_PER_KEY):
            return False
        among = reduce(or_, [(key >= least) & (key <= most) for least, most in ranges])
        among = among if self._ranges else among | key.is_null()
        passes = range(low, high + 1, _MARKS)
        return all(self._all_differ(among, n, min(n + _MARKS - 1, high)) for n in passes)

    def _all_differ(self, among: pc.Expression, low: int, high: int) -> bool:
        """Returns whether all values from ``low`` to ``high`` differ, and none is null, or outside
        of its file's statistics.
        """
        key = ds.field(self._column)
        scanner = self._table.dataset().scanner(
            [self._column],
            filter=among & (key.is_null() | ((key >= low) & (key <= high))),
            batch_size=_ROWS_AT_ONCE,
            batch_readahead=2,
            fragment_readahead=1,
        )
        marks, count = np.zeros(high - low + 1, bool), 0
        for batch in scanner.to_batches():
            if batch.column(0).null_count:
                return False
            places = batch.column(0).cast(pa.int64()).to_numpy() - low
            if len(places) and (places.min() < 0 or places.max() > high - low):
                return False
            marks[places] = True
            count += len(places)
        return int(np.count_nonzero(marks)) == count


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges with overlapping and adjacent ones merged."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return joined


def _statistics(column: str) -> tuple[str, str, str]:
    return f"min.{column}", f"max.{column}", "num_records"

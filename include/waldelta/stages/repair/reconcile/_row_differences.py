"""Compares the rows of differing buckets: which are on one side only, or differ; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.ledger import RowDifference
from waldelta.lake.ledger.check_records import ColumnDifference

# What is wrong with a row, from the target's point of view.
MISSING, EXTRA, DIFFERENT_VALUES, DOUBLED = "missing", "extra", "different", "doubled"
DIFFERENCE_KINDS = (MISSING, EXTRA, DIFFERENT_VALUES, DOUBLED)
# Texts that name a row of a table without a key are cut to this many characters, on both sides.
TEXT_SHOWN = 100
_HASHES = ["k", "h"]


@dataclass(frozen=True, slots=True)
class Valued:
    """A row's columns: as shown, and as compared."""

    shown: Sequence[str | None]
    exact: Sequence[str]


@dataclass(frozen=True, slots=True)
class HashedRows:
    """Rows by the hashes of their keys (``k``) and of themselves (``h``), with naming texts
    (``t<n>``).
    """

    table: pa.Table

    @classmethod
    def schema(cls, texts: int) -> pa.Schema:
        """Returns the schema for rows with this many naming texts."""
        return pa.schema(
            [("k", pa.int64()), ("h", pa.int64()), *((f"t{n}", pa.string()) for n in range(texts))]
        )

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, ...]], texts: int) -> HashedRows:
        """Returns the rows from tuples."""
        schema = cls.schema(texts)
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        return cls(
            pa.table(
                [pa.array(values, f.type) for values, f in zip(columns, schema, strict=True)],
                schema=schema,
            )
        )

    def named(self, hashes: pa.Array[Any], names: Sequence[str]) -> dict[int, str]:
        """Returns by hash of these keys the name of one row."""
        rows = self.table.filter(pc.is_in(self.table["k"], value_set=hashes)).to_pylist()
        return {
            row["k"]: json.dumps({name: row[f"t{n}"] for n, name in enumerate(names)})
            for row in rows
        }


def differing_rows(
    source: HashedRows, target: HashedRows, names: Sequence[str], *, keyed: bool
) -> list[RowDifference]:
    """Returns the rows that aren't the same on both sides, ordered by their keys' names.

    The columns that differ are not filled in.
    """
    counts = _counts(source).join(
        _counts(target), _HASHES, join_type="full outer", right_suffix="_target"
    )
    left, right = (pc.fill_null(counts[name], 0) for name in ("n", "n_target"))
    odd = counts.append_column("balance", pc.subtract(left, right)).filter(
        pc.not_equal(left, right)
    )
    hashes = pc.unique(odd["k"])
    rows = [_total(rows, hashes) for rows in (source, target)]
    called = target.named(hashes, names) | source.named(hashes, names)
    differences = _of_keys(hashes.to_pylist(), *rows) if keyed else _of_multisets(odd)
    return sorted(
        (replace(one, key=called[one.hash]) for one in differences),
        key=lambda one: (one.key, one.kind),
    )


def _of_keys(
    hashes: Sequence[int], source: dict[int, int], target: dict[int, int]
) -> Iterator[RowDifference]:
    for key in hashes:
        source_rows, target_rows = source.get(key, 0), target.get(key, 0)
        kind = (
            DOUBLED
            if target_rows > 1
            else MISSING
            if not target_rows
            else EXTRA
            if not source_rows
            else DIFFERENT_VALUES
        )
        yield RowDifference(kind, "", target_rows - 1 if target_rows > 1 else 1, hash=key)


def _of_multisets(odd: pa.Table) -> Iterator[RowDifference]:
    for key, balance in zip(odd["k"].to_pylist(), odd["balance"].to_pylist(), strict=True):
        yield RowDifference(MISSING if balance > 0 else EXTRA, "", abs(balance), hash=key)


def _counts(rows: HashedRows) -> pa.Table:
    return (
        rows.table.group_by(_HASHES).aggregate([([], "count_all")]).rename_columns([*_HASHES, "n"])
    )


def _total(rows: HashedRows, hashes: pa.Array[Any]) -> dict[int, int]:
    key_rows = rows.table.filter(pc.is_in(rows.table["k"], value_set=hashes))
    counts = key_rows.group_by("k").aggregate([([], "count_all")])
    return dict(zip(counts["k"].to_pylist(), counts["count_all"].to_pylist(), strict=True))


def with_columns(
    difference: RowDifference,
    names: Sequence[str],
    source: Valued | None,
    target: Valued | None,
    most: int,
) -> RowDifference:
    """Returns a differing row with the columns that differ; values longer than ``most`` are cut."""
    if source is None or target is None:
        return difference
    columns = [
        ColumnDifference(name, _shorten(source.shown[n], most), _shorten(target.shown[n], most))
        for n, name in enumerate(names)
        if source.exact[n] != target.exact[n]
    ]
    return replace(difference, columns=columns)


def _shorten(text: str | None, most: int) -> str | None:
    return (
        text if text is None or len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"
    )

"""Fingerprints: the hash of each row and of its key, and sums of hashes by bucket, equal on both
sides.

A bucket is a share of the keys (of the rows, where there is no key). The sums are modulo 2⁶⁴, so
that rows in flight can be subtracted again, and a duplicate row counts twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.stages.repair.reconcile._checksum_text import lake_rows
from waldelta.stages.repair.reconcile._hash64 import Hashes, hash_texts
from waldelta.types import TargetType
from waldelta.types.checksum import Marks, hex_text

# With these numbers a bucket has few rows to read, and the sums are few compared with the rows.
_ROWS_PER_BUCKET, _FEWEST, _MOST = 512, 16, 1 << 16
_NONCE_BYTES = 2
# The size of a batch that is hashed at once; its texts are up to three times as long.
_MOST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """How the rows of one table are hashed; it is serialized to Spark's tasks.

    ``key`` are the columns that identify rows, empty if there are none. ``raw``: whether the target
    has ``_wd_raw``. ``in_hex``: texts are hashed as hexadecimal UTF-8, because PostgreSQL would
    hash the bytes of another encoding.
    """

    table: str
    columns: tuple[tuple[str, TargetType], ...]
    key: tuple[str, ...]
    marks: Marks
    seed: int
    buckets: int
    raw: bool
    in_hex: bool = False

    @property
    def key_columns(self) -> tuple[tuple[str, TargetType], ...]:
        """Returns the key's columns with their types."""
        types = dict(self.columns)
        return tuple((name, types[name]) for name in self.key)

    @property
    def key_seed(self) -> int:
        """Returns the seed of the keys' hashes, which differs from that of the rows' hashes."""
        return self.seed ^ 1

    @property
    def raw_columns(self) -> tuple[str, ...]:
        """Returns the columns whose values may be stored in ``_wd_raw``.

        A batch has their texts after all columns, in this order.
        """
        return tuple(name for name, kind in self.columns if kind.may_be_raw) if self.raw else ()

    def raws_of(self, batch: pa.RecordBatch) -> list[ArrowArray | None]:
        """Returns the raw values of each column; None for a column that never has any."""
        places = {name: len(self.columns) + n for n, name in enumerate(self.raw_columns)}
        return [batch.column(places[name]) if name in places else None for name, _ in self.columns]


def drawn(
    table: str,
    columns: tuple[tuple[str, TargetType], ...],
    key: tuple[str, ...],
    rows: int,
    *,
    raw: bool,
    encoding: str,
) -> Fingerprint:
    """Returns a fingerprint with random marks and a random seed.

    ``rows`` is the approximate number of rows, ``encoding`` that of the source's database.
    """
    marks = Marks.drawn(secrets.token_hex(_NONCE_BYTES)[: _NONCE_BYTES + 1])
    seed, buckets = secrets.randbits(62), bucket_count(rows)
    return Fingerprint(table, columns, key, marks, seed, buckets, raw, in_hex=encoding != "UTF8")


def bucket_count(rows: int) -> int:
    """Returns the number of buckets, a power of two.

    >>> bucket_count(0), bucket_count(1_000_000), bucket_count(10**9)
    (16, 2048, 65536)
    """
    wanted = 1 << max(0, rows // _ROWS_PER_BUCKET).bit_length()
    return min(_MOST, max(_FEWEST, wanted))


def hash_as(texts: ArrowArray, plan: Fingerprint, seed: int) -> Hashes:
    """Returns the hash of each text, in the plan's form."""
    return hash_texts(hex_text(texts) if plan.in_hex else texts, seed)


def hash_keys(columns: list[ArrowArray], plan: Fingerprint) -> Hashes:
    """Returns the hash of each key, given as the target's columns."""
    typed = [(column, kind) for column, (_, kind) in zip(columns, plan.key_columns, strict=True)]
    return hash_as(lake_rows(typed, [None] * len(typed), plan.marks), plan, plan.key_seed)


def hash_rows(batch: pa.RecordBatch, plan: Fingerprint) -> tuple[Hashes, Hashes]:
    """Returns the hashes of each row's key and of the row, of a batch of columns and raw texts."""
    names = [name for name, _ in plan.columns]
    columns = [(batch.column(n), kind) for n, (_, kind) in enumerate(plan.columns)]
    rows = hash_as(lake_rows(columns, plan.raws_of(batch), plan.marks), plan, plan.seed)
    if not plan.key:
        return rows, rows
    return hash_keys([batch.column(names.index(name)) for name in plan.key], plan), rows


def in_parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields parts of a batch whose texts Arrow can join: it counts their bytes in 32 bits."""
    per_part = max(1, batch.num_rows * _MOST_BYTES // max(batch.nbytes, 1))
    for first in range(0, batch.num_rows, per_part):
        yield batch.slice(first, per_part)


class Sums:
    """Row counts and sums of row hashes, by bucket."""

    def __init__(self, buckets: int) -> None:
        self.rows: NDArray[np.int64] = np.zeros(buckets, np.int64)
        self.totals: NDArray[np.uint64] = np.zeros(buckets, np.uint64)

    def add(self, keys: Hashes, rows: Hashes) -> None:
        """Add rows by their hashes."""
        at = buckets_of(keys, len(self.rows))
        self.rows += np.bincount(at, minlength=len(self.rows))
        np.add.at(self.totals, at, rows.view(np.uint64))

    def add_sums(
        self, buckets: NDArray[Any], rows: NDArray[np.int64], totals: NDArray[np.uint64]
    ) -> None:
        """Add sums computed by another task or query."""
        np.add.at(self.rows, buckets, rows)
        np.add.at(self.totals, buckets, totals)

    def without(self, keys: Hashes, rows: Hashes) -> Sums:
        """Returns these sums without some of their rows."""
        taken = Sums(len(self.rows))
        taken.add(keys, rows)
        left = Sums(len(self.rows))
        left.rows, left.totals = self.rows - taken.rows, self.totals - taken.totals
        return left

    def differing(self, other: Sums) -> NDArray[np.int64]:
        """Returns the numbers of the buckets that differ."""
        found: NDArray[np.int64] = np.flatnonzero(
            (self.rows != other.rows) | (self.totals != other.totals)
        )
        return found

    @property
    def count(self) -> int:
        """Returns the number of all rows."""
        return int(self.rows.sum())


def buckets_of(keys: Hashes, buckets: int) -> NDArray[np.int64]:
    """Returns the bucket of each key."""
    found: NDArray[np.int64] = keys & np.int64(buckets - 1)
    return found

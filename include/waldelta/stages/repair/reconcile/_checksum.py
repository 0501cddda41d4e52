"""Fingerprints: the hash of each row and of its key, and sums of hashes by bucket, equal on both
sides.

A bucket is a share of the keys (of the rows, where there is no key). The sums are modulo 2⁶⁴, so
that rows in flight can be subtracted again, and a duplicate row counts twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg import sql

from waldelta.arrow import storage
from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.types import TargetType
from waldelta.types.base import Marks, hex_text, packed

Words: TypeAlias = NDArray[np.uint32]
Hashes: TypeAlias = NDArray[np.int64]

# Rows that are hashed together: their state fits in the processor's cache.
_ROWS = 8192
_ROUND = 12
_INITIAL = 0x9E3779B9 + 3923095
_MIX = (
    (0, 2, 4, 2, 1),
    (1, 0, 6, 0, 2),
    (2, 1, 8, 1, 0),
    (0, 2, 16, 2, 1),
    (1, 0, 19, 0, 2),
    (2, 1, 4, 1, 0),
)
_FINAL = ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24))
# Masks of the rest of a round of n bytes, as three words; the lowest byte of the last word belongs
# to the length.
_KEPT = np.array(
    [[(1 << 8 * min(4, max(0, n - 4 * word))) - 1 for word in range(3)] for n in range(_ROUND)],
    np.uint32,
)


def hash_texts(texts: ArrowArray, seed: int) -> Hashes:
    """Returns the hash of each text as PostgreSQL's bigint; nulls are not allowed.

    >>> import pyarrow as pa
    >>> hash_texts(pa.array(["", "waldelta"]), 0).tolist()
    [-6939563903564495251, 1649827410229605319]
    """
    source, offsets = packed(texts, "")
    padded = np.concatenate([source, np.zeros(_ROUND, np.uint8)])
    # Each byte is the start of a word.
    words: Words = np.lib.stride_tricks.as_strided(padded[:4].view("<u4"), (len(padded) - 3,), (1,))
    lengths = np.diff(offsets)
    # The longest come first, so that rows with rounds left are adjacent.
    order = np.argsort(-lengths, kind="stable")
    hashes = np.empty(len(lengths), np.int64)
    with np.errstate(over="ignore"):
        for first in range(0, len(order), _ROWS):
            rows = order[first : first + _ROWS]
            hashes[rows] = _hash(words, offsets[:-1][rows], lengths[rows], seed)
    return hashes


def _hash(words: Words, starts: NDArray[np.int64], lengths: NDArray[np.int64], seed: int) -> Hashes:
    """Returns the hashes of rows in descending order of their lengths."""
    initial = (lengths + _INITIAL).astype(np.uint32)
    state = [initial, initial.copy(), initial.copy()]
    if seed:
        state[0] += np.uint32(seed >> 32 & 0xFFFFFFFF)
        state[1] += np.uint32(seed & 0xFFFFFFFF)
        _mix(state)
    rounds = lengths // _ROUND
    # For each n: how many rows have more than n rounds.
    going = np.searchsorted(
        -rounds, -np.arange(1, (rounds[0] if len(rounds) else 0) + 1), side="right"
    )
    for number, count in enumerate(going):
        part = [word[:count] for word in state]
        at = starts[:count] + _ROUND * number
        for place in range(3):
            part[place] += words[at + 4 * place]
        _mix(part)
    tail_bytes = lengths - _ROUND * rounds
    masks, at = _KEPT[tail_bytes], starts + _ROUND * rounds
    state[0] += words[at] & masks[:, 0]
    state[1] += words[at + 4] & masks[:, 1]
    state[2] += (words[at + 8] & masks[:, 2]) << np.uint32(8)
    for target, by, bits in _FINAL:
        state[target] ^= state[by]
        state[target] -= _rotate(state[by], bits)
    both: NDArray[np.uint64] = state[1].astype(np.uint64) << np.uint64(32) | state[2]
    return both.view(np.int64)


def _mix(state: list[Any]) -> None:
    for target, by, bits, grown, added in _MIX:
        state[target] -= state[by]
        state[target] ^= _rotate(state[by], bits)
        state[grown] += state[added]


def _rotate(word: Words, bits: int) -> Words:
    rotated: Words = word << np.uint32(bits) | word >> np.uint32(32 - bits)
    return rotated


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
    count = 1 << max(0, rows // _ROWS_PER_BUCKET).bit_length()
    return min(_MOST, max(_FEWEST, count))


def hash_as(texts: ArrowArray, plan: Fingerprint, seed: int) -> Hashes:
    """Returns the hash of each text, or of its hex form if the source's encoding isn't UTF8."""
    return hash_texts(hex_text(texts) if plan.in_hex else texts, seed)


def hash_keys(columns: list[ArrowArray], plan: Fingerprint) -> Hashes:
    """Returns the hash of each key, given as the target's columns."""
    typed = [(column, kind) for column, (_, kind) in zip(columns, plan.key_columns, strict=True)]
    return hash_as(target_texts(typed, [None] * len(typed), plan.marks), plan, plan.key_seed)


def hash_rows(batch: pa.RecordBatch, plan: Fingerprint) -> tuple[Hashes, Hashes]:
    """Returns the hashes of each row's key and of the row, of a batch of columns and raw texts."""
    names = [name for name, _ in plan.columns]
    columns = [(batch.column(n), kind) for n, (_, kind) in enumerate(plan.columns)]
    rows = hash_as(target_texts(columns, plan.raws_of(batch), plan.marks), plan, plan.seed)
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
        """Returns the sums after subtracting some of the rows."""
        sums = Sums(len(self.rows))
        sums.add(keys, rows)
        difference = Sums(len(self.rows))
        difference.rows, difference.totals = self.rows - sums.rows, self.totals - sums.totals
        return difference

    def differing(self, others: Sums) -> NDArray[np.int64]:
        """Returns the numbers of the buckets that differ."""
        numbers: NDArray[np.int64] = np.flatnonzero(
            (self.rows != others.rows) | (self.totals != others.totals)
        )
        return numbers

    @property
    def count(self) -> int:
        """Returns the number of all rows."""
        return int(self.rows.sum())


def buckets_of(keys: Hashes, buckets: int) -> NDArray[np.int64]:
    """Returns the bucket of each key."""
    numbers: NDArray[np.int64] = keys & np.int64(buckets - 1)
    return numbers


_FUNCTION_ARGUMENTS = 90  # PostgreSQL takes at most 100.


def source_text(
    columns: Sequence[tuple[sql.Composable, TargetType]], marks: Marks, *, raw: bool
) -> sql.Composable:
    """Returns the SQL of a row's text, from these columns.

    Without ``raw``, a value that the lake can't store is null in the target.
    """
    null = sql.Literal(marks.null)
    values: list[sql.Composable] = [
        sql.SQL("coalesce({}, {})").format(kind.checksum_sql(column, marks, keeps_raw=raw), null)
        for column, kind in columns
    ]
    while len(values) > _FUNCTION_ARGUMENTS:
        groups = [
            values[n : n + _FUNCTION_ARGUMENTS] for n in range(0, len(values), _FUNCTION_ARGUMENTS)
        ]
        values = [_join_texts(group, marks) for group in groups]
    return _join_texts(values, marks)


def _join_texts(values: Sequence[sql.Composable], marks: Marks) -> sql.Composable:
    return sql.SQL("pg_catalog.concat_ws({}, {})").format(
        sql.Literal(marks.between), sql.SQL(", ").join(values)
    )


def target_texts(
    columns: Sequence[tuple[ArrowArray, TargetType]],
    raws: Sequence[ArrowArray | None],
    marks: Marks,
) -> ArrowArray:
    """Returns the text of each row that is hashed, as source_text() has it.

    ``raws`` are each column's raw values from ``_wd_raw`` (None: it has none).
    """
    texts = []
    for (values, kind), raw in zip(columns, raws, strict=True):
        text = kind.checksum_text(storage(values), marks)
        if raw is not None and raw.null_count < len(raw):
            # waldelta never writes both a value and its raw text, so such a row differs.
            raw_text = kind.checksum_raw(raw)
            both = pc.binary_join_element_wise(text, raw_text, marks.element)
            text = pc.if_else(
                raw_text.is_valid(), pc.if_else(text.is_valid(), both, raw_text), text
            )
        texts.append(pc.fill_null(text, marks.null) if text.null_count else text)
    if len(texts) == 1:
        return texts[0]
    rows: ArrowArray = pc.binary_join_element_wise(*texts, marks.between)
    return rows

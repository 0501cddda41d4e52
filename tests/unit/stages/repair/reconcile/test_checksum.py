"""Hashes and sums: what is added can be taken out, and nothing else gives the same sum."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from tests.support.seeds import chosen_seed
from waldelta.stages.repair.reconcile._checksum import (
    Fingerprint,
    Sums,
    bucket_count,
    hash_rows,
    hash_texts,
    in_parts,
    target_texts,
)
from waldelta.types import TargetType
from waldelta.types.base import Marks
from waldelta.types.datetime import Moment
from waldelta.types.numeric import Number
from waldelta.types.text import Text

INT, TEXT = Number("int", pa.int32(), "int4"), Text(is_plain=True)
MARKS = Marks.drawn("ab")
COLUMNS: tuple[tuple[str, TargetType], ...] = (("id", INT), ("a", TEXT), ("b", TEXT))

# As PostgreSQL 18 answers: select hashtextextended(text collate "C", seed).
KNOWN = [
    ("", 0, -6939563903564495251),
    ("waldelta", 0, 1649827410229605319),
    ("", 1, -150071773020461347),
    ("waldelta", 1, -330503658564498079),
    ("", -5, 276691182281719003),
    ("waldelta", 7462846238462387462, -5544900676421192697),
]


@pytest.mark.parametrize("text, seed, expected", KNOWN)
def test_a_text_has_postgresqls_hash(text, seed, expected):
    assert hash_texts(pa.array([text]), seed).tolist() == [expected]


def test_the_hash_of_a_text_is_that_of_no_neighbour():
    """Many texts of all lengths at once, sliced or not, hash as each alone."""
    seed = chosen_seed()
    random = np.random.default_rng(seed)
    texts = ["".join(random.choice(list("aü€\x1f"), size)) for size in random.integers(0, 60, 500)]
    alone = [hash_texts(pa.array([text]), 9).tolist()[0] for text in texts]
    assert hash_texts(pa.array(texts), 9).tolist() == alone, seed
    assert hash_texts(pa.array(["x", *texts]).slice(1), 9).tolist() == alone, seed
    assert hash_texts(pa.array([], pa.string()), 9).tolist() == []


def texts(rows, raws=None):
    columns = list(zip(*rows, strict=True))
    arrays = [
        (pa.array(values, kind.arrow), kind)
        for values, (_, kind) in zip(columns, COLUMNS, strict=True)
    ]
    return target_texts(
        arrays, [None if raw is None else pa.array(raw) for raw in raws or [None] * 3], MARKS
    ).to_pylist()


def test_rows_of_other_values_have_other_texts():
    """Null, the empty string, the mark's own characters, values that run into each other."""
    rows = [
        (1, "a", "b"),
        (1, "ab", ""),
        (1, "", "ab"),
        (1, None, "ab"),
        (1, "ab", None),
        (1, "\x1e", "ab"),
        (1, "null", "ab"),
        (11, "", "b"),
        (1, "1", "b"),
        (None, "1", "b"),
        (1, "a\x1fb", ""),
        (1, "a", "\x1fb"),
    ]
    found = texts(rows)
    assert len(set(found)) == len(rows)


def test_a_verbatim_text_beside_a_value_is_neither():
    """What stands in _wd_raw counts where the type holds nothing; beside a value it is another."""
    rows = [(None, "a", "b"), (1, "a", "b"), (1, "a", "b")]
    found = texts(rows, [["NaN", "NaN", None], None, None])
    assert found[0].startswith("NaN\x1f")
    assert len(set(found)) == 3


def batch(rows):
    columns = [
        pa.array(values, kind.arrow)
        for values, (_, kind) in zip(zip(*rows, strict=True), COLUMNS, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=["id", "a", "b"])


def plan(key=("id",), buckets=16):
    return Fingerprint("t", COLUMNS, key, MARKS, 77, buckets, raw=True)


def test_sums_tell_any_row_apart_and_let_rows_be_taken_out():
    """Multisets: a row twice isn't a row once; what is in flight leaves no trace."""
    rows = [(n, f"v{n}", None) for n in range(100)]
    whole, copy = Sums(16), Sums(16)
    for part in (rows[:70], rows[70:]):
        whole.add(*hash_rows(batch(part), plan()))
    copy.add(*hash_rows(batch(rows[::-1]), plan()))
    assert whole.differing(copy).tolist() == []
    twice = Sums(16)
    twice.add(*hash_rows(batch([*rows, rows[3]]), plan()))
    assert len(whole.differing(twice)) == 1
    changed = Sums(16)
    changed.add(*hash_rows(batch([*rows[:-1], (99, "v98", None)]), plan()))
    assert len(whole.differing(changed)) == 1
    assert whole.differing(twice.without(*hash_rows(batch([rows[3]]), plan()))).tolist() == []
    assert (whole.count, twice.count) == (100, 101)


def test_of_a_source_in_another_encoding_the_bytes_of_utf8_are_hashed_in_hexadecimal():
    """Which are the same in all of them: keys and rows."""
    rows = [(1, "é", None), (2, "", "€x")]
    in_hex = replace(plan(key=("a",)), in_hex=True)
    keys, whole = hash_rows(batch(rows), in_hex)
    assert keys.tolist() == [hash_of(text.encode().hex(), in_hex.key_seed) for text in ("é", "")]
    assert whole.tolist() == [hash_of(text.encode().hex(), in_hex.seed) for text in texts(rows)]


def hash_of(text, seed):
    return hash_texts(pa.array([text]), seed).tolist()[0]


def test_without_a_key_a_rows_bucket_is_its_own():
    """Rows are found by all that they hold."""
    keys, rows = hash_rows(batch([(1, "a", None), (1, "b", None)]), plan(key=()))
    assert keys.tolist() == rows.tolist()
    assert len(set(rows.tolist())) == 2


@pytest.mark.parametrize(
    "rows, buckets", [(0, 16), (10_000, 32), (10_000_000, 32768), (1 << 40, 65536)]
)
def test_buckets_are_few_beside_the_rows(rows, buckets):
    assert bucket_count(rows) == buckets


def test_verbatim_texts_stand_behind_the_columns_that_may_have_them():
    """A value that its type can't hold is as PostgreSQL prints it; without metadata it is null."""
    day = Moment("date", pa.date32(), "date")
    columns: tuple[tuple[str, TargetType], ...] = (("id", INT), ("day", day), ("a", TEXT))
    with_raw = Fingerprint("t", columns, ("id",), MARKS, 77, 16, raw=True)
    arrays = [pa.array([1], pa.int32()), pa.array([None], pa.date32()), pa.array(["x"])]
    found = {
        text: hash_rows(
            pa.RecordBatch.from_arrays(
                [*arrays, pa.array([text], pa.string())], names=["c0", "c1", "c2", "r0"]
            ),
            with_raw,
        )
        for text in ("infinity", "-infinity", None)
    }
    assert with_raw.raw_columns == ("day",)
    assert len({rows.tolist()[0] for _, rows in found.values()}) == 3
    without = Fingerprint("t", columns, ("id",), MARKS, 77, 16, raw=False)
    assert (
        hash_rows(pa.RecordBatch.from_arrays(arrays, names=["c0", "c1", "c2"]), without)[1]
        == found[None][1]
    )


def test_a_batch_of_large_rows_is_hashed_in_parts(monkeypatch):
    """As many rows at once as their texts have room."""
    monkeypatch.setattr("waldelta.stages.repair.reconcile._checksum._MOST_BYTES", 1000)
    whole = batch([(n, "x" * 400, None) for n in range(10)])
    parts = list(in_parts(whole))
    assert [part.num_rows for part in parts] == [2] * 5
    assert pa.Table.from_batches(parts).to_pydict() == whole.to_pydict()
    assert list(in_parts(whole.slice(0, 0))) == []

"""Which files may hold changed keys by the Delta log: none that does is left out."""

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from tests.support.bookkeeping import table_at
from tests.support.seeds import chosen_random
from waldelta.changes.merge.compare import may_hold
from waldelta.lake.data_file import FileStatistics, bounded_columns

TEXT, DAY, MOMENT, LOCAL = pa.string(), pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us")
A, UUID = "a" * 32, "3f2504e0-4f89-11d3-9a0c-0305e82c330{}"


def at(microsecond, zone=UTC) -> datetime:
    return datetime(2024, 1, 1, microsecond=microsecond, tzinfo=zone)


# The column's type, a file's bounds as Delta's log has them (None: untold), a key that the file may
# hold, and one that it doesn't (None: it may hold any).
CASES = {
    "integers": (pa.int32(), (-3, 7), 7, 8),
    "large integers": (pa.int64(), (2**53, 2**53 + 2), 2**53 + 1, 2**53 + 3),
    "texts": (TEXT, ("b", "d"), "czzz", "da"),
    "texts below": (TEXT, ("b", "d"), "b", "azzz"),
    "texts by their code points": (TEXT, ("z", "ä"), "\x7f", "é"),
    "a greatest text that delta-rs misreads where it is escaped": (TEXT, ("a", "\U00020000"),
     "\U0001ffff", None),
    "a least one of this kind": (TEXT, ("\uffff", "\uffff!"), "\uffff", "\U00020000"),
    "the empty text": (TEXT, ("", "a"), "", "b"),
    "texts with trailing blanks": (TEXT, ("a", "a "), "a ", "a  "),
    "a longer text than its cut greatest": (TEXT, ("a", A + "\x7f"), A + "zzz", "ab"),
    "the same by Delta's other last character": (TEXT, ("a", A + "\U0010ffff"), A + "\uffff!",
     None),
    "a text as long as its cut least": (TEXT, (A, "b"), A, A[:-1]),
    "uuids": (TEXT, (UUID.format(1)[:32], UUID.format(1)[:32] + "\x7f"), UUID.format(9),
     UUID.format(9).replace("3f", "40")),
    "dates": (DAY, ("2024-01-31", "2024-02-29"), date(2024, 2, 29), date(2024, 3, 1)),
    "dates before 1970": (DAY, ("0001-01-01", "1969-12-31"), date(1, 1, 1), date(1970, 1, 1)),
    "moments, the greatest cut": (MOMENT, ("2024-01-01T00:00:00.000Z", "2024-01-01T00:00:00.001Z"),
     at(1999), at(2000)),
    "moments before 1970": (
        MOMENT,
        ("1969-12-31T23:59:59.998Z", "1969-12-31T23:59:59.998Z"),
        datetime(1969, 12, 31, 23, 59, 59, 998_999, UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC),
    ),
    "moments with an offset, as Spark tells them": (MOMENT,
     ("2024-01-01T02:00:00.000+02:00", "2024-01-01T02:00:00.001+02:00"), at(1), at(2000)),
    "moments without a zone": (LOCAL, ("2024-01-01T00:00:00.000", "2024-01-01T00:00:00.001"),
     at(1999, None), at(2000, None)),
    "decimals": (pa.decimal128(10, 2), (1.05, 2.5), Decimal("1.05"), Decimal("1.04")),
    "whole decimals": (pa.decimal128(15, 0), (-5, 999_999_999_999_999), Decimal(0), Decimal(-6)),
    "decimals that writers make doubles of": (pa.decimal128(16, 0), (1, 2), Decimal(9), None),
    "numbers, which may be none": (pa.float64(), (1.0, 2.0), float("nan"), None),
    "truth": (pa.bool_(), (False, False), True, None),
    "nothing told": (TEXT, (None, None), "b", None),
    "the least alone": (TEXT, ("b", None), "c", None),
    "the greatest alone": (pa.int64(), (None, 7), 8, None),
    "a day that no calendar of Python's has": (DAY, ("2024-01-01", "+10000-01-01"),
     date(9999, 1, 1), None),
}  # fmt: skip


def told_of(folder, kinds, *stats) -> pa.Table:
    """What the log of a table says of files with these statistics."""
    schema = pa.schema(kinds)
    table = DeltaTable.create(folder.as_uri(), schema)
    adds = [
        AddAction(f"{n}.parquet", 1, {}, 0, data_change=True, stats=text)
        for n, text in enumerate(stats)
    ]
    table.create_write_transaction(adds, mode="append", schema=table.schema())
    return table_at(folder.as_uri()).open().files.sort_by("path")


def statistics(**bounds) -> str:
    sides = [
        {name: pair[k] for name, pair in bounds.items() if pair[k] is not None} for k in (0, 1)
    ]
    return json.dumps(
        {
            "numRecords": 2,
            "minValues": sides[0],
            "maxValues": sides[1],
            "nullCount": dict.fromkeys(bounds, 0),
        }
    )


def held(told, *columns) -> list[bool]:
    """By columns of keys: their types and values."""
    names = [
        name for name in ("k", "l") if any(f"min.{name}" == found for found in told.schema.names)
    ]
    return may_hold(
        told, names, [pa.chunked_array([pa.array(values, kind)]) for kind, values in columns]
    ).tolist()


@pytest.mark.parametrize("case", CASES)
def test_files_that_may_hold_a_key(tmp_path, case):
    """And only these, where the bounds can be compared exactly."""
    kind, bounds, within, beyond = CASES[case]
    told = told_of(tmp_path, [("k", kind)], statistics(k=bounds))
    assert held(told, (kind, [within])) == [True]
    if beyond is not None:
        assert held(told, (kind, [beyond])) == [False]
        assert held(told, (kind, [None, beyond, within])) == [True]


def test_a_file_between_two_keys_holds_neither(tmp_path):
    """Nor does any hold a null, which is equal to nothing; one without statistics may hold all."""
    told = told_of(
        tmp_path, [("k", TEXT)], statistics(k=("b", "d")), statistics(k=("e", "g")),
        '{"numRecords":1}', statistics(k=("x", "z")),
    )  # fmt: skip
    assert held(told, (TEXT, ["a", "f", "y", "y"])) == [False, True, True, True]
    assert held(told, (TEXT, [None])) == held(told, (TEXT, [])) == [False, False, True, False]


def test_each_column_of_a_key_counts(tmp_path):
    kinds = [("k", pa.int64()), ("l", DAY)]
    days = ("2024-01-01", "2024-01-31"), ("2024-02-01", "2024-02-29")
    told = told_of(tmp_path, kinds, *(statistics(k=(1, 9), l=pair) for pair in days))
    assert held(told, (pa.int64(), [5]), (DAY, [date(2024, 2, 1)])) == [False, True]
    assert held(told, (pa.int64(), [10]), (DAY, [date(2024, 2, 1)])) == [False, False]


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        (pa.int64(), pa.int16(), False),
        (pa.decimal128(12, 4), pa.decimal128(10, 2), False),
        (TEXT, pa.int64(), True),
        (MOMENT, LOCAL, True), (TEXT, pa.large_string(), False),
    ],
    ids=str,
)  # fmt: skip
def test_keys_of_another_type(tmp_path, kind, keys, expected):
    """Only types of one order are compared: as texts, numbers would be in another."""
    bounds = {TEXT: ("5", "6"), MOMENT: ("2024-01-01T00:00:00.000Z",) * 2}.get(kind, (5, 6))
    told = told_of(tmp_path, [("k", kind)], statistics(k=bounds))
    values = {
        LOCAL: datetime(2000, 1, 1),  # noqa: DTZ001
        pa.int16(): 7,
        pa.int64(): 7,
        pa.large_string(): "7",
    }
    assert held(told, (keys, [values.get(keys, Decimal("7.00"))])) == [expected]


def random_values(rng, kind, count) -> list:
    if kind == TEXT:
        letters = "ab\x7f\uffff\U0010ffff"
        return [
            "a" * rng.choice([0, 30, 31, 32]) + "".join(rng.choices(letters, k=rng.randrange(4)))
            for _ in range(count)
        ]
    near = [rng.randrange(-3000, 3000) for _ in range(count)]
    if kind == DAY:
        return [date(1970, 1, 1) + timedelta(days=n) for n in near]
    if pa.types.is_timestamp(kind):
        return [
            datetime(1970, 1, 1, tzinfo=UTC if kind.tz else None) + timedelta(microseconds=n)
            for n in near
        ]
    return [Decimal(n) for n in near] if pa.types.is_decimal(kind) else near


@pytest.mark.parametrize(
    "kind", [pa.int64(), TEXT, DAY, MOMENT, LOCAL, pa.decimal128(12, 0)], ids=str
)
def test_no_file_of_ours_that_holds_a_key_is_left_out(tmp_path, kind):
    """By the statistics that data files are written with."""
    rng = chosen_random()
    schema = pa.schema([("k", kind)])
    files = [random_values(rng, kind, rng.randrange(1, 4)) for _ in range(60)]
    stats = []
    for values in files:
        made = FileStatistics(bounded_columns(schema))
        made.add(pa.table({"k": values}, schema=schema))
        stats.append(made.text())
    told = told_of(tmp_path, schema, *stats)
    order = [int(path.removesuffix(".parquet")) for path in told["path"].to_pylist()]
    left_out = 0
    for _ in range(60):
        keys = [rng.choice(rng.choice(files)), *random_values(rng, kind, 1)]
        found = np.array(held(told, (kind, keys)))
        assert all(found[n] for n, place in enumerate(order) if set(files[place]) & set(keys)), (
            keys,
        )
        left_out += int((~found).sum())
    assert left_out

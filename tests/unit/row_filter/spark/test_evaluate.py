"""Conditions that Arrow evaluates as Spark does, and those that it leaves to Spark."""

from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest

from waldelta.row_filter.spark.evaluate import evaluate, is_certain

RAW = pa.map_(pa.string(), pa.string())
ROWS = pa.table(
    {
        "i": pa.array([1, None, -5], pa.int32()),
        "l": pa.array([1 << 40, 2, None], pa.int64()),
        "t": ["EU", None, "a%_b"],
        "b": [True, None, False],
        "n": pa.array([Decimal("1.50"), None, Decimal("-2.00")], pa.decimal128(12, 2)),
        "d": [date(2020, 1, 1), None, date(1, 1, 1)],
        "ts": pa.array([0, None, -1], pa.timestamp("us", "UTC")),
        "f": [1.5, None, float("nan")],
        "a`b.c": [1, 2, None],
        "_wd_raw": pa.array([None, [("n", "NaN")], []], RAW),
    }
)
T, F, N = True, False, None


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("`i` = 1", [T, N, F]),
        ("i <> l", [T, N, N]),
        ("i >= -5", [T, N, T]),
        ("5000000000 < l", [T, F, N]),
        ("t in ('EU', 'US')", [T, N, F]),
        ("not (t in ('EU', null))", [F, N, N]),
        ("t like 'a%'", [F, N, T]),
        ("t not like 'a%'", [T, N, F]),
        ("not (t not like 'a%')", [F, N, T]),
        ("t not in ('EU', 'US')", [F, N, T]),
        ("char_length(t) > 2", [F, N, T]),
        ("endswith(t, 'U')", [T, N, F]),
        ("rtrim(t) = rtrim('EU ')", [T, N, F]),
        ("rtrim('EU', t) = ''", None),
        ("ltrim(t) = 'EU'", None),
        ("b and i = 1", [T, N, F]),
        ("b or true", [T, T, T]),
        ("b is not true", [F, T, T]),
        ("b is false", [F, F, T]),
        ("i is null", [F, T, F]),
        ("i <=> null", [F, T, F]),
        ("coalesce((i = 1), false)", [T, F, F]),
        ("(`n` > cast('1.4' as decimal(2,1)))", [T, N, F]),
        ("(`d` >= cast('2020-01-01' as date))", [T, N, F]),
        ("(`ts` < cast('1970-01-01 00:00:00+00' as timestamp))", [F, N, T]),
        ("try_element_at(`_wd_raw`, 'n') is null", [T, F, T]),
        ("coalesce(map_contains_key(_wd_raw, 'n'), false)", [F, T, F]),
        ("case when i = 1 then t = 'EU' when b is null then false end", [T, F, N]),
        ("case t when 'EU' then 1 else 2 end > 1", [F, T, T]),
        ("true", [T, T, T]),
        ("false", [F, F, F]),
        ("`i` is not null", [T, F, T]),
        ("`I` is not null", None),
        ("`a``b.c` is not null", [T, T, F]),
        ("cast(null as boolean)", None),
        ("t like 'a%' escape '/'", None),
        ("i not between 1 and 2", None),
        ("i = '1'", None),  # Spark casts the text
        ("f > 1", None),  # and sorts NaN above infinity
        ("i = 1.0", None),
        ("i % 2 = 0", None),
        ("t like 'a\\\\%'", None),
        ("lower(t) = 'eu'", None),
        ("I = 1", None),  # its names have no case
        ("o.i = 1", None),
        ("i in (select 1)", None),
        ("cast(t as int) = 1", None),
        ("cast('x' as date) = d", None),
        ("cast('20200101' as date) = d", None),
        ("cast('1_0' as int) = i", None),
        ("cast('1.55' as decimal(2,1)) = n", None),  # Spark rounds it
        ("cast('1.5' as decimal) = n", None),
        ("try_cast('0x1' as int) = i", None),  # Spark reads no hexadecimal number
        # Spark rounds both to decimal(38,0), or the list's values to a type of its own.
        ("n < cast('1' as decimal(38,0))", None),
        ("coalesce(n, cast('1' as decimal(38,0))) = n", None),
        ("case when b then n else cast('1' as decimal(38,0)) end = n", None),
        ("n in (n, cast('1' as decimal(38,0)))", None),
        ("n in (cast('1.500' as decimal(20,3)))", [T, N, F]),
        ("i < 99999999999999999999", None),
        ("cast('1970-01-01 00:00:00' as timestamp) = ts", None),  # in which zone
        ("case when b then 1 else 'x' end = 1", None),
        ("i + 1", None),
        ("i", None),
        ("i >", None),
        ("current_date() = d", None),
    ],
)
def test_a_condition(condition, expected):
    found = evaluate(condition, ROWS)
    assert (None if found is None else found.to_pylist()) == expected


@pytest.mark.parametrize(
    ("condition", "certain"),
    [
        ("i = 1 and t like 'a%'", True),
        ("i % 2 = 0", False),
        ("i >", False),
        ("f > 1", True),
        ("true", True),
        ("`i` is not null", True),
    ],
)
def test_whether_columns_are_worth_reading(condition, certain):
    """By the text alone; the columns' types may still leave the condition to Spark."""
    assert is_certain(condition) is certain


def test_without_rows_nothing_is_evaluated():
    assert evaluate("i = 1", ROWS.slice(0, 0)).to_pylist() == []

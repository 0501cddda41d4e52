"""Values as text: PostgreSQL itself reads them back as the same value."""

from __future__ import annotations

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from waldelta.types.pg_text import pg_text

UTC = datetime.UTC


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (pa.array([True, False, None]), ["t", "f", None]),
        (pa.array([1, -1], pa.int64()), ["1", "-1"]),
        (pa.array([Decimal("1.50"), Decimal("-0.01")], pa.decimal128(5, 2)), ["1.50", "-0.01"]),
        (pa.array([1.5, float("nan"), float("-inf")]), ["1.5", "NaN", "-Infinity"]),
        (pa.array([b"\x00\xff", None], pa.binary()), ["\\x00ff", None]),
        (pa.array([datetime.date(2020, 1, 10)]), ["2020-01-10"]),
        (pa.array(["2020-01-10 10:00:10.5", "2020-01-01 10:00:00"]).cast(pa.timestamp("us")),
         ["2020-01-10 10:00:10.5", "2020-01-01 10:00:00"]),
        (pa.array([datetime.datetime(2020, 1, 10, 10, 0, 10, tzinfo=UTC)],
                  pa.timestamp("us", "UTC")),
         ["2020-01-10 10:00:10+00"]),
        (pa.array([["a", 'b"\\', None], None, []]), ['{"a","b\\"\\\\",NULL}', None, "{}"]),
        (pa.array([[("k", None), ("l", "v")]], pa.map_(pa.string(), pa.string())),
         ['"k"=>NULL, "l"=>"v"']),
    ],
    ids=lambda v: str(v.type) if isinstance(v, pa.Array) else "",
)  # fmt: skip
def test_texts(values, texts):
    assert pg_text(values) == texts

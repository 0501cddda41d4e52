"""A data file under way: its bounds and statistics, and what is left of it when it ends."""

import json
import resource
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from waldelta.lake import DataFile
from waldelta.lake.data_file import FileStatistics, bounded_columns, order_of, shared_order
from waldelta.types.type_map import BUILT_INS

SCHEMA = pa.schema([("id", pa.int64())])
ROWS = pa.table({"id": range(100)}, SCHEMA)


def write(folder, *, before_close) -> None:
    with DataFile(SubTreeFileSystem(str(folder), LocalFileSystem()), SCHEMA, "part-x-") as file:
        file.write(ROWS)
        before_close()
        file.close()


def test_a_closed_file_stays(tmp_path):
    write(tmp_path, before_close=lambda: None)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("part-x-")


def test_a_file_whose_end_finds_no_room_goes_again(tmp_path):
    """A disk may be full when the footer comes, with all rows written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (max(p.stat().st_size for p in tmp_path.iterdir()), limits[1])
        )

    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path, before_close=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


# Floats may be NaN; truth and bytes are seldom keys.
WITHOUT = {"bool", "bytea", "float4", "float8"}
WHOLE, FEW, MANY = pa.decimal128(15, 0), pa.decimal128(15, 2), pa.decimal128(16, 0)


def test_every_built_in_type_has_an_order_or_is_known_to_have_none():
    found = {built_in.name for built_in in BUILT_INS if order_of(built_in.stored.arrow) is None}
    assert found == WITHOUT


@pytest.mark.parametrize("kind", [built_in.stored.arrow for built_in in BUILT_INS], ids=str)
def test_bounds_are_written_only_in_an_order_in_which_they_are_read(kind):
    order = order_of(kind)
    assert (order is None) == (shared_order(kind, kind) is None)


def test_decimals_that_doubles_hold():
    """Bounds of others may be other numbers; those with a fraction are read, but not written."""
    orders = [order_of(kind) for kind in (WHOLE, FEW, MANY)]
    assert [order is not None for order in orders] == [True, True, False]
    assert order_of(WHOLE).comparable(pa.array([], WHOLE)) is not None
    assert order_of(FEW).comparable(pa.array([], FEW)) is None
    assert shared_order(WHOLE, FEW).kind == pa.decimal128(30, 2)


LONG = "x" * 33
UTC_US, PLAIN_US = pa.timestamp("us", "UTC"), pa.timestamp("us")
# A column's type and values, and its least and greatest as Delta has them; None: no bounds.
CASES = {
    "integers": (pa.int32(), [3, None, -7], (-7, 3)),
    "texts by their bytes": (pa.string(), ["ä", "z", ""], ("", "ä")),
    "long texts, cut as Spark cuts them": (pa.string(), [LONG, "b" * 40],
     ("b" * 32, "x" * 32 + "\x7f")),
    "a long text that goes on beyond ASCII": (pa.string(), [LONG[:32] + "\x7f"],
     ("x" * 32, "x" * 32 + "\U0010ffff")),
    "a long text that nothing ends": (pa.string(), [LONG[:32] + "\U0010ffff!"], None),
    "a text of 32 characters of several bytes": (pa.string(), ["ä" * 32], ("ä" * 32, "ä" * 32)),
    "dates": (pa.date32(), [date(2024, 2, 29), date(1, 1, 1)], ("0001-01-01", "2024-02-29")),
    "a date of no calendar": (pa.date32(), [-719_163, 0], None),
    "moments, the last one rounded up": (UTC_US, [datetime(2024, 1, 1, microsecond=1, tzinfo=UTC)],
     ("2024-01-01T00:00:00.000Z", "2024-01-01T00:00:00.001Z")),
    "moments before 1970": (PLAIN_US, [-1], ("1969-12-31T23:59:59.999", "1970-01-01T00:00:00.000")),
    "a moment that rounds up beyond 9999": (PLAIN_US, [253_402_300_799_999_999], None),
    "floats, which may be NaN": (pa.float64(), [1.0], None),
    "decimals, whose doubles are others": (pa.decimal128(10, 2), [Decimal("1.5")], None),
    "whole decimals": (pa.decimal128(15, 0), [Decimal(-7), Decimal(10**15 - 1)], (-7, 10**15 - 1)),
    "whole decimals beyond doubles": (pa.decimal128(16, 0), [Decimal(1)], None),
    "truth": (pa.bool_(), [True], None),
    "nulls alone": (pa.int64(), [None], None),
}  # fmt: skip


def column_of(kind, values) -> pa.Array:
    """Days and microseconds may be given as numbers: not all of them have a Python object."""
    if isinstance(values[0], int) and pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    return pa.array(values, kind)


@pytest.mark.parametrize("case", CASES)
def test_bounds(case):
    """Over all parts, in which a column may be without a value."""
    kind, values, bounds = CASES[case]
    made = FileStatistics(["c"])
    column = column_of(kind, values)
    for part in (column, pa.array([None], kind), column.slice(0, 1)):
        made.add(pa.table({"c": part}))
    told = json.loads(made.text())
    least, most = ({}, {}) if bounds is None else ({"c": bounds[0]}, {"c": bounds[1]})
    expected = (len(values) + 2, least, most)
    assert (told["numRecords"], told["minValues"], told["maxValues"]) == expected
    assert told["nullCount"] == {"c": values.count(None) + 1 + (values[0] is None)}


def test_characters_are_not_escaped():
    """Of escaped ones beyond 16 bits delta-rs loses a bit, and skips files wrongly."""
    made = FileStatistics(["c"])
    made.add(pa.table({"c": ["\U00020000"]}))
    assert made.text().count("\U00020000") == 2


def test_of_which_columns():
    """Not of those that hold several values, nor of later ones than Spark."""
    fields = [("a", pa.list_(pa.int32())), *((f"c{i}", pa.int32()) for i in range(40))]
    assert bounded_columns(pa.schema(fields)) == [f"c{i}" for i in range(31)]

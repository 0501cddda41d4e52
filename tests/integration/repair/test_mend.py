"""A target is compared with the rows that are expected: of its keys, or of all keys."""

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from waldelta.errors import NeedsSync
from waldelta.lake import Lake, driver_limits
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.postgres import PgType, TableId
from waldelta.snapshot.read_table import TableCopy
from waldelta.stages.repair.mend.mend import ExpectedRows, differences
from waldelta.types.type_map import target_type

TYPES = {"b0": (25, "text"), "held": (701, "double precision")}
# By key: what the source has, what the target has, and what becomes of it.
ROWS = {
    "equal": ((float("nan"), None), (float("nan"), None), None),
    "null": ((None, None), (None, None), None),
    "zero": ((-0.0, None), (0.0, None), "update"),
    "raw": ((None, {"held": "1e999"}), (None, {"held": "2e999"}), "update"),
    "no raw": ((1.0, None), (1.0, {}), None),
    "missing": ((1.0, None), None, "insert"),
    "extra": (None, (1.0, None), "delete"),
}


def expected_rows(lake, *, buckets=1) -> tuple[ExpectedRows, int]:
    types = {name: target_type(PgType(oid, -1, kind)) for name, (oid, kind) in TYPES.items()}
    copy = TableCopy(TableId("s", "t"), tuple(types.items()), None, "", {}, 7, ("b0",))
    expected = ExpectedRows(Lake(lake), f"{lake}/staged", copy, ("b0",), buckets, is_whole=True)
    given = [(key, *row) for key, (row, *_) in ROWS.items() if row is not None]
    rows = [
        {"b0": key, "held": held, LSN: 7, RAW: list((raw or {}).items()) if raw else None}
        for key, held, raw in given
    ]
    batch = pa.RecordBatch.from_pylist(rows, copy.schema)
    for number in range(2):
        expected.write(number, [batch.slice(number * 3, 3)])
    expected.write(2, [])
    return expected, len(rows)


def target_of(lake, extra=()) -> None:
    held = [(key, *row) for key, (_, row, _) in ROWS.items() if row is not None]
    fields = [("b0", pa.string()), ("held", pa.float64()), (LSN, pa.int64())]
    fields += [(COMMIT_TS, pa.timestamp("us", "UTC")), (RAW, pa.map_(pa.string(), pa.string()))]
    rows = [
        {"b0": key, "held": value, LSN: 1, RAW: None if raw is None else list(raw.items())}
        for key, value, raw in [*held, *extra]
    ]
    uri = Lake(lake).target("s.t").uri
    write_deltalake(uri, pa.Table.from_pylist(rows, pa.schema(fields)))


def found(net) -> dict[str, str]:
    return dict(zip(net.keys["b0"].to_pylist(), net.keys["action"].to_pylist(), strict=True))


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize(
    "reader",
    ["arrow", "query",
     pytest.param("spark", marks=pytest.mark.nightly("another reader of the target"))],
)  # fmt: skip
def test_what_differs(runner, lake, reader, buckets, monkeypatch):
    """However the target is read, and into however many buckets both sides are divided."""
    target_of(lake)
    expected, count = expected_rows(lake, buckets=buckets)
    target = Lake(lake).target("s.t")
    if reader == "spark":  # Which reads what is too much for a query in this process.
        monkeypatch.setattr(driver_limits, "MOST_DRIVER_ROWS", 0)
    live = None if reader == "arrow" else f"select b0, held, {RAW} from {{rows}}"
    net = differences(runner, expected, count, target, live)
    assert found(net) == {key: action for key, (*_, action) in ROWS.items() if action}


@pytest.mark.parametrize("extra", [[("twice", 1.0, None)] * 2, [("equal", 1.0, None)]])
def test_a_key_twice_needs_a_copy(runner, lake, extra):
    target_of(lake, extra)
    expected, count = expected_rows(lake)
    with pytest.raises(NeedsSync, match="rows with the same key"):
        differences(runner, expected, count, Lake(lake).target("s.t"))

"""A target is compared with the rows that are expected: of its keys, or of all keys."""

from __future__ import annotations

import pytest

from waldelta.changes.decode.collapse import EventShape
from waldelta.metadata_columns import RAW
from waldelta.postgres import PgType
from waldelta.stages.repair.mend.mend import ExpectedRows, differences
from waldelta.types.type_map import target_type

pytestmark = pytest.mark.spark

COLUMNS = [
    ("b0", target_type(PgType(25, -1, "text"))),
    ("held", target_type(PgType(701, -1, "double precision"))),
]
STAGED = "action string, b0 string, c0 string, c1 double, raw map<string, string>"
EXPECTED = [
    ("upsert", "equal", "equal", float("nan"), None),
    ("upsert", "other value", "other value", -0.0, None),
    ("upsert", "raw elsewhere", "raw elsewhere", None, {"held": "1e999"}),
    ("upsert", "missing", "missing", 1.0, None),
    ("upsert", "twice", "twice", 1.0, None),
    ("purge", "gone", None, None, None),
    ("purge", "invented", None, None, None),
]
HELD = [
    ("equal", float("nan"), {}),
    ("other value", 0.0, None),
    ("raw elsewhere", None, {"held": "2e999"}),
    ("twice", 1.0, None),
    ("twice", 1.0, None),
    ("invented", 1.0, None),
    ("extra", 1.0, None),
]
OF_KEYS = {
    ("update", "other value"),
    ("update", "raw elsewhere"),
    ("insert", "missing"),
    ("twice", "twice"),
    ("delete", "invented"),
}


@pytest.mark.parametrize("is_whole", [False, True], ids=["keys", "all"])
def test_what_differs(runner, is_whole):
    """Columns of the target that are called as ours is don't matter."""
    target = runner.spark().createDataFrame(
        HELD, f"b0 string, held double, {RAW} map<string, string>"
    )
    rows = runner.spark().createDataFrame(EXPECTED, STAGED)
    wanted = ExpectedRows(rows, COLUMNS, EventShape(2, (0,)), True, is_whole)
    found = differences(wanted, target)
    assert found.columns == rows.columns
    changes = [(row["action"], row["b0"]) for row in found.collect()]
    assert set(changes) == OF_KEYS | ({("delete", "extra")} if is_whole else set())
    # Both rows of a key that is there twice are named.
    assert len(changes) == len(set(changes)) + 1

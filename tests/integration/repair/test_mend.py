"""A target is compared with the rows that are expected: of its keys, or of all keys."""

from __future__ import annotations

import pytest

from waldelta.changes.decode.collapse import EventShape
from waldelta.metadata_columns import LSN, RAW
from waldelta.postgres import PgType
from waldelta.stages.repair.mend.mend import ExpectedRows, differences
from waldelta.types.type_map import target_type

pytestmark = pytest.mark.spark

COLUMNS = [
    ("b0", target_type(PgType(25, -1, "text"))),
    ("held", target_type(PgType(701, -1, "double precision"))),
]
# The key is the first column; the second one's value isn't known where u1 is true.
STAGED = (
    "action string, b0 string, c0 string, c1 double, u1 boolean, lsn bigint,"
    " raw map<string, string>"
)
EXPECTED = [
    ("upsert", "equal", "equal", float("nan"), False, 1, None),
    ("upsert", "other value", "other value", -0.0, False, 1, None),
    ("upsert", "other position", "other position", 1.0, False, 1, None),
    ("upsert", "raw elsewhere", "raw elsewhere", None, False, 1, {"held": "1e999"}),
    ("update", "unknown value", "unknown value", None, True, 1, None),
    ("update", "lost", "lost", 1.0, False, 1, None),
    ("upsert", "missing", "missing", 1.0, False, 1, None),
    ("upsert", "twice", "twice", 1.0, False, 1, None),
    ("purge", "gone", None, None, False, 1, None),
    ("purge", "invented", None, None, False, 1, None),
]
HELD = [
    ("equal", float("nan"), 1, None),
    ("other value", 0.0, 1, None),
    ("other position", 1.0, 2, None),
    ("raw elsewhere", None, 1, {"held": "2e999"}),
    ("unknown value", 5.0, 1, None),
    ("twice", 1.0, 1, None),
    ("twice", 1.0, 1, None),
    ("invented", 1.0, 1, None),
    ("extra", 1.0, 1, None),
    ("extra, but kept", 2.0, 1, None),
    ("also twice, but kept", 2.0, 1, None),
    ("also twice, but kept", 2.0, 1, None),
]
OF_KEYS = {
    ("update", "other value"),
    ("update", "other position"),
    ("update", "raw elsewhere"),
    ("skip", "lost"),
    ("upsert", "missing"),
    ("twice", "twice"),
    ("delete", "invented"),
}
MISSING = "case s.action when 'update' then 'skip' else 'upsert' end"


@pytest.mark.parametrize(
    "extra, expected",
    [(None, OF_KEYS), ("t.t1 = 1", OF_KEYS | {("delete", "extra")})],
    ids=["keys", "all"],
)
def test_what_differs(runner, extra, expected):
    """Columns of the target that are called as ours is don't matter."""
    shape = EventShape(2, (0,), (1,))
    target = runner.spark().createDataFrame(
        HELD, f"b0 string, held double, {LSN} bigint, {RAW} map<string, string>"
    )
    rows = runner.spark().createDataFrame(EXPECTED, STAGED)
    wanted = ExpectedRows(rows, COLUMNS, shape, (LSN, RAW), MISSING, extra)
    found = differences(wanted, target)
    assert found.columns == rows.columns
    changes = [(row["action"], row["b0"]) for row in found.collect()]
    assert set(changes) == expected
    # Both rows of a key that is there twice are named.
    assert len(changes) == len(expected) + 1

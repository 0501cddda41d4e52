"""When a snapshot is compared with a target row by row, and when only a whole copy is exact."""

from datetime import UTC, datetime

import pytest

from waldelta.lake.ledger import TableState, TargetCut
from waldelta.stages.sync._write import Former, RowDiff, obstacle

COPIED = Former(
    TableState(
        datetime(2026, 1, 1, tzinfo=UTC), "r", "public.t", 1, "synced", key_columns=["a", "b"]
    )
)
TYPES = {"a": "int", "b": "int", "v": "string"}


@pytest.mark.parametrize(
    "former, key, held, expected",
    [
        (COPIED, ("a", "b"), TYPES, None),
        (COPIED, ("b", "a"), dict(reversed(TYPES.items())), None),
        (Former(None), ("a", "b"), TYPES, "it was never copied completely"),
        (COPIED, (), TYPES, "it has no key"),
        (COPIED, ("a",), TYPES, "its key has changed since it was copied"),
        (COPIED, ("a", "b"), {**TYPES, "b": "bigint"},
         "its columns, or their types, differ from its target's"),
        (COPIED, ("a", "b"), {"a": "int", "b": "int"},
         "its columns, or their types, differ from its target's"),
        (COPIED, ("a", "b"), {**TYPES, "w": "int"},
         "its columns, or their types, differ from its target's"),
    ],
)  # fmt: skip
def test_obstacle(former, key, held, expected):
    assert obstacle(former, key, held, TYPES) == expected


def test_counts():
    cut = TargetCut("public.t", 1, version=7, inserted=1, updated=2, deleted=4)
    assert RowDiff(cut, unchanged=8).compared == 11

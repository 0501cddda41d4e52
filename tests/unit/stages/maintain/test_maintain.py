"""Whether maintenance sorts a target again."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from waldelta.changes.merge.statements import MERGED_INSERTS, MERGED_UPDATES
from waldelta.stages.maintain.maintain import _lacks_order


@pytest.mark.parametrize(
    ("columns", "parameters", "lacks"),
    [
        (["place"], {"zOrderBy": '["place"]', "predicate": "[]"}, False),
        (["a.b", "place"], {"zOrderBy": '["`a.b`","place"]', "predicate": "[]"}, False),
        (["place"], {"zOrderBy": '["place"]', "predicate": """["('day > 1)"]"""}, True),
        (["place"], {"zOrderBy": '["place"]'}, True),
        (["place"], {"zOrderBy": '["day"]'}, True),
        (["place"], {"zOrderBy": "[]"}, True),
        (["place"], {"zOrderBy": "no list"}, True),
        (["place"], {"zOrderBy": ["place"]}, True),
        (["place"], "text", True),
        (["place"], None, True),
        (["place"], {"clusterBy": '["place"]', "isFull": True, "predicate": "[]"}, False),
        (["place"], {"clusterBy": '["place"]', "isFull": "true", "predicate": "[]"}, False),
        (["place"], {"clusterBy": '["day"]', "isFull": True, "predicate": "[]"}, True),
        (
            ["place"],
            {"clusterBy": '["place"]', "isFull": False, "zOrderBy": "[]", "predicate": "[]"},
            True,
        ),
    ],
    ids=str,
)
def test_rows_are_sorted_once(columns, parameters, lacks):
    """By Spark's name of a column; what another writer's commit has of it ends no maintenance."""
    commit = {"version": 3, "operationParameters": parameters, "waldelta": {}}
    sizes = pa.table({"size_bytes": [8 << 20] * 4})
    table = SimpleNamespace(
        files=sizes,
        table_files=[],
        commits=lambda _: iter([{"version": 4, "waldelta": {}}, commit]),
        files_since=lambda _: sizes.slice(0, 0),
    )
    assert _lacks_order(table, columns) is lacks


def merge(inserts, updates):
    counts = {MERGED_INSERTS: inserts, MERGED_UPDATES: updates}
    return {"waldelta": {"counts": counts}, "operation": "WRITE"}


COMPACTION = {"waldelta": {"compaction": "c"}}


@pytest.mark.parametrize(
    ("since", "lacks"),
    [
        ([], False),
        ([merge(40, 59)], False),
        ([merge(40, 60)], True),
        ([merge(30, 30), COMPACTION, merge(20, 20)], True),
        ([COMPACTION, {"waldelta": {}, "operation": "VACUUM END"}, merge(0, 99)], False),
        ([merge(0, 1), {"waldelta": {}, "operation": "MERGE"}], True),
    ],
    ids=["nothing", "few rows", "a tenth", "a tenth by two", "few and others", "by Spark"],
)
def test_rows_are_sorted_again_once_a_tenth_is_new(since, lacks):
    """Of 1,000 rows, whose files are all new; a commit without counts stands for its bytes."""
    sort = {"version": 1, "waldelta": {}, "operationParameters": {"zOrderBy": '["place"]'}}
    sort["operationParameters"]["predicate"] = "[]"
    sizes = pa.table({"size_bytes": [8 << 20] * 4})
    table = SimpleNamespace(
        files=sizes,
        table_files=[SimpleNamespace(rows=250)] * 4,
        commits=lambda _: iter([*since, sort]),
        files_since=lambda _: sizes,
    )
    assert _lacks_order(table, ["place"]) is lacks

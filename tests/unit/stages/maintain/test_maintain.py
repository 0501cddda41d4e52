"""Whether maintenance sorts a target again."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

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
    commit = {"version": 3, "operationParameters": parameters}
    sizes = pa.table({"size_bytes": [8 << 20] * 4})
    table = SimpleNamespace(
        files=sizes,
        commits=lambda _: iter([{"version": 4}, commit]),
        files_since=lambda _: sizes.slice(0, 0),
    )
    assert _lacks_order(table, columns) is lacks

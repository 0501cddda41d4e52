"""Whether maintenance sorts a target again."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from waldelta.lake.layout import HeldFile
from waldelta.stages.maintain.maintain import _lacks_order

FILES = [HeldFile(f"{number}.parquet", 8 << 20, 250_000) for number in range(4)]


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
        ([], None, False),
    ],
    ids=str,
)
def test_rows_are_sorted_once(columns, parameters, lacks):
    """By Spark's name of a column; what another writer's commit has of it ends no maintenance."""
    commit = {"version": 3, "operationParameters": parameters}
    sizes = pa.table({"size_bytes": [file.bytes for file in FILES]})
    table = SimpleNamespace(
        files=sizes,
        held_files=FILES,
        layout=SimpleNamespace(file_bytes=None),
        commits=lambda _: iter([{"version": 4}, commit]),
        files_since=lambda _: sizes.slice(0, 0),
    )
    assert _lacks_order(table, columns) is lacks

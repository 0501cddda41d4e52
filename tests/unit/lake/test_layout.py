"""How a layout divides rows into partitions, and what it can't divide."""

import pyarrow as pa
import pytest

from waldelta.errors import EmptyPartitionValue
from waldelta.lake.layout import Layout


def divided(by: list[str], **columns):
    rows = pa.table(columns)
    return [(part, list(places)) for part, places in Layout(rows.schema, by).divide(rows)]


@pytest.mark.parametrize(
    "by, columns, parts",
    [
        ([], {"p": ["a", "a"]}, [({}, [0, 1])]),
        (["p"], {"p": pa.array([], pa.string())}, []),
        (["p"], {"p": ["b", None, "b", "a"]},
         [({"p": "b"}, [0, 2]), ({"p": None}, [1]), ({"p": "a"}, [3])]),
        (["p", "q"], {"p": [1, 1, 2], "q": [True, None, True]},
         [({"p": "1", "q": "true"}, [0]), ({"p": "1", "q": None}, [1]),
          ({"p": "2", "q": "true"}, [2])]),
    ],
    ids=["no column", "no row", "one column", "two columns"],
)  # fmt: skip
def test_rows_are_divided_by_their_values(by, columns, parts):
    assert divided(by, **columns) == parts


def test_an_empty_text_is_named_by_its_column():
    with pytest.raises(EmptyPartitionValue, match=r"^place has an empty text"):
        divided(["day", "place"], day=["a", None], place=["a", ""])

"""A target's filter in the ledger."""

import pytest

from waldelta.errors import StateError
from waldelta.pipeline.targets.target_sources import from_text, to_text
from waldelta.row_filter import Collation, RowFilter


def test_a_filter_comes_back_as_it_was():
    row_filter = RowFilter(
        "c > 'x'", "(c > 'x'::text)", ("c",), {"c": Collation.CODE_POINT}, Collation.DETERMINISTIC,
        True,
    )  # fmt: skip
    assert from_text(to_text(row_filter)) == row_filter
    assert to_text(None) is None


NO_MAPPING = '{"text": "a", "analysed": "a", "columns": [], "collations": []}'


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"text": 1}', "null", NO_MAPPING])
def test_what_is_no_filter_is_refused(text):
    with pytest.raises(StateError, match="sync the table again"):
        from_text(text)

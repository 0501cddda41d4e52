"""Column names that Delta can't keep apart from others, or has itself."""

from __future__ import annotations

import pytest

from waldelta.target_modes.column_names import clashes


@pytest.mark.parametrize(
    ("names", "other"),
    [
        (["a", "b"], None),
        (["a", "A"], "column 'a'"),
        (["_wd_LSN"], "a column of waldelta's own"),
        (["_metadata"], "a column of Delta's own"),
        (["_ROW_dropped_"], "a column of Delta's own"),
        (["_commit_version"], "a column of Delta's own"),
        (["metadata", "_metadata_", "row_dropped", "_commit"], None),
    ],
)
def test_clashes(names, other):
    found = list(clashes(names, metadata_columns=True))
    assert [f"keep column {names[-1]!r} and {other} apart" in text for text in found] == (
        [] if other is None else [True]
    )


def test_delta_has_its_names_without_metadata_columns_of_ours():
    assert list(clashes(["_wd_lsn"], metadata_columns=False)) == []
    assert len(list(clashes(["_target_row_present_"], metadata_columns=False))) == 1

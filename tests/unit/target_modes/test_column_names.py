"""Column names that Delta can't keep apart from others, or has itself."""

import pytest

from waldelta.target_modes.column_names import clashes


@pytest.mark.parametrize(
    ("names", "other"),
    [
        (["a", "b"], None),
        (["a", "A"], "column 'a'"),
        (["_wd_LSN"], "a column of waldelta's own"),
        *(
            ([name], "a column of Delta's own")
            for name in (
                "_ROW_dropped_",
                "_source_row_present_",
                "_target_row_present_",
                "_Metadata",
                "_tmp_metadata_row_index",
                "__delta_internal_is_row_deleted",
                "_change_type",
                "_commit_version",
                "_commit_timestamp",
                "__IS_cdc",
            )
        ),
        (["_row_id_", "_file_name_", "_condition_", "_metadata_", "row_dropped", "_commit"], None),
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

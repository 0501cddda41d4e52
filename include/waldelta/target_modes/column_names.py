"""Column names of a target that Delta can't distinguish: it ignores case, and has names of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from waldelta.metadata_columns import OURS
from waldelta.target_modes.modes import mode_column_names

# Columns that Delta's commands add to a table's own. Tried on Delta 4.4, in small and large
# letters: a MERGE fails for its marks of rows, on every table; MERGE, UPDATE and DELETE for the
# columns by which Spark finds deleted rows, on a table with deletion vectors. With one of the last
# four, a table can't have a change data feed, or its commits fail then. _row_id_, _file_name_,
# _condition_ and __delta_internal_row_index, of Delta's code, are harmless.
_DELTAS = (
    "_row_dropped_",
    "_source_row_present_",
    "_target_row_present_",
    "_metadata",
    "_tmp_metadata_row_index",
    "__delta_internal_is_row_deleted",
    "_change_type",
    "_commit_version",
    "_commit_timestamp",
    "__is_cdc",
)


def clashes(names: Iterable[str], *, metadata_columns: bool) -> Iterator[str]:
    """Yields each column whose name clashes with another one, with that one and the remedy.

    >>> print(*clashes(["a", "A"], metadata_columns=True))  # doctest: +NORMALIZE_WHITESPACE
    Delta ignores case and can't keep column 'A' and column 'a' apart: give it another name in the
    lake (target.tables, columns), or leave it out by a column list
    """
    own = (*OURS, *mode_column_names()) if metadata_columns else ()
    seen = dict.fromkeys(_DELTAS, "a column of Delta's own")
    seen |= dict.fromkeys(own, "a column of waldelta's own")
    for name in names:
        if other := seen.get(name.lower()):
            yield (
                f"Delta ignores case and can't keep column {name!r} and {other} apart: give it"
                " another name in the lake (target.tables, columns), or leave it out by a column"
                " list"
            )
        seen[name.lower()] = f"column {name!r}"

"""Column names of a target that Delta can't distinguish: it ignores case, and has names of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from waldelta.metadata_columns import OURS
from waldelta.target_modes.modes import mode_column_names

# Columns that Delta's commands add to a table's own: MERGE its marks of rows, a change feed what
# happened to a row. Commands on a table with deletion vectors read Spark's _metadata. Tried on
# Delta 4.4.
_DELTAS = (
    "_metadata",
    "_row_dropped_",
    "_source_row_present_",
    "_target_row_present_",
    "_change_type",
    "_commit_version",
    "_commit_timestamp",
)


def clashes(names: Iterable[str], *, metadata_columns: bool) -> Iterator[str]:
    """Yields each column whose name clashes with another one, with that one and the remedy.

    >>> print(*clashes(["a", "A"], metadata_columns=True))  # doctest: +NORMALIZE_WHITESPACE
    Delta ignores case and can't keep column 'A' and column 'a' apart: leave it out by a column
    list, or rename it
    """
    own = (*OURS, *mode_column_names()) if metadata_columns else ()
    seen = dict.fromkeys(_DELTAS, "a column of Delta's own")
    seen |= dict.fromkeys(own, "a column of waldelta's own")
    for name in names:
        if other := seen.get(name.lower()):
            yield (
                f"Delta ignores case and can't keep column {name!r} and {other} apart: leave it out"
                " by a column list, or rename it"
            )
        seen[name.lower()] = f"column {name!r}"

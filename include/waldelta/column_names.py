"""Column names that Delta can't keep apart: it ignores case, and some names are ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# Position and time of the commit a row comes from, and PostgreSQL's text of values that a type can't hold.
OURS = LSN, COMMIT_TS, RAW = ("_wd_lsn", "_wd_commit_ts", "_wd_raw")
# Of targets that gather the leaves of a partitioned table: the oid of the row's leaf, PostgreSQL's tableoid.
RELID = "_wd_relid"
# And its number among a table's columns (TableOidAttributeNumber).
RELID_ATTNUM = -6


def clashes(names: Iterable[str], *, metadata_columns: bool) -> Iterator[str]:
    """Each column that can't stand beside another one, with that one and what to do.

    >>> list(clashes(["a", "A"], metadata_columns=True))
    ["Delta ignores case and can't keep column 'A' and column 'a' apart: leave it out by a column list, or rename it"]
    """
    seen = dict.fromkeys(OURS, "a column of waldelta's own") if metadata_columns else {}
    for name in names:
        if other := seen.get(name.lower()):
            yield (
                f"Delta ignores case and can't keep column {name!r} and {other} apart: leave it out by a column list, or "
                "rename it"
            )
        seen[name.lower()] = f"column {name!r}"

"""Metadata columns of targets, and column names that Delta can't distinguish: it ignores case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# Prefix of every metadata column.
PREFIX = "_wd_"
# Position and time of the commit a row comes from, and PostgreSQL's text of values that a type
# can't store.
OURS = LSN, COMMIT_TS, RAW = ("_wd_lsn", "_wd_commit_ts", "_wd_raw")
# Mode soft_delete: whether and when the source deleted the row.
DELETED, DELETED_AT = "_wd_deleted", "_wd_deleted_at"
# Mode history: from when and until when the row was valid, by commit time and by commit position;
# open rows have no end.
VALID_FROM, VALID_TO = "_wd_valid_from", "_wd_valid_to"
VALID_FROM_LSN, VALID_TO_LSN = "_wd_valid_from_lsn", "_wd_valid_to_lsn"
# Mode changelog: the operation, its place in the stream, its transaction, the key before it, and
# the columns whose values are unknown.
OP, SEQ, XID, BEFORE, UNCHANGED = "_wd_op", "_wd_seq", "_wd_xid", "_wd_before", "_wd_unchanged"
OF_MODES = (
    DELETED,
    DELETED_AT,
    VALID_FROM,
    VALID_TO,
    VALID_FROM_LSN,
    VALID_TO_LSN,
    OP,
    SEQ,
    XID,
    BEFORE,
    UNCHANGED,
)
# Targets of merged partitions: the oid of the row's leaf partition, PostgreSQL's tableoid.
RELID = "_wd_relid"
# Its number among a table's columns (TableOidAttributeNumber).
RELID_ATTNUM = -6


def clashes(names: Iterable[str], *, metadata_columns: bool) -> Iterator[str]:
    """Yields each column whose name clashes with another one, with that one and the remedy.

    >>> print(*clashes(["a", "A"], metadata_columns=True))  # doctest: +NORMALIZE_WHITESPACE
    Delta ignores case and can't keep column 'A' and column 'a' apart: leave it out by a column
    list, or rename it
    """
    seen = (
        dict.fromkeys((*OURS, *OF_MODES), "a column of waldelta's own") if metadata_columns else {}
    )
    for name in names:
        if other := seen.get(name.lower()):
            yield (
                f"Delta ignores case and can't keep column {name!r} and {other} apart: leave it out"
                " by a column list, or rename it"
            )
        seen[name.lower()] = f"column {name!r}"

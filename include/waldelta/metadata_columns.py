"""Metadata columns of targets; those of a mode are in its file."""

from __future__ import annotations

# Prefix of every metadata column.
PREFIX = "_wd_"
# Position and time of the commit a row comes from, and PostgreSQL's text of values that a type
# can't store.
OURS = LSN, COMMIT_TS, RAW = ("_wd_lsn", "_wd_commit_ts", "_wd_raw")
METADATA_TYPES = {LSN: "bigint", COMMIT_TS: "timestamp", RAW: "map<string,string>"}
# Targets of merged partitions: the oid of the row's leaf partition, PostgreSQL's tableoid.
RELID = "_wd_relid"
# Its number among a table's columns (TableOidAttributeNumber).
RELID_ATTNUM = -6

"""Names of the counts of staged net changes, in commits and run results."""

# New and updated rows with a value that its column's type can't hold: the raw value is in _wd_raw.
RAW_ROWS = "verbatim"
# Rows that arrived without all of their values: those that were completed from the source, and
# those that couldn't be.
COMPLETED_ROWS, QUARANTINED_ROWS = "reread", "quarantined"

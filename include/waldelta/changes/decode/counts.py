"""Names of the counts that staging takes of net changes, as commits and run results carry them."""

# New and updated rows with a value that its column's type can't hold: it stands raw in _wd_raw.
RAW_ROWS = "verbatim"
# Rows that came without all of their values: those completed from the source, and those that
# couldn't be.
COMPLETED_ROWS, QUARANTINED_ROWS = "reread", "quarantined"

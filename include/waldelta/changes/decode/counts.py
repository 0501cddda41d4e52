"""Names of the counts that staging takes of net changes, as commits and run results carry them."""

from __future__ import annotations

# And of rows that came without all of their values: those completed from the source, and those that
# couldn't be.
REREAD_ROWS, QUARANTINED_ROWS = "reread", "quarantined"
# New and updated rows with a value that its column's type can't hold: it stands verbatim in
# _wd_raw.
RAW_ROWS = "verbatim"

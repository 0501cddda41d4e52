"""Decides which targets are small enough to be read, merged and checked in the driver with Arrow.

For them, Spark's planning and compiling takes longer than the work itself. ``files`` is what
Delta's log has of a target's files (``lake.files_of``).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.storage import row_count

# Above this, a Spark job that writes or scans only the relevant files is cheaper.
MOST_SMALL_ROWS = 100_000
MOST_FILE_BYTES = 16 << 20


def is_small(files: pa.Table) -> bool:
    """Return whether a target with these files is read in the driver; False without row counts."""
    return is_at_most(files, MOST_SMALL_ROWS, MOST_FILE_BYTES)


def is_at_most(files: pa.Table, most_rows: int, most_bytes: int) -> bool:
    """Return whether these files have at most this many rows and bytes.

    False where their rows aren't counted.
    """
    rows = row_count(files)
    return (
        rows is not None
        and rows <= most_rows
        and (pc.sum(files["size_bytes"]).as_py() or 0) <= most_bytes
    )

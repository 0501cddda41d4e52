"""Small targets: read, merged and checked here by Arrow, as Spark plans and compiles for longer
than the work itself takes.

``files`` is what Delta's log says of a target's files (``lake.files_of``).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.storage import row_count

# Beyond, a job of Spark's that writes, or scans, only the files that matter is the cheaper one.
MOST_SMALL_ROWS = 100_000
MOST_FILE_BYTES = 16 << 20


def is_small(files: pa.Table) -> bool:
    """Whether a target with these files is read here; one whose rows aren't counted isn't."""
    return is_at_most(files, MOST_SMALL_ROWS, MOST_FILE_BYTES)


def is_at_most(files: pa.Table, most_rows: int, most_bytes: int) -> bool:
    """Whether these files have so many rows and bytes at most; False where their rows aren't
    counted.
    """
    rows = row_count(files)
    return (
        rows is not None
        and rows <= most_rows
        and (pc.sum(files["size_bytes"]).as_py() or 0) <= most_bytes
    )

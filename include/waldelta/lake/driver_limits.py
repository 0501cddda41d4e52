"""Limits up to which this process reads, stages, merges and checks with Arrow itself.

For less than that, Spark's planning and compiling takes longer than the work itself. Above, a job
that reads only what it needs, in several tasks, is cheaper.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.storage import row_count

MOST_DRIVER_ROWS = 100_000
# In memory. Small compressed files may expand to much more, so bytes are counted while reading.
MOST_DRIVER_BYTES = 64 << 20
# The most bytes of a target's files, as stored.
MOST_FILE_BYTES = 16 << 20
# The most bytes of row messages, which are decoded in memory.
MOST_DRIVER_MESSAGE_BYTES = 32 << 20


def is_at_most(files: pa.Table, most_rows: int, most_bytes: int) -> bool:
    """Returns whether these files have at most this many rows and bytes.

    False where their rows aren't counted.
    """
    rows = row_count(files)
    return (
        rows is not None
        and rows <= most_rows
        and (pc.sum(files["size_bytes"]).as_py() or 0) <= most_bytes
    )

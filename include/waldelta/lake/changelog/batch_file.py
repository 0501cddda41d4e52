"""Writes a batch's file of the change log, one record batch at a time, and commits it.

The process that reads the slot writes the file.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import tenacity
from deltalake.exceptions import CommitFailedError
from pyarrow.fs import FileSelector

from waldelta.arrow import grouped
from waldelta.errors import LateWriter
from waldelta.lake.data_file import DataFile
from waldelta.lake.delta_target import CHECKPOINT_INTERVAL, DeltaTarget, Tag
from waldelta.lake.storage import remove_empty_log
from waldelta.lake.write_errors import named_write_errors

# The columns by which files are pruned, and from which the landed end is read.
STATISTICS = ("relation_id", "xid8", "end_lsn")
# With small row groups, both cores can decode one batch, and readers of the timeline skip groups
# without timeline messages.
BATCH_ROW_GROUP_BYTES = 16 << 20
# Values of these columns repeat, or are near each other. The messages themselves aren't worth a
# dictionary or statistics.
_RECURRING = [
    "kind",
    "relation_id",
    "xid8",
    "streamed_xid",
    "commit_lsn",
    "end_lsn",
    "commit_ts",
    "timeline",
    "moves",
]
_LAYOUT = {
    "compression": "snappy",
    "use_dictionary": _RECURRING,
    "write_statistics": _RECURRING,
}
_KEPT = "; nothing was consumed from the slot"
_PROPERTIES = {
    "delta.dataSkippingStatsColumns": ",".join(STATISTICS),
    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
}
_ATTEMPTS = 10
_NEWEST = 20


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A file that is written but not committed: its path in the table, its bytes and its Delta
    statistics.
    """

    path: str
    size: int
    stats: str


class BatchFiles:
    """Writes the files of the change log at ``place``, and commits them for a slot incarnation."""

    place: DeltaTarget
    app_id: str

    def create(self, schema: pa.Schema) -> None:
        """Create the empty log unless it exists, as Spark's CREATE TABLE would.

        Raises TargetNotWritable.
        """
        place = self.place
        if place.exists:
            return
        remove_empty_log(place.uri)
        with named_write_errors(place.uri, besides=_KEPT):
            files = place.files.get_file_info(FileSelector("", allow_not_found=True))
            # Another run may have created the log in the meantime, which is just as good.
            if any(file.base_name != "_delta_log" for file in files) and not place.exists:
                raise FileExistsError(errno.EEXIST, "it has files and no Delta log")
            place.create(
                pa.schema([("batch", pa.int64()), *schema]),
                mode="ignore",
                partition_by=["batch"],
                configuration=_PROPERTIES,
                raise_if_key_not_exists=False,
            )
            place.sync_commit(0)

    def write(
        self, batch: int, parts: Iterable[pa.RecordBatch], schema: pa.Schema
    ) -> BatchFile | None:
        """Write record batches as the file of a batch, which counts once add() has committed it.

        Returns None, and writes no file, when there are none. This doesn't open the Delta table,
        and memory holds one row group. Raises TargetNotWritable when the file can't be written, and
        whatever ``parts`` raises.
        """
        prefix = f"batch={batch:d}/part-"
        kinds = (OSError, pa.ArrowException)
        named_errors = partial(named_write_errors, self.place.uri, "Spark's tasks", _KEPT, kinds)
        with DataFile(self.place.files, schema, prefix, _LAYOUT, STATISTICS) as file:
            for group in grouped(parts, BATCH_ROW_GROUP_BYTES):
                with named_errors():
                    file.write(group)
                del group  # It would stay in memory while the next one is gathered.
            with named_errors():
                written = file.close()
        return BatchFile(**written) if written else None

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(CommitFailedError),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random(0, 0.5),
        reraise=True,
    )
    def add(self, batch: int, file: BatchFile | None, metadata: str) -> None:
        """Commit a batch durably.

        Without a file, only the batch's number is committed, and counts as landed. Each attempt is
        a compare-and-swap on a version without the batch. Raises LateWriter when another run has
        committed it.
        """
        table = self.place.open_known()
        if table.committed(self.app_id) < batch:
            added = [] if file is None else [(file.path, file.size, file.stats)]
            tag = Tag(self.app_id, batch, metadata)
            table.replace_files([], added, tag, {"batch": str(batch)})
            return
        newest = table.commits(_NEWEST)
        own = (entry["version"] for entry in newest if entry.get("userMetadata") == metadata)
        if (version := next(own, None)) is None:
            raise LateWriter(
                f"batch {batch} of the change log was landed by another run: run again"
            )
        table.keep(version)  # Its answer was lost, or the run was killed before this.

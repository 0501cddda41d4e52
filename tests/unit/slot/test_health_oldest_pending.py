"""When the oldest commit was made that a target lacks, by the change log's rows."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import write_deltalake

from tests.unit.changes.decode.test_decode import (
    TS,
    T,
    aborted,
    change_log,
    chunk,
    commit,
    decided,
    plain,
    prepared,
    row,
)
from waldelta.lake import Lake
from waldelta.lake.changelog import ChangeLog, Snapshot
from waldelta.slot.read.peek import TIMELINE_KINDS

# The helpers commit plain transactions at TS, streamed ones a microsecond later, prepared ones two
# later; None: nothing is lacking.
CASES = {
    "a plain one": ([plain(7, row(1))], 0, 0),
    "one that was applied": ([plain(7, row(1)), plain(8)], 1, None),
    "of another table": ([plain(7)], 0, None),
    "a streamed one": ([chunk(7, row(1, 7)) + commit(7)], 0, 1),
    "a streamed one before a plain one":
     ([chunk(7, row(1, 7)) + commit(7) + plain(9, row(2))], 0, 0),
    "a streamed one that was rolled back": ([chunk(7, row(1, 7)) + aborted(7, 7)], 0, None),
    "a prepared one": ([prepared(7, row(1)), decided(7)], 0, 2),
    "one prepared in a batch that was applied": ([prepared(7, row(1)), decided(7)], 1, 2),
    "one that is prepared only": ([prepared(7, row(1))], 0, None),
}  # fmt: skip


def written(folder, *batches):
    """A log of these in a lake."""
    log, landed = ChangeLog(Lake(folder.as_uri()), "slot"), change_log(*batches)
    is_timeline = pc.is_in(landed["kind"], pa.array(TIMELINE_KINDS))
    landed = landed.append_column("timeline", is_timeline).append_column(
        "moves", pa.repeat(False, len(landed))
    )
    write_deltalake(log.uri, landed, partition_by=["batch"])
    return log


@pytest.mark.parametrize(("batches", "applied", "later_by"), CASES.values(), ids=CASES)
def test_the_oldest_commit_that_has_landed(tmp_path, batches, applied, later_by):
    """Of rows that came before their commit it is known by the message that decided them."""
    log = written(tmp_path, *batches)
    found = log.oldest_commit(log.stream(applied, len(batches)), [T], Snapshot(0, 0))
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=TS)
    assert found == (None if later_by is None else at + timedelta(microseconds=later_by))

"""What has landed behind a slot that went back: from the change log's files alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests import pgoutput_encoder as enc
from waldelta.change_log import ChangeLog
from waldelta.lsn import Lsn
from waldelta.peek import LANDING_SCHEMA, _landing_batch
from waldelta.pgoutput.envelope import Envelope
from waldelta.recover import _landed_after

ABORT = [enc.stream_abort(7, 8)]


def transaction(end: int) -> list[bytes]:
    """One with a row."""
    return [enc.begin(end - 1, 0, end), enc.insert(1, ["a"]), enc.commit(end - 1, end, 0)]


@pytest.fixture
def log(tmp_path):
    """An empty change log."""
    made = ChangeLog(tmp_path.as_uri(), "slot")
    empty = pa.schema([("batch", pa.int64()), *LANDING_SCHEMA]).empty_table()
    write_deltalake(made.uri, empty, partition_by=["batch"])
    return made


def land(log, batch, messages):
    lsn, xid = (pa.array([np.array(7, dtype).tobytes()] * len(messages)) for dtype in (">u8", ">u4"))
    part = _landing_batch(
        Envelope(1000, 2), pa.RecordBatch.from_arrays([lsn, xid, enc.messages(*messages)], list("lxd"))
    )
    log.add(batch, log.write(batch, [part], LANDING_SCHEMA), f"{batch}")


@pytest.mark.parametrize(
    "stands, expected",
    [(50, 2), (100, 1), (199, 1), (200, 0)],
    ids=["before all", "at the first", "within", "at the last"],
)
def test_batches_without_a_transactions_end_are_passed_over(log, stands, expected):
    """An open transaction with a savepoint rolled back may have left nothing but a Stream Abort."""
    for batch, messages in enumerate([transaction(100), ABORT, transaction(200), ABORT], 1):
        land(log, batch, messages)
    assert log.landed_end(4) == 0
    assert _landed_after(log, 0, 4, Lsn(stands)).inserts == expected

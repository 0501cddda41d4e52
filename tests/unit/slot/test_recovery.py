"""What has landed behind a slot that went back, and the positions that are certainly saved."""

import json
from dataclasses import asdict
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support import pgoutput_encoder as enc
from tests.unit.lake.ledger.test_ledger import NOON
from waldelta.lake import Lake
from waldelta.lake.changelog import BatchNumbers, ChangeLog
from waldelta.lake.ledger import SlotMove
from waldelta.lsn import Lsn
from waldelta.pgoutput.envelope import Envelope
from waldelta.slot.read.peek import LANDING_SCHEMA, ReadRequest, _add_envelope
from waldelta.slot.recovery import MOVING, landed_behind, written_down

ONE, BOTH = (ReadRequest(names, messages=False, origin="any") for names in (("p",), ("p", "q")))
LARGE = {"max_messages": 1000, "max_bytes": 1000}
OPEN = [enc.stream_start(7), enc.insert(1, ["a"], xid=7), enc.stream_stop()]


def transaction(end: int) -> list[bytes]:
    """One with a row."""
    return [enc.begin(end - 1, 0, end), enc.insert(1, ["a"]), enc.commit(end - 1, end, 0)]


@pytest.fixture
def log(tmp_path):
    """An empty change log."""
    made = ChangeLog(Lake(tmp_path.as_uri()), "slot")
    empty = pa.schema([("batch", pa.int64()), *LANDING_SCHEMA]).empty_table()
    write_deltalake(made.uri, empty, partition_by=["batch"])
    return made


def land(log, batch, rows, **told):
    columns = [
        pa.array([np.array(7, dtype).tobytes()] * len(rows), pa.binary())
        for dtype in (">u8", ">u4")
    ]
    read = pa.RecordBatch.from_arrays([*columns, pa.array(rows, pa.binary())], list("lxd"))
    parts = [_add_envelope(Envelope(1000, 2), read)] if rows else []
    log.add(
        batch,
        log.write(batch, parts, LANDING_SCHEMA),
        json.dumps({"waldelta": {"batch": batch, **told}}),
    )


@pytest.mark.parametrize(
    "stands, expected",
    [(50, 2), (100, 1), (199, 1), (200, 0)],
    ids=["before all", "at the first", "within", "at the last"],
)
def test_batches_without_a_transactions_end_are_passed_over(log, stands, expected):
    """A transaction that is still open may have sent chunks, and nothing else came."""
    for batch, messages in enumerate([transaction(100), OPEN, transaction(200), OPEN], 1):
        land(log, batch, messages)
    assert (log.sizes(3, 4), log.end_lsn(4)) == ({4: 3}, 0)
    (behind,) = landed_behind(log, BatchNumbers(0, 4), Lsn(stands), **LARGE)
    assert (behind.request, behind.transactions.inserts) == (None, expected)


# Each batch: where its last transaction ends (None: empty), by what it was read, from where.
UNTOLD, EDITED = [(100, None, 0)], [(200, ONE, 90), (300, ONE, 190), (400, BOTH, 320)]
PASSED = [(100, BOTH, 0), (None, ONE, 100), (300, BOTH, 200), (None, BOTH, 350)]
# The batches, where the slot stands, and the stretches: by what, from where, how many rows.
BEHIND = {
    "all of them": (UNTOLD + EDITED, 50, [(None, 50, 1), (ONE, 90, 2), (BOTH, 320, 1)]),
    "one request": (UNTOLD + EDITED, 150, [(ONE, 150, 2), (BOTH, 320, 1)]),
    "the last one": (UNTOLD + EDITED, 300, [(ONE, 300, 0), (BOTH, 320, 1)]),
    "nothing but what was passed over": (UNTOLD + EDITED, 400, [(BOTH, 400, 0)]),
    "an empty batch in between": (PASSED, 50, [(BOTH, 50, 1), (ONE, 100, 0), (BOTH, 200, 1)]),
    "an empty batch at the end": (PASSED[:2], 50, [(BOTH, 50, 1), (ONE, 100, 0)]),
    "empty batches in front, or dropped ones": (PASSED[1:], 50, [(BOTH, 200, 1)]),
    "behind all rows": (PASSED, 320, [(BOTH, 320, 0)]),
}


@pytest.mark.parametrize("batches, stands, expected", BEHIND.values(), ids=BEHIND)
def test_by_what_it_was_read(log, batches, stands, expected):
    """Batches of a version that didn't tell come first; maintenance commits to the log as well."""
    for batch, (end, asked, begins) in enumerate(batches, 1):
        rows = transaction(end) if end else []
        land(log, batch, rows, **(asdict(asked) | {"from_lsn": str(Lsn(begins))} if asked else {}))
        DeltaTable(log.uri).alter.set_table_properties({"delta.appendOnly": "false"})
    found = landed_behind(log, BatchNumbers(0, len(batches)), Lsn(stands), **LARGE)
    assert [
        (stretch.request, stretch.begins, stretch.transactions.inserts) for stretch in found
    ] == expected


# How many messages and bytes of WAL one bite may be; of batches of three messages each, those that
# are compared together.
TWO_REQUESTS = [
    (100, ONE, 50),
    (200, ONE, 100),
    (None, ONE, 240),
    (300, ONE, 260),
    (400, BOTH, 300),
]
BITES = {
    "all of a request": ((9, 250), [(50, (1, 4)), (300, (5, 5))]),
    "by messages": ((6, 1000), [(50, (1, 3)), (260, (4, 4)), (300, (5, 5))]),
    "by WAL": ((1000, 190), [(50, (1, 3)), (260, (4, 4)), (300, (5, 5))]),
    "also what was passed over": ((1000, 150), [(50, (1, 2)), (240, (3, 4)), (300, (5, 5))]),
    "each is larger": (
        (1, 1),
        [(50, (1, 1)), (100, (2, 2)), (240, (3, 3)), (260, (4, 4)), (300, (5, 5))],
    ),
}


@pytest.mark.parametrize("most, expected", BITES.values(), ids=BITES)
def test_no_more_is_compared_together_than_one_bite_holds(log, most, expected):
    """What one bite left is one answer of the server, and fits its disk."""
    for batch, (end, asked, begins) in enumerate(TWO_REQUESTS, 1):
        land(
            log, batch, transaction(end) if end else [], **asdict(asked), from_lsn=str(Lsn(begins))
        )
    found = landed_behind(log, BatchNumbers(0, 5), Lsn(50), max_messages=most[0], max_bytes=most[1])
    assert [(stretch.begins, (stretch.first, stretch.last)) for stretch in found] == expected


def move(minutes: int, lsn: int, event: str = "intent") -> SlotMove:
    """One of so many minutes before the last checkpoint began."""
    return SlotMove(NOON - timedelta(minutes=minutes), "r", event, "s", "1", 1, "0/1", lsn)


CREATED = move(9000, 1, "created")


@pytest.mark.parametrize(
    ("moves", "confirmed", "saved"),
    [
        pytest.param([], 0, 0, id="nothing is known"),
        pytest.param([CREATED], 1, 1, id="as it was made"),
        pytest.param([CREATED, move(61, 50)], 50, 50, id="moved before"),
        pytest.param([CREATED, move(59, 50)], 50, 1, id="it may have been about to move"),
        pytest.param([CREATED, move(300, 50), move(-5, 70)], 70, 50, id="moved since, further"),
        pytest.param([CREATED, move(300, 50)], 49, 0, id="it went back"),
        pytest.param([CREATED, move(300, 50), move(-5, 50)], 50, 0, id="it had gone back"),
        pytest.param([CREATED, move(300, 50), move(120, 40)], 50, 50, id="the furthest counts"),
    ],
)
def test_what_a_checkpoint_has_written_down(moves, confirmed, saved):
    assert written_down(moves, Lsn(confirmed), NOON) == Lsn(saved)
    assert timedelta(hours=1) == MOVING

"""Which TRUNCATEs of a range count for a target."""

import pytest

from tests.support import pgoutput_encoder as enc
from tests.support.data.messages import (
    T,
    aborted,
    change_log,
    chunk,
    commit,
    decided,
    plain,
    prepared,
    row,
    stream_of,
)
from waldelta.lake.changelog import Snapshot, last_truncates
from waldelta.lake.ledger import TableState, now

TRUNCATE, BOTH = enc.truncate([T]), enc.truncate([T + 1, T])
STREAMED = enc.truncate([T], xid=7)
# The transactions that the copy doesn't see, the messages of one batch, and the numbers of those
# TRUNCATEs that are the last of a relation.
CASES = {
    "none": ("0:0:", plain(7, row(1)), {}),
    "the last of two": ("0:0:", plain(7, TRUNCATE, row(1), TRUNCATE), {T: 1}),
    "of several relations": ("0:0:", plain(7, BOTH) + plain(8, TRUNCATE), {T: 1, T + 1: 0}),
    "of another relation": ("0:0:", plain(7, enc.truncate([T + 2])), {}),
    "that the copy reflects": ("8:8:", plain(7, TRUNCATE), {}),
    "that the copy reflects in part": ("8:8:", plain(7, BOTH) + plain(8, TRUNCATE), {T: 1}),
    "streamed": ("0:0:", chunk(7, STREAMED) + commit(7), {T: 0}),
    "streamed, after a plain one that was sent later":
     ("0:0:", chunk(7, STREAMED) + plain(9, TRUNCATE) + commit(7), {T: 0}),
    "rolled back": ("0:0:", chunk(7, STREAMED) + aborted(7, 7), {}),
    "prepared": ("0:0:", prepared(9, TRUNCATE), {}),
    "prepared and committed": ("0:0:", prepared(9, TRUNCATE) + decided(9), {T: 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_last_truncate_of_each_relation(case):
    """In commit order, of transactions that have committed and that the copy doesn't reflect."""
    snapshot, messages, expected = CASES[case]
    stream = stream_of(change_log(messages))
    state = TableState(now(), "r", "public.t", 1, "synced", relation_ids=[T, T + 1])
    places = [place for _, place in stream.of_kind("T")]
    found = last_truncates(stream, state, Snapshot.parse(snapshot))
    assert found == {oid: places[number] for oid, number in expected.items()}

"""The envelope of protocol versions 2 to 4: chunks, prepared transactions, decisions."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.support import pgoutput_encoder as enc
from tests.support.seeds import chosen_random, rounds
from tests.unit.pgoutput.test_envelope import AT, TS, add
from waldelta.errors import DecodeError
from waldelta.pgoutput.envelope import ENVELOPE_SCHEMA, Envelope

COLUMNS = [("id", 23, -1, True)]
STREAM = [  # lsn, xid, message
    (10, 7, enc.stream_start(7)),
    (10, 7, enc.origin(5, "o")),
    (10, 7, enc.relation(16400, "public", "t", COLUMNS, xid=7)),
    (10, 7, enc.type_(16500, "public", "mood", xid=7)),
    (11, 7, enc.insert(16400, ["1"], xid=7)),
    (12, 7, enc.update(16400, ["2"], key=["1"], xid=8)),
    (13, 7, enc.truncate([16400], xid=8)),
    (14, 7, enc.message(9, "in", b"x", xid=7)),
    (14, 7, enc.stream_stop()),
    (
        15,
        8,
        enc.message(15, "beat", b"", transactional=False),
    ),  # written in 8, to which it doesn't belong
    (16, 9, enc.begin(100, TS, 9)),
    (16, 9, enc.delete(16400, key=["1"])),
    (110, 9, enc.commit(100, 110, TS)),
    (111, 8, enc.stream_abort(7, 8, 111, TS)),
    (120, 7, enc.stream_start(7, first=False)),
    (120, 7, enc.delete(16400, old=["1"], xid=7)),
    (121, 7, enc.stream_stop()),
    (130, 7, enc.stream_commit(7, 125, 130, TS)),
    (131, 10, enc.begin_prepare(140, 150, TS, 10, "g")),
    (132, 10, enc.insert(16400, ["1"])),
    (150, 10, enc.prepare(140, 150, TS, 10, "g")),
    (160, 10, enc.commit_prepared(155, 160, TS, 10, "g")),
    (170, 11, enc.stream_start(11)),
    (170, 11, enc.stream_stop()),
    (180, 11, enc.stream_prepare(175, 180, TS, 11, "h")),
    (190, 11, enc.rollback_prepared(180, 190, TS - 1, TS, 11, "h")),
]
EXPECTED = [  # kind, relation_id, xid8, streamed_xid, commit_lsn, end_lsn, commit_ts
    ("S", None, 7, None, None, None, None),
    ("O", None, 7, None, None, None, None),
    ("R", 16400, 7, 7, None, None, None),
    ("Y", None, 7, 7, None, None, None),
    ("I", 16400, 7, 7, None, None, None),
    ("U", 16400, 7, 8, None, None, None),
    ("T", None, 7, 8, None, None, None),
    ("M", None, 7, 7, None, None, None),
    ("E", None, 7, None, None, None, None),
    ("M", None, None, None, None, 15, None),
    ("B", None, 9, None, 100, None, AT),
    ("D", 16400, 9, None, 100, None, AT),
    ("C", None, 9, None, 100, 110, AT),
    (
        "A",
        None,
        7,
        None,
        None,
        None,
        None,
    ),  # the slot function says 8, the message knows the top-level one
    ("S", None, 7, None, None, None, None),
    ("D", 16400, 7, 7, None, None, None),
    ("E", None, 7, None, None, None, None),
    ("c", None, 7, None, 125, 130, AT),
    ("b", None, 10, None, None, None, None),
    ("I", 16400, 10, None, None, None, None),
    ("P", None, 10, None, None, 150, None),
    ("K", None, 10, None, 155, 160, AT),
    ("S", None, 11, None, None, None, None),
    ("E", None, 11, None, None, None, None),
    ("p", None, 11, None, None, 180, None),
    ("r", None, 11, None, None, 190, None),
]


def columns(batches):
    names = ("kind", "relation_id", "xid8", "streamed_xid", "commit_lsn", "end_lsn", "commit_ts")
    return [
        tuple(row[name] for name in names) for row in pa.Table.from_batches(batches).to_pylist()
    ]


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_record_batches_may_end_anywhere(cut):
    """Cut into two record batches at any place, within a chunk too, the envelope is the same."""
    envelope = Envelope(1000, 4)
    batches = [add(envelope, STREAM[:cut]), add(envelope, []), add(envelope, STREAM[cut:])]
    assert columns(batches) == EXPECTED
    assert pa.Table.from_batches(batches).schema.equals(ENVELOPE_SCHEMA)


def test_one_message_a_batch():
    """State is carried over any number of record batches."""
    envelope = Envelope(1000, 4)
    assert columns([add(envelope, [row]) for row in STREAM]) == EXPECTED


S7, E = enc.stream_start(7), enc.stream_stop()
BEGIN, COMMIT = enc.begin(100, TS, 7), enc.commit(100, 110, TS)
PREPARE = enc.prepare(140, 150, TS, 7, "g")
BEGIN_PREPARE = enc.begin_prepare(140, 150, TS, 7, "g")
MALFORMED = [
    ("chunk in a chunk", 4, [S7, S7], "no Commit"),
    ("Stop without Start", 4, [E], "no Begin"),
    ("Begin in a chunk", 4, [S7, BEGIN], "no Commit"),
    ("chunk in a transaction", 4, [BEGIN, S7], "no Commit"),
    ("Stop of a transaction", 4, [BEGIN, E], "closes what a Begin message opened"),
    ("Commit of a chunk", 4, [S7, COMMIT], "closes what a Stream Start message opened"),
    ("Prepare of a transaction", 4, [BEGIN, PREPARE], "closes what a Begin message opened"),
    ("another Prepare", 4, [BEGIN_PREPARE, enc.prepare(141, 150, TS, 7, "g")], "commit_lsn"),
    ("Stream Commit in a chunk", 4, [S7, enc.stream_commit(7, 1, 2, TS)], "no Commit"),
    ("Stream Abort in a chunk", 4, [S7, enc.stream_abort(7, 8)], "no Commit"),
    ("row without an xid", 4, [S7, enc.insert(16400, [])], "too short for its kind with an xid"),
    ("Stream Abort too long for version 2", 2, [enc.stream_abort(7, 8, 9, TS)],
     "25 bytes long, 9 wanted"),
    ("Stream Abort too long for version 1", 1, [enc.stream_abort(7, 8, 9, TS)],
     "25 bytes long, 9 wanted"),
    ("Stream Abort cut off", 1, [enc.stream_abort(7, 8)[:-1]], "8 bytes long, 9 wanted"),
    ("Stream Abort in a transaction", 1, [BEGIN, enc.stream_abort(7, 8)], "no Commit"),
    ("Stream Abort in a prepared transaction", 3, [BEGIN_PREPARE, enc.stream_abort(7, 8)],
     "no Commit"),
    ("Stream Commit cut off", 2, [enc.stream_commit(7, 1, 2, TS)[:-1]], "29 bytes long, 30 wanted"),
    ("prepared in version 2", 2, [BEGIN_PREPARE],
     "protocol version 3, but version 2 was requested"),
]  # fmt: skip


@pytest.mark.parametrize("_, version, given, match", MALFORMED, ids=[m[0] for m in MALFORMED])
@pytest.mark.parametrize("cut", [False, True])
def test_malformed_streams_are_refused(_, version, given, match, cut):
    """Messages out of place stop with a named error, also at the seam of two record batches."""
    envelope, stream = Envelope(1000, version), [(1, 7, message) for message in given]
    if cut:
        add(envelope, stream[:-1])
    with pytest.raises(DecodeError, match=match):
        add(envelope, stream[-1:] if cut else stream)


STRAY, OF_ALL = enc.stream_abort(7, 8), enc.stream_abort(7, 7)
# What is given, and the numbers of those that are kept: an abort counts once its call has sent a
# chunk of that transaction.
ABORTS = {
    "of a subtransaction, nothing was streamed": ([STRAY], []),
    "of a whole transaction, nothing was streamed": ([OF_ALL], []),
    "between transactions": ([BEGIN, COMMIT, STRAY, STRAY, BEGIN, COMMIT], [0, 1, 4, 5]),
    "after another transaction's chunk": ([enc.stream_start(9), E, STRAY], [0, 1]),
    "after a chunk of it": ([S7, E, STRAY, OF_ALL], [0, 1, 2, 3]),
    "of a subtransaction without a chunk, in one that has some": (
        [S7, E, enc.stream_abort(7, 99)],
        [0, 1, 2],
    ),
}


@pytest.mark.parametrize("name", ABORTS)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", [False, True])
def test_an_abort_of_what_was_never_streamed_is_discarded(name, version, cut):
    """In every version; what is kept is numbered without it, what was given counted with it."""
    given, kept = ABORTS[name]
    if version == 1 and any(message[:1] == b"S" for message in given):
        given, kept = [STRAY, OF_ALL], []
    envelope, stream = Envelope(1000, version), [(n, 7, message) for n, message in enumerate(given)]
    parts = [stream[:-1], stream[-1:]] if cut else [stream]
    found = pa.Table.from_batches([add(envelope, part) for part in parts])
    assert found["data"].to_pylist() == [given[n] for n in kept]
    assert found["lsn"].to_pylist() == kept
    assert found["seq"].to_pylist() == list(range(len(kept)))
    assert envelope.given == len(given)


def test_the_error_says_where_and_shows_no_bytes():
    """Position in the call and in the WAL, the message's length, and that nothing is lost."""
    envelope = Envelope(1000, 4)
    add(envelope, STREAM[:2])
    with pytest.raises(DecodeError, match="unknown kind 'z'") as caught:
        add(envelope, [(16, 7, ROW), (32, 7, b"z" * 68)])
    assert "message 3 of this call, at 0/20; the slot keeps it" in str(caught.value)
    assert "68 bytes" in str(caught.value)
    assert "7a" not in str(caught.value)


ROW = enc.insert(16400, ["1"], xid=7)


def test_damaged_streams_end_in_a_named_error_or_a_whole_envelope():
    """Bytes flipped or cut, messages left out or doubled: DecodeError or a whole batch."""
    rng = chosen_random()
    for _ in rounds(3_000):
        stream = list(STREAM)
        at = rng.randrange(len(stream))
        message = bytearray(stream[at][2])
        message[rng.randrange(len(message))] = rng.randrange(256)
        stream[at] = (
            *stream[at][:2],
            bytes(message[: rng.choice([len(message), rng.randrange(len(message) + 1)])]),
        )
        if rng.random() < 0.3:
            other = rng.randrange(len(stream))
            stream[other:other] = [stream[rng.randrange(len(stream))]] * rng.randrange(2)
            del stream[rng.randrange(len(stream))]
        try:
            batch = add(Envelope(1000, rng.randrange(1, 5)), stream)
        except DecodeError:
            continue
        batch.validate(full=True)
        assert [m for m in batch["data"].to_pylist() if m[:1] != b"A"] == [
            m for _, _, m in stream if m[:1] != b"A"
        ]

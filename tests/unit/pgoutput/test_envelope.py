"""The envelope: sequence, kind, relation, transaction, position, time; chunks and decisions."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from tests.support import pgoutput_encoder as enc
from tests.support.seeds import chosen_random, rounds
from waldelta.errors import DecodeError
from waldelta.pgoutput.envelope import ENVELOPE_SCHEMA, Envelope

TS = 1_700_000_000_000_000
AT = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=TS)
ROW = enc.insert(16400, ["1"])
STREAM = [  # lsn, xid, message
    (1, 0, enc.message(1, "beat", b"", transactional=False)),
    (10, 7, enc.begin(100, TS, 7)),
    (11, 7, enc.relation(16400, "public", "t", [("id", 23, -1, True)])),
    (12, 7, ROW),
    (13, 7, enc.delete(4_000_000_000, key=["1"])),
    (110, 7, enc.commit(100, 110, TS)),
    (111, 8, enc.begin(200, TS + 1, 8)),
    (112, 8, enc.type_(16500, "public", "mood")),
    (113, 8, enc.truncate([16400])),
    (114, 8, enc.message(1, "out", b"x")),
    (115, 8, enc.origin(5, "o")),
    (116, 8, enc.update(16400, ["1"])),
    (210, 8, enc.commit(200, 210, TS + 1)),
]
LATER = AT + timedelta(microseconds=1)
EXPECTED = [  # kind, relation_id, xid8, streamed_xid, commit_lsn, end_lsn, commit_ts
    ("M", None, None, None, None, 1, None),  # outside any transaction: the slot may move behind it
    ("B", None, 7, None, 100, None, AT),
    ("R", 16400, 7, None, 100, None, AT),
    ("I", 16400, 7, None, 100, None, AT),
    ("D", 4_000_000_000, 7, None, 100, None, AT),
    ("C", None, 7, None, 100, 110, AT),
    ("B", None, 8, None, 200, None, LATER),
    ("Y", None, 8, None, 200, None, LATER),
    ("T", None, 8, None, 200, None, LATER),
    ("M", None, 8, None, 200, None, LATER),
    ("O", None, 8, None, 200, None, LATER),
    ("U", 16400, 8, None, 200, None, LATER),
    ("C", None, 8, None, 200, 210, LATER),
]
CHUNKS = [  # lsn, xid, message
    (10, 7, enc.stream_start(7)),
    (10, 7, enc.origin(5, "o")),
    (10, 7, enc.relation(16400, "public", "t", [("id", 23, -1, True)], xid=7)),
    (10, 7, enc.type_(16500, "public", "mood", xid=7)),
    (11, 7, enc.insert(16400, ["1"], xid=7)),
    (12, 7, enc.update(16400, ["2"], key=["1"], xid=8)),
    (13, 7, enc.truncate([16400], xid=8)),
    (14, 7, enc.message(9, "in", b"x", xid=7)),
    (14, 7, enc.stream_stop()),
    # Written in 8, to which it doesn't belong.
    (15, 8, enc.message(15, "beat", b"", transactional=False)),
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
OF_CHUNKS = [
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
    # The slot function says 8, the message knows the top-level one.
    ("A", None, 7, None, None, None, None),
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

STREAMS = {"protocol 1": (STREAM, EXPECTED, 1), "chunks": (CHUNKS, OF_CHUNKS, 4)}


def add(envelope, stream):
    lsn, xid, data = zip(*stream, strict=True) if stream else ((), (), ())
    return envelope.add(pa.array(lsn, pa.int64()), pa.array(xid, pa.int64()), enc.messages(*data))


def columns(batches):
    names = ("kind", "relation_id", "xid8", "streamed_xid", "commit_lsn", "end_lsn", "commit_ts")
    return [
        tuple(row[name] for name in names) for row in pa.Table.from_batches(batches).to_pylist()
    ]


@pytest.mark.parametrize("name", STREAMS)
def test_record_batches_may_end_anywhere(name):
    """Cut into two record batches anywhere, or one a message, the envelope is the same."""
    stream, expected, version = STREAMS[name]
    for cut in range(len(stream) + 1):
        envelope = Envelope(1000, version)
        batches = [add(envelope, part) for part in (stream[:cut], [], stream[cut:])]
        assert columns(batches) == expected, cut
        table = pa.Table.from_batches(batches)
        assert table.schema.equals(ENVELOPE_SCHEMA)
        assert table["seq"].to_pylist() == list(range(len(stream)))
        assert table["lsn"].to_pylist() == [lsn for lsn, _, _ in stream]
        assert table["data"].to_pylist() == [message for _, _, message in stream]
    envelope = Envelope(1000, version)
    assert columns([add(envelope, [row]) for row in stream]) == expected


@pytest.mark.parametrize(
    "xid, next_xid8, expected",
    [
        (7, 8, 7),
        (7, (3 << 32) + 8, (3 << 32) + 7),
        (4_294_967_290, (3 << 32) + 8, (2 << 32) + 4_294_967_290),  # from before the wrap-around
        # Commits that wait for a synchronous standby are decoded, though below the snapshot's xmax.
        (8, (3 << 32) + 8, (3 << 32) + 8),
        (12, (3 << 32) + 8, (3 << 32) + 12),
        (3, (3 << 32) + 4_294_967_290, (4 << 32) + 3),
    ],
)
def test_xids_get_their_epoch(xid, next_xid8, expected):
    """A 32-bit xid is the one nearest to next_xid8, on either side."""
    batch = add(Envelope(next_xid8), [(1, xid, enc.begin(1, TS, xid))])
    assert batch["xid8"].to_pylist() == [expected]


def test_slices_are_read_at_their_own_offset():
    """The data may be a slice of a larger array."""
    data = enc.messages(b"junk", *(m for _, _, m in STREAM[1:6])).slice(1)
    batch = Envelope(1000).add(list(range(5)), [7] * 5, data)
    assert batch["kind"].to_pylist() == ["B", "R", "I", "D", "C"]
    assert batch["data"].to_pylist() == data.to_pylist()


BEGIN, COMMIT = enc.begin(100, TS, 7), enc.commit(100, 110, TS)
S7, E = enc.stream_start(7), enc.stream_stop()
PREPARE = enc.prepare(140, 150, TS, 7, "g")
BEGIN_PREPARE = enc.begin_prepare(140, 150, TS, 7, "g")
MALFORMED = [
    ("empty message", 1, [BEGIN, b""], "kind"),
    ("unknown kind", 1, [BEGIN, b"zzzz"], r"unknown kind 'z' .row \d, 4 bytes"),
    ("later protocol", 1, [b"S\0\0\0\0\1"], "protocol version 2"),
    ("prepared", 1, [b"b\0\0\0\0\1"], "protocol version 3"),
    ("short Begin", 1, [BEGIN[:-1]], "Begin message: length"),
    ("long Commit", 1, [BEGIN, COMMIT + b"x"], "Commit message: length"),
    ("short Insert", 1, [BEGIN, b"I\0\0"], "Insert message: length"),
    ("row without Begin", 1, [ROW], "no Begin"),
    ("row after Commit", 1, [BEGIN, COMMIT, ROW], "no Begin"),
    ("Begin in a transaction", 1, [BEGIN, ROW, BEGIN], "no Commit"),
    ("another Commit", 1, [BEGIN, enc.commit(101, 110, TS)], "commit_lsn"),
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
    """Unknown, cut, unpaired or misplaced messages stop with a named error, at seams too."""
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
    add(envelope, CHUNKS[:2])
    with pytest.raises(DecodeError, match="unknown kind 'z'") as caught:
        add(envelope, [(16, 7, enc.insert(16400, ["1"], xid=7)), (32, 7, b"z" * 68)])
    assert "message 3 of this call, at 0/20; the slot keeps it" in str(caught.value)
    assert "68 bytes" in str(caught.value)
    assert "7a" not in str(caught.value)


@pytest.mark.parametrize("name", STREAMS)
def test_damaged_streams_end_in_a_named_error_or_a_whole_envelope(name):
    """Bytes flipped or cut, messages left out or doubled: DecodeError or a whole batch."""
    rng = chosen_random()
    for _ in rounds(2_000):
        stream = list(STREAMS[name][0])
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


# Messages as (lsn, xid, bytes), which is skipped, and what lands: kind, xid8, commit, end.
ONE = [(10, 7, BEGIN), (11, 7, ROW), (110, 7, COMMIT)]
TWO = [(111, 8, enc.begin(200, TS, 8)), (112, 8, ROW), (210, 8, enc.commit(200, 210, TS))]
ONE_LANDED = [("B", 7, 100, None), ("I", 7, 100, None), ("C", 7, 100, 110)]
TWO_LANDED = [("B", 8, 200, None), ("I", 8, 200, None), ("C", 8, 200, 210)]
UNKNOWN_BEGIN, UNKNOWN_COMMIT = (10, 7, b"z" + BEGIN[1:]), (110, 7, b"z" + COMMIT[1:])
SKIPPED = {
    "a row of an unknown kind": ([ONE[0], (11, 7, b"zz"), ONE[2], *TWO], 1,
     [("B", 7, 100, None), ("!zC", 7, 100, 11), ("C", 7, 100, 110), *TWO_LANDED]),
    "a row that is cut off": ([ONE[0], (11, 7, ROW[:6]), ONE[2], *TWO], 1,
     [("B", 7, 100, None), ("!I", 7, 100, 11), ("C", 7, 100, 110), *TWO_LANDED]),
    "an empty message": ([ONE[0], (11, 7, b""), ONE[2], *TWO], 1,
     [("B", 7, 100, None), ("!?C", 7, 100, 11), ("C", 7, 100, 110), *TWO_LANDED]),
    "between transactions": ([*ONE, (111, 9, b"zz"), *TWO], 3,
     [*ONE_LANDED, ("!zB", 9, None, None), *TWO_LANDED]),
    "a Begin that is too long": ([(10, 7, BEGIN + b"x"), *ONE[1:], *TWO], 0,
     [("!B", 7, None, None), ("I", 7, None, None), ("C", 7, None, 110), *TWO_LANDED]),
    "a Commit that is too long": ([*ONE[:2], (110, 7, COMMIT + b"x"), *TWO], 2,
     [*ONE_LANDED[:2], ("!C", 7, 100, 110), *TWO_LANDED]),
    "a Begin of an unknown kind": ([UNKNOWN_BEGIN, *ONE[1:], *TWO], 0,
     [("!zB", 7, None, None), ("I", 7, None, None), ("C", 7, None, 110), *TWO_LANDED]),
    "a Commit of an unknown kind": ([*ONE[:2], UNKNOWN_COMMIT, *TWO], 2,
     [*ONE_LANDED[:2], ("!zC", 7, 100, 110), *TWO_LANDED]),
    "the last Commit": ([*TWO, *ONE[:2], UNKNOWN_COMMIT], 5,
     [*TWO_LANDED, *ONE_LANDED[:2], ("!zC", 7, 100, 110)]),
    "a Commit that came as a Stream Stop": ([*ONE[:2], (110, 7, b"E" + COMMIT[1:]), *TWO], 2,
     [*ONE_LANDED[:2], ("!EC", 7, 100, 110), *TWO_LANDED]),
    # Of two that are alike both are skipped.
    "a Begin that came twice": (
        [ONE[0], ONE[0], *ONE[1:], *TWO],
        1,
        [
            ("!B", 7, None, None),
            ("!BC", 7, None, 10),
            ("I", 7, None, None),
            ("C", 7, None, 110),
            *TWO_LANDED,
        ],
    ),
    "a Commit that came twice": ([*ONE, ONE[2], *TWO], 3,
     [*ONE_LANDED[:2], ("!C", 7, 100, 110), ("!C", 7, None, 110), *TWO_LANDED]),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPED)
@pytest.mark.parametrize("cut", range(7))
def test_a_message_that_is_skipped_lands_unread(name, cut):
    """The others land as ever, wherever record batches end; else the message is refused."""
    given, at, landed = SKIPPED[name]
    with pytest.raises(DecodeError) as caught:
        add(Envelope(1000), given)
    unread = caught.value.unread
    assert (unread.lsn, unread.xid, unread.raw) == given[at]
    envelope = Envelope(1000, skipped={(unread.lsn, unread.id)})
    batches = [add(envelope, given[:cut]), add(envelope, given[cut:])]
    envelope.end()
    rows = pa.Table.from_batches(batches).to_pylist()
    assert [(r["kind"], r["xid8"], r["commit_lsn"], r["end_lsn"]) for r in rows] == landed
    assert [r["data"] for r in rows] == [message for _, _, message in given]
    assert envelope.given == len(given)


def test_a_call_that_ends_within_a_transaction_is_refused():
    """What landed of it would come once more with the next call."""
    envelope = Envelope(1000)
    add(envelope, ONE[:2])
    with pytest.raises(DecodeError, match="no message closes it") as caught:
        envelope.end()
    # Its Commit may have come as another message: skipped, that closes the transaction.
    last = caught.value.unread
    assert (last.lsn, last.raw) == (11, ROW)
    envelope = Envelope(1000, skipped={(last.lsn, last.id)})
    assert add(envelope, ONE[:2])["end_lsn"].to_pylist() == [None, 11]
    envelope.end()

"""The envelope: sequence, kind, relation, transaction, commit position and time."""

from __future__ import annotations

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
EXPECTED = [  # kind, relation_id, xid8, lsn, commit_lsn, end_lsn, commit_ts
    ("M", None, None, 1, None, 1, None),  # outside any transaction: the slot may move behind it
    ("B", None, 7, 10, 100, None, AT),
    ("R", 16400, 7, 11, 100, None, AT),
    ("I", 16400, 7, 12, 100, None, AT),
    ("D", 4_000_000_000, 7, 13, 100, None, AT),
    ("C", None, 7, 110, 100, 110, AT),
    ("B", None, 8, 111, 200, None, LATER),
    ("Y", None, 8, 112, 200, None, LATER),
    ("T", None, 8, 113, 200, None, LATER),
    ("M", None, 8, 114, 200, None, LATER),
    ("O", None, 8, 115, 200, None, LATER),
    ("U", 16400, 8, 116, 200, None, LATER),
    ("C", None, 8, 210, 200, 210, LATER),
]


def add(envelope, stream):
    lsn, xid, data = zip(*stream, strict=True) if stream else ((), (), ())
    return envelope.add(pa.array(lsn, pa.int64()), pa.array(xid, pa.int64()), enc.messages(*data))


def columns(batches):
    rows = pa.Table.from_batches(batches).to_pylist()
    return [
        (
            r["kind"],
            r["relation_id"],
            r["xid8"],
            r["lsn"],
            r["commit_lsn"],
            r["end_lsn"],
            r["commit_ts"],
        )
        for r in rows
    ]


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_record_batches_may_end_anywhere(cut):
    """Cut into two record batches at any place, the envelope is the same."""
    envelope = Envelope(1000)
    batches = [add(envelope, STREAM[:cut]), add(envelope, []), add(envelope, STREAM[cut:])]
    assert columns(batches) == EXPECTED
    table = pa.Table.from_batches(batches)
    assert table.schema.equals(ENVELOPE_SCHEMA)
    assert table["seq"].to_pylist() == list(range(len(STREAM)))
    assert table["data"].to_pylist() == [message for _, _, message in STREAM]


def test_one_message_a_batch():
    """State is carried over any number of record batches."""
    envelope = Envelope(1000)
    assert columns([add(envelope, [row]) for row in STREAM]) == EXPECTED


@pytest.mark.parametrize(
    "xid, next_xid8, expected",
    [
        (7, 8, 7),
        (7, (3 << 32) + 8, (3 << 32) + 7),
        (4_294_967_290, (3 << 32) + 8, (2 << 32) + 4_294_967_290),  # from before the wrap-around
        # Commits that wait for a synchronous standby are decoded, though the snapshot's xmax lies
        # below them.
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
MALFORMED = [
    ("empty message", [BEGIN, b""], "kind"),
    ("unknown kind", [BEGIN, b"zzzz"], r"unknown kind 'z' .row \d, 4 bytes"),
    ("later protocol", [b"S\0\0\0\0\1"], "protocol version 2"),
    ("prepared", [b"b\0\0\0\0\1"], "protocol version 3"),
    ("short Begin", [BEGIN[:-1]], "Begin message: length"),
    ("long Commit", [BEGIN, COMMIT + b"x"], "Commit message: length"),
    ("short Insert", [BEGIN, b"I\0\0"], "Insert message: length"),
    ("row without Begin", [ROW], "no Begin"),
    ("row after Commit", [BEGIN, COMMIT, ROW], "no Begin"),
    ("Begin in a transaction", [BEGIN, ROW, BEGIN], "no Commit"),
    ("another Commit", [BEGIN, enc.commit(101, 110, TS)], "commit_lsn"),
]


@pytest.mark.parametrize("_, given, match", MALFORMED, ids=[m[0] for m in MALFORMED])
@pytest.mark.parametrize("cut", [False, True])
def test_malformed_streams_are_refused(_, given, match, cut):
    """Unknown, cut or unpaired messages are a named error, also between two record batches."""
    envelope, stream = Envelope(1000), [(1, 7, message) for message in given]
    if cut:
        add(envelope, stream[:-1])
    with pytest.raises(DecodeError, match=match):
        add(envelope, stream[-1:] if cut else stream)


def test_damaged_streams_end_in_a_named_error_or_a_whole_envelope():
    """Flipped and cut bytes: DecodeError or a batch of the right length, nothing else."""
    rng = chosen_random()
    for _ in rounds(1_000):
        stream = list(STREAM)
        at = rng.randrange(len(stream))
        message = bytearray(stream[at][2])
        message[rng.randrange(len(message))] = rng.randrange(256)
        stream[at] = (
            *stream[at][:2],
            bytes(message[: rng.choice([len(message), rng.randrange(len(message) + 1)])]),
        )
        try:
            batch = add(Envelope(1000), stream)
        except DecodeError:
            continue
        batch.validate(full=True)
        assert batch["data"].to_pylist() == [m for _, _, m in stream]


# Messages as (lsn, xid, bytes), which one is skipped, and what lands: kind, xid8, commit_lsn,
# end_lsn.
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

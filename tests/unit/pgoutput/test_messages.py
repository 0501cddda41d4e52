"""Relation, Truncate, Message and transaction messages: any bytes, read or refused by name."""

import numpy as np
import pytest

from tests.support import pgoutput_encoder as enc
from tests.support.seeds import chosen_random, rounds
from waldelta.errors import DecodeError
from waldelta.pgoutput.messages import (
    Control,
    LogicalMessage,
    Relation,
    RelationColumn,
    decode_logical_messages,
    read_control,
    read_logical_message,
    read_relation,
    read_truncate,
)

COLUMNS = [
    ("id", 23, -1, True),
    ('odd "name". ü', 1700, 786438, False),
    ("x" * 63, 4_294_967_295, -1, False),
]
RELATION = enc.relation(4_000_000_000, "public", "my table", COLUMNS, "f")
MESSAGE = enc.message(77, "outbox", b"\0any\xff")
TRUNCATE = enc.truncate([1, 4_000_000_000], cascade=True, restart_identity=True)


def test_relation():
    """Names, unsigned oids, modifiers and key flags come out as they went in."""
    columns = tuple(RelationColumn(*column) for column in COLUMNS)
    assert read_relation(RELATION) == Relation(4_000_000_000, "public", "my table", "f", columns)


def test_empty_namespace_is_pg_catalog():
    """The protocol sends an empty string for pg_catalog."""
    assert read_relation(enc.relation(1, "", "t", [])).schema == "pg_catalog"


@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("relations", [(), (1,), (1, 4_000_000_000)])
def test_truncate(relations, cascade, restart):
    """All relations of one TRUNCATE, whatever its two options."""
    assert read_truncate(enc.truncate(relations, cascade, restart)) == relations


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("xid", [None, 9])
def test_logical_message(transactional, xid):
    """Prefix and content, which may be any bytes."""
    data = enc.message(77, "ü", b"\0any\xff", transactional, xid)
    read = read_logical_message(data, streamed=xid is not None)
    assert read == LogicalMessage(77, transactional, "ü", b"\0any\xff")


def test_streamed():
    """Between Stream Start and Stop an xid follows the first byte."""
    assert read_relation(enc.relation(5, "s", "t", COLUMNS, xid=9), streamed=True).relation_id == 5
    assert read_truncate(enc.truncate([5], xid=9), streamed=True) == (5,)


@pytest.mark.parametrize(
    "read, whole",
    [(read_relation, RELATION), (read_truncate, TRUNCATE), (read_logical_message, MESSAGE)],
    ids=["R", "T", "M"],
)
def test_every_cut_is_an_error(read, whole):
    """Cut anywhere, lengthened, or of another kind: DecodeError."""
    for bad in [whole[:n] for n in range(len(whole))] + [whole + b"\0", b"X" + whole[1:]]:
        with pytest.raises(DecodeError, match="malformed"):
            read(bad)


@pytest.mark.parametrize(
    "read, bad, field",
    [
        (read_relation, enc.relation(1, "s", "t", [], "x"), "replica_identity"),
        (read_relation, RELATION.replace(b"my table", b"my \xff\xfeable"), "name"),
        (read_truncate, b"T\xff\xff\xff\xff\0", "relation_count"),
        (read_truncate, b"T\0\0\0\0\x08", "flags"),
        (read_logical_message, b"M\x02" + MESSAGE[2:], "flags"),
        (read_logical_message, MESSAGE[:-9] + b"\xff\xff\xff\xff" + MESSAGE[-5:], "content.length"),
    ],
)
def test_wrong_fields_are_named(read, bad, field):
    """The error names the field; a flipped count doesn't start a long loop."""
    with pytest.raises(DecodeError, match=field):
        read(bad)


TS = 1_700_000_000_000_000
CASES = [
    (enc.stream_start(7), Control("S", 7, is_first=True)),
    (enc.stream_start(7, first=False), Control("S", 7)),
    (enc.stream_stop(), Control("E")),
    (enc.stream_commit(7, 100, 110, TS), Control("c", 7, lsn=100, end_lsn=110, at_us=TS)),
    (enc.stream_abort(7, 8), Control("A", 7, 8)),
    (enc.stream_abort(7, 8, 90, TS), Control("A", 7, 8, lsn=90, at_us=TS)),
    (enc.begin_prepare(100, 110, TS, 7, "g é"),
     Control("b", 7, lsn=100, end_lsn=110, at_us=TS, gid="g é")),
    (enc.prepare(100, 110, TS, 7, "g"), Control("P", 7, lsn=100, end_lsn=110, at_us=TS, gid="g")),
    (enc.stream_prepare(100, 110, TS, 7, "g"),
     Control("p", 7, lsn=100, end_lsn=110, at_us=TS, gid="g")),
    (enc.commit_prepared(200, 210, TS, 7, "g"),
     Control("K", 7, lsn=200, end_lsn=210, at_us=TS, gid="g")),
    (enc.rollback_prepared(110, 210, TS - 1, TS, 7, "g"),
     Control("r", 7, lsn=110, end_lsn=210, at_us=TS, gid="g")),
]  # fmt: skip


@pytest.mark.parametrize(
    "data, expected", CASES, ids=[f"{c.kind}{k}" for k, (_, c) in enumerate(CASES)]
)
def test_every_field(data, expected):
    """Each field has the value that was written."""
    assert read_control(data) == expected


@pytest.mark.parametrize(
    "data", [data for data, _ in CASES], ids=[f"{c.kind}{k}" for k, (_, c) in enumerate(CASES)]
)
def test_cut_or_longer_messages(data):
    """The error names the message; only a Stream Abort has two lengths."""
    for end in range(len(data)):
        if data[:1] == b"A" and end == 9:
            continue
        with pytest.raises(DecodeError):
            read_control(data[:end])
    with pytest.raises(DecodeError):
        read_control(data + b"x")


@pytest.mark.parametrize(
    "data, match",
    [
        (b"zz", "none of"),
        (b"S\0\0\0\1\2", "first_segment"),
        (b"c\0\0\0\1\1" + bytes(24), "flags"),
        (b"P\1" + bytes(28) + b"\0", "flags"),
    ],
)
def test_impossible_values(data, match):
    """Values that PostgreSQL never sends are refused by name."""
    with pytest.raises(DecodeError, match=match):
        read_control(data)


GIVEN = [
    enc.message(1, "", b""),
    enc.message(2, "p", b"\0\0\0"),
    enc.message(1 << 40, "é prefix", b"content", transactional=False),
    enc.message(4, "x", bytes(range(256))),
]


def streamed(given):
    """The same with an xid in front where the flag is set, as between Stream Start and Stop."""
    return [message[:1] + b"\0\0\0\7" * is_streamed + message[1:] for message, is_streamed in given]


def one_by_one(given, flags=None):
    flags = [False] * len(given) if flags is None else flags
    read = [
        read_logical_message(message, streamed=flag)
        for message, flag in zip(given, flags, strict=True)
    ]
    return [(m.lsn, m.is_transactional, m.prefix, m.content) for m in read]


def at_once(data, flags=None):
    found = decode_logical_messages(data, None if flags is None else np.array(flags, np.bool_))
    columns = (
        found.lsn.tolist(),
        found.is_transactional.tolist(),
        found.prefix.to_pylist(),
        found.content.to_pylist(),
    )
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("large", [False, True])
def test_the_same_as_one_by_one(large):
    """Every field, in slices too."""
    assert at_once(enc.messages(*GIVEN, large=large)) == one_by_one(GIVEN)
    assert at_once(enc.messages(*GIVEN, large=large).slice(2)) == one_by_one(GIVEN[2:])
    assert at_once(enc.messages(*GIVEN).slice(4)) == []


def test_streamed_ones_among_others():
    """Those within a chunk have an xid more."""
    flags = [True, False, True, True]
    sent = streamed(zip(GIVEN, flags, strict=True))
    assert at_once(enc.messages(*sent), flags) == one_by_one(sent, flags) == one_by_one(GIVEN)
    with pytest.raises(DecodeError, match="Message"):
        at_once(enc.messages(*sent))


def test_damaged_messages_are_named_or_the_same():
    """Cut, flipped, lengthened: DecodeError exactly where reading one by one says so."""
    rng = chosen_random()
    for _ in rounds(2_000):
        given = [rng.choice(GIVEN) for _ in range(3)]
        at = rng.randrange(3)
        message = bytearray(given[at])
        message[rng.randrange(len(message))] = rng.choice([0, 1, 255, rng.randrange(256)])
        given[at] = bytes(
            message[: rng.choice([len(message), rng.randrange(1, len(message) + 1)])]
        ) + rng.choice([b"", b"\0x"])
        flags = rng.choices([False, True], k=3)
        given = streamed(zip(given, flags, strict=True))
        try:
            expected = one_by_one(given, flags)
        except DecodeError:
            with pytest.raises(DecodeError, match="Message"):
                at_once(enc.messages(*given), flags)
        else:
            assert at_once(enc.messages(*given), flags) == expected

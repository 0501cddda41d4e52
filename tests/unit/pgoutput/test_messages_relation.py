"""Relation, Truncate and Message messages."""

import pytest

from tests.support import pgoutput_encoder as enc
from waldelta.errors import DecodeError
from waldelta.pgoutput import Relation, read_relation, read_truncate
from waldelta.pgoutput.messages import LogicalMessage, RelationColumn, read_logical_message

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

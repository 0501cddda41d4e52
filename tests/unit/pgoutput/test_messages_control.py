"""Messages that open, pause and end streamed and prepared transactions, read to their last byte."""

import pytest

from tests.support import pgoutput_encoder as enc
from waldelta.errors import DecodeError
from waldelta.pgoutput.messages import Control, read_control

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

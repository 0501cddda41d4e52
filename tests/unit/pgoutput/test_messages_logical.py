"""Logical messages, many at once: the same as one by one."""

import numpy as np
import pytest

from tests.support import pgoutput_encoder as enc
from tests.support.seeds import chosen_random, rounds
from waldelta.errors import DecodeError
from waldelta.pgoutput.messages import decode_logical_messages, read_logical_message

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

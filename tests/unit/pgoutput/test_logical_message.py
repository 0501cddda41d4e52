"""Logical messages, many at once: the same as one by one."""

from __future__ import annotations

import random

import pytest

from tests import pgoutput_encoder as enc
from waldelta.errors import DecodeError
from waldelta.pgoutput.logical_message import decode_logical_messages, read_logical_message

GIVEN = [
    enc.message(1, "", b""),
    enc.message(2, "p", b"\0\0\0"),
    enc.message(1 << 40, "é prefix", b"content", transactional=False),
    enc.message(4, "x", bytes(range(256))),
]


def one_by_one(given):
    return [(m.lsn, m.is_transactional, m.prefix, m.content) for m in map(read_logical_message, given)]


def at_once(data):
    found = decode_logical_messages(data)
    columns = (found.lsn.tolist(), found.is_transactional.tolist(), found.prefix.to_pylist(), found.content.to_pylist())
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("large", [False, True])
def test_the_same_as_one_by_one(large):
    """Every field, in slices too."""
    assert at_once(enc.messages(*GIVEN, large=large)) == one_by_one(GIVEN)
    assert at_once(enc.messages(*GIVEN, large=large).slice(2)) == one_by_one(GIVEN[2:])
    assert at_once(enc.messages(*GIVEN).slice(4)) == []


def test_damaged_messages_are_named_or_the_same():
    """Cut, flipped, lengthened: DecodeError exactly where reading one by one says so."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(2_000):
        given = [rng.choice(GIVEN) for _ in range(3)]
        at = rng.randrange(3)
        message = bytearray(given[at])
        message[rng.randrange(len(message))] = rng.choice([0, 1, 255, rng.randrange(256)])
        given[at] = bytes(message[: rng.choice([len(message), rng.randrange(1, len(message) + 1)])]) + rng.choice(
            [b"", b"\0x"]
        )
        try:
            expected = one_by_one(given)
        except DecodeError:
            with pytest.raises(DecodeError, match="Message"):
                at_once(enc.messages(*given))
        else:
            assert at_once(enc.messages(*given)) == expected

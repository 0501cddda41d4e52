"""Damaged row messages with binary values: a named error, or what each says alone."""

import struct

import pyarrow as pa

from tests.support import pgoutput_encoder as enc
from tests.support.pgoutput_encoder import UNCHANGED, Binary
from tests.support.seeds import chosen_random, rounds
from tests.unit.pgoutput.test_rows import damage, reference
from waldelta.errors import DecodeError
from waldelta.pgoutput.rows import Rows, decode_rows
from waldelta.types.wire.wire_format import text_of

ARRAY = struct.pack("!iiIii", 1, 1, 23, 2, 1)
# Of each type some values as its send function gives them.
VALUES = {
    "int4": [struct.pack("!i", -7), struct.pack("!i", 1 << 30)],
    "numeric": [struct.pack("!hhHh2h", 2, 0, 0, 2, 12, 5000),
                struct.pack("!hhHh", 0, 0, 0xC000, 0)],
    "timestamptz": [struct.pack("!q", 0), struct.pack("!q", (1 << 63) - 1),
                    struct.pack("!q", -99_999_999_999_999_999)],
    "text": ["ü€😀".encode(), b""],
    "bytea": [b"\0\xff", b""],
    "uuid": [bytes(range(16))],
    "jsonb": [b'\1{"a": 1}'],
    "varbit": [struct.pack("!i", 9) + b"\xff\x80"],
    "inet": [bytes([2, 24, 0, 4, 10, 0, 0, 1]), bytes([3, 128, 0, 16, *range(16)])],
    "int4[]": [ARRAY + struct.pack("!iii", 4, 5, -1), struct.pack("!iiI", 0, 0, 23)],
    "int4range": [b"\2" + struct.pack("!iiii", 4, 1, 4, 9), b"\1"],
    "interval": [struct.pack("!qii", -1, 2, 14)],
    "point": [struct.pack("!dd", 0.1, float("inf"))],
}  # fmt: skip
TYPES = list(VALUES)


def random_row(rng):
    """One value of each type, some null; the formats of a relation's values are all the same."""
    return [None if rng.random() < 0.2 else Binary(rng.choice(VALUES[name])) for name in TYPES]


def random_message(rng):
    """Any shape of row message."""
    new, old = random_row(rng), random_row(rng)
    if rng.random() < 0.3:
        new[rng.randrange(len(new))] = UNCHANGED
    kinds = [
        lambda: enc.insert(1, new),
        lambda: enc.update(1, new),
        lambda: enc.update(1, new, old=old),
        lambda: enc.update(1, new, key=old),
        lambda: enc.delete(1, key=old),
        lambda: enc.delete(1, old=old),
    ]
    return rng.choice(kinds)()


def texts(rows: Rows):
    """All values as text; reading them is what may still fail."""
    return [[which[k].to_pylist() for k in range(len(TYPES))] for which in (rows.new, rows.old)]


def alone(message: bytes):
    """One message's values by themselves, or None when it, or one of its values, is malformed."""
    if reference(message, len(TYPES)) is None:
        return None
    try:
        new, old = texts(decode_rows(enc.messages(message), len(TYPES), to_text=to_text))
    except DecodeError:
        return None
    return [column[0] for column in new], [column[0] for column in old]


def to_text(k: int, values: pa.Array) -> pa.Array:
    return text_of(values, TYPES[k])


def test_damaged_binary_rows_never_become_wrong_rows():
    """A message's values are those it has alone; a damaged one stops all, by DecodeError."""
    rng = chosen_random()
    refused = mixed = 0
    tries = rounds(320)
    for _ in tries:
        given = [random_message(rng) for _ in range(rng.randrange(1, 5))]
        at = rng.randrange(len(given))
        given[at] = damage(rng, given[at])
        expected = [alone(message) for message in given]
        data = enc.messages(enc.insert(1, ["x"]), *given, large=rng.random() < 0.2).slice(1)
        try:
            new, old = texts(decode_rows(data, len(TYPES), to_text=to_text))
        except DecodeError as err:
            # A damaged byte may have made a binary value a text: only beside others is that told.
            is_mixed = "text and binary" in str(err)
            refused, mixed = refused + (None in expected), mixed + is_mixed
            if None not in expected and not is_mixed:
                raise
            continue
        assert None not in expected
        for row, (its_new, its_old) in enumerate(expected):
            assert [column[row] for column in new] == its_new
            assert [column[row] for column in old] == its_old
    assert refused > len(tries) / 10
    assert mixed < len(tries) * 25 / 80

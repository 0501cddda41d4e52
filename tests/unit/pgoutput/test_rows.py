"""Row messages as text and binary: every kind and shape, and bytes that aren't one."""

import random
import struct

import numpy as np
import pyarrow as pa
import pytest

from tests.support import pgoutput_encoder as enc
from tests.support.pgoutput_encoder import UNCHANGED, Binary
from tests.support.seeds import chosen_random, rounds
from waldelta.errors import DecodeError
from waldelta.pgoutput.rows import Rows, decode_rows
from waldelta.types.wire.wire_format import text_of

OID = 16400

# id, message, op, old kind, new values, old values (None: no such tuple, or not sent)
SHAPES = [
    ("insert", enc.insert(OID, ["1", None, "x"]), "I", "", [b"1", None, b"x"], [None] * 3),
    ("empty text is not null", enc.insert(OID, ["", "", None]), "I", "", [b"", b"", None],
     [None] * 3),
    ("update alone", enc.update(OID, ["1", "b", "c"]), "U", "", [b"1", b"b", b"c"], [None] * 3),
    ("unchanged", enc.update(OID, ["1", UNCHANGED, "c"]), "U", "", [b"1", None, b"c"], [None] * 3),
    ("last one unchanged", enc.update(OID, ["1", "b", UNCHANGED]), "U", "", [b"1", b"b", None],
     [None] * 3),
    ("key changed", enc.update(OID, ["2", "b", "c"], key=["1", None, None]), "U", "K",
     [b"2", b"b", b"c"], [b"1", None, None]),
    ("full identity", enc.update(OID, ["2", "b", "c"], old=["1", "p", "q"]), "U", "O",
     [b"2", b"b", b"c"], [b"1", b"p", b"q"]),
    ("delete by key", enc.delete(OID, key=["1", None, None]), "D", "K", [None] * 3,
     [b"1", None, None]),
    ("delete by full row", enc.delete(OID, old=["1", None, "q"]), "D", "O", [None] * 3,
     [b"1", None, b"q"]),
    ("UTF-8 and marker letters", enc.insert(OID, ["tNb", "ü€😀", "nK\0O"]), "I", "",
     [b"tNb", "ü€😀".encode(), b"nK\0O"], [None] * 3),
]  # fmt: skip


def columns(shape_indexes, which):
    return [[SHAPES[i][which][k] for i in shape_indexes] for k in range(3)]


def check(rows, indexes):
    assert bytes(rows.op).decode() == "".join(SHAPES[i][2] for i in indexes)
    assert [chr(k) if k else "" for k in rows.old_kind] == [SHAPES[i][3] for i in indexes]
    assert [rows.new[k].to_pylist() for k in range(len(rows.new))] == columns(indexes, 4)
    assert [rows.old[k].to_pylist() for k in range(len(rows.old))] == columns(indexes, 5)
    for column in (*rows.new, *rows.old):
        column.validate(full=True)


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=[s[0] for s in SHAPES])
@pytest.mark.parametrize("large", [False, True], ids=["binary", "large_binary"])
def test_one_message_of_each_shape(index, large):
    """One message gives its kind, its new and its old values."""
    check(decode_rows(enc.messages(SHAPES[index][1], large=large), 3), [index])


def test_shapes_may_come_in_any_mixture():
    """Messages of all shapes in one array are decoded together, row by row the same as alone."""
    indexes = chosen_random().choices(range(len(SHAPES)), k=5_000)
    check(decode_rows(enc.messages(*(SHAPES[i][1] for i in indexes)), 3), indexes)


@pytest.mark.parametrize("first,count", [(0, 4), (3, 5), (9, 1), (4, 0), (10, 0)])
def test_slices_are_read_at_their_own_offset(first, count):
    """An array sliced out of a larger one is read where it lies."""
    data = enc.messages(*(s[1] for s in SHAPES)).slice(first, count)
    check(decode_rows(data, 3), list(range(first, first + count)))


def test_blocks_join_without_a_seam(monkeypatch):
    """More rows than one block holds come out as if walked at once."""
    monkeypatch.setattr("waldelta.pgoutput.rows._BLOCK_ROWS", 7)
    indexes = list(range(len(SHAPES))) * 5
    check(decode_rows(enc.messages(*(SHAPES[i][1] for i in indexes)), 3), indexes)


def test_unchanged_is_told_apart_from_null():
    """A TOASTed value that wasn't sent is null among the values and flagged."""
    rows = decode_rows(
        enc.messages(enc.update(OID, ["1", UNCHANGED]), enc.update(OID, ["2", None])), 2
    )
    assert rows.unchanged[1].tolist() == [True, False]
    assert rows.unchanged[0].tolist() == [False, False]
    assert rows.unchanged[1].dtype == np.bool_


def test_presence_of_old_tuples():
    """Which messages have an old tuple is known without looking at its values."""
    rows = decode_rows(enc.messages(*(s[1] for s in SHAPES)), 3)
    assert rows.old.has_tuple.tolist() == [s[3] != "" for s in SHAPES]
    assert rows.new.has_tuple.tolist() == [s[2] != "D" for s in SHAPES]


def test_binary_values_are_not_taken_for_text():
    """A binary column is refused where text is expected, and given as bytes if asked for."""
    rows = decode_rows(
        enc.messages(enc.insert(OID, [Binary(b"\0\0\0\7"), "x"]), enc.insert(OID, [None, "y"])), 2
    )
    assert (rows.new.format(0), rows.new.format(1)) == ("b", "t")
    assert rows.new.values(0).to_pylist() == [b"\0\0\0\7", None]
    with pytest.raises(DecodeError, match=r"column 0.*binary format"):
        rows.new[0]
    assert rows.new[1].to_pylist() == [b"x", b"y"]


def test_mixed_formats_are_refused():
    """One column can't be text here and binary there."""
    rows = decode_rows(enc.messages(enc.insert(OID, [Binary(b"1")]), enc.insert(OID, ["1"])), 1)
    with pytest.raises(DecodeError, match="text and binary"):
        rows.new.format(0)


def test_formats_of_several_calls():
    """Each call of the slot had its own; a column that came in both is text."""
    given = enc.messages(
        enc.insert(OID, [Binary(b"1"), "x"]),
        enc.update(OID, ["2", None], old=["3", "y"]),
        enc.insert(OID, [None, "z"]),
    )
    rows = decode_rows(
        given,
        2,
        to_text=lambda _, values: pa.array([v and v * 2 for v in values.to_pylist()], pa.binary()),
        mixed_formats=True,
    )
    assert [rows.new[k].to_pylist() for k in range(2)] == [[b"11", b"2", None], [b"x", None, b"z"]]
    assert [rows.old[k].to_pylist() for k in range(2)] == [[None, b"3", None], [None, b"y", None]]


def test_streamed_rows_have_an_xid_in_front():
    """Between Stream Start and Stop an xid follows the first byte."""
    data = enc.messages(enc.insert(OID, ["1"], xid=77), enc.delete(OID, key=["2"], xid=78))
    rows = decode_rows(data, 1, streamed=True)
    assert (rows.new[0].to_pylist(), rows.old[0].to_pylist()) == ([b"1", None], [None, b"2"])


def test_tables_without_columns():
    """A table may have no columns at all."""
    rows = decode_rows(enc.messages(enc.insert(OID, [])), 0)
    assert (len(rows), len(rows.new)) == (1, 0)


INSERT = enc.insert(OID, ["12", "ab"])
MALFORMED = [
    ("empty", b"", "kind"),
    ("another kind", b"B" + INSERT[1:], "kind"),
    ("cut in the relation", INSERT[:3], "relation_id"),
    ("cut before the tuple", INSERT[:5], "tuple"),
    ("cut in the count", INSERT[:7], "new.column_count"),
    ("cut before a value", INSERT[:8], r"new\[0\].kind"),
    ("cut in a length", INSERT[:11], r"new\[0\].length"),
    ("cut in a value", INSERT[:-1], r"new\[1\].length"),
    ("trailing bytes", INSERT + b"n", "end"),
    ("fewer columns", enc.insert(OID, ["1"]), "new.column_count"),
    ("more columns", enc.insert(OID, ["1", "2", "3"]), "new.column_count"),
    ("negative length", INSERT[:9] + b"\xff\xff\xff\xff" + INSERT[13:], r"new\[0\].length"),
    ("length into the next message", INSERT[:9] + b"\0\0\1\0" + INSERT[13:], r"new\[0\].length"),
    ("unknown value kind", INSERT[:8] + b"x" + INSERT[9:], r"new\[0\].kind"),
    ("insert with a key", b"I" + enc.delete(OID, key=["1", "2"])[1:], "tuple"),
    ("insert with a key and a new row", b"I" + enc.update(OID, ["1", "2"], key=["1", None])[1:],
     "tuple"),
    ("delete with a new row", b"D" + INSERT[1:], "tuple"),
    ("update without its new row", b"U" + enc.delete(OID, key=["1", "2"])[1:], "new tuple"),
    ("delete with a new row behind", enc.delete(OID, key=["1", "2"]) + INSERT[5:], "end"),
]  # fmt: skip


@pytest.mark.parametrize("_, bad, field", MALFORMED, ids=[m[0] for m in MALFORMED])
@pytest.mark.parametrize("before, after", [(0, 0), (3, 0), (0, 3), (2, 2)])
def test_malformed_messages_are_named(_, bad, field, before, after):
    """The first malformed message stops decoding, wherever it stands, with field and byte."""
    with pytest.raises(DecodeError, match=f"{field} at byte .*row {before}") as caught:
        decode_rows(enc.messages(*[INSERT] * before, bad, *[INSERT] * after), 2)
    assert f"{len(bad)} bytes" in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [enc.insert(OID, ["zoe", "zoe"])[:-1], enc.delete(OID, key=["zoe", "zoe"])[:6] + b"zoe"],
)
def test_an_error_has_no_bytes_of_its_row(message):
    """Neither as text nor in hexadecimal: who reads an error may not be shown values."""
    with pytest.raises(DecodeError) as caught:
        decode_rows(enc.messages(message), 2)
    assert not any(
        part in repr(caught.value.detail) for part in ("zoe", b"zoe".hex(), b"zoe".hex(" "))
    )


def test_null_messages_are_refused():
    """A null among the messages is an error, not an empty row."""
    with pytest.raises(DecodeError, match="row 1"):
        decode_rows(pa.array([INSERT, None], pa.binary()), 2)


def read_tuple(message: bytes, at: int, column_count: int):
    """The values of the tuple whose count is at ``at``, and the place behind it."""
    if struct.unpack_from("!H", message, at) != (column_count,):
        raise ValueError
    at, values = at + 2, []
    for _ in range(column_count):
        kind = message[at : at + 1]
        length = struct.unpack_from("!i", message, at + 1)[0] if kind in (b"t", b"b") else None
        if kind not in (b"n", b"u", b"t", b"b") or (
            length is not None and not 0 <= length <= len(message) - at - 5
        ):
            raise ValueError
        value = message[at + 5 : at + 5 + length] if length is not None else None
        values.append(UNCHANGED if kind == b"u" else value)
        at += 1 if length is None else 5 + length
    return values, at


def reference(message: bytes, column_count: int):
    """The same by a plain loop: (op, old kind, new, old), or None when malformed."""
    op, marker, at, old, new = message[:1], message[5:6], 5, None, None
    try:
        if marker in (b"K", b"O") and op in (b"U", b"D"):
            old, at = read_tuple(message, 6, column_count)
        if op in (b"I", b"U") and message[at : at + 1] == b"N":
            new, at = read_tuple(message, at + 1, column_count)
    except (ValueError, struct.error):
        return None
    needed = old if op == b"D" else new
    if needed is None or at != len(message):
        return None
    return op, marker if old is not None else b"", new, old


def damage(rng: random.Random, message: bytes) -> bytes:
    """Cut a message, flip a byte of it, lengthen it, or leave it whole."""
    choice = rng.randrange(5)
    if choice == 0:
        return message[: rng.randrange(len(message) + 1)]
    if choice == 1:
        return message + rng.randbytes(rng.randrange(1, 6))
    if choice == 4:
        return message
    at = rng.randrange(len(message))
    return (
        message[:at]
        + bytes([rng.choice([0, 255, 127, 128, rng.randrange(256), *b"nutbKON"])])
        + message[at + 1 :]
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_damaged_messages_never_become_wrong_rows(streamed):
    """Damaged bytes end in DecodeError or in exactly the rows a plain loop reads."""
    rng = chosen_random()
    refused = 0
    tries = rounds(1_500)
    for _ in tries:
        given = [rng.choice(SHAPES)[1] for _ in range(rng.randrange(1, 5))]
        at = rng.randrange(len(given))
        given[at] = damage(rng, given[at])
        expected = [reference(message, 3) for message in given]
        # Behind the first byte a streamed message has its xid; damage there is another message's.
        sent = [
            message[:1] + b"\0\0\0\7" * streamed + message[1:] if message else message
            for message in given
        ]
        data = enc.messages(enc.insert(1, ["x"]), *sent, large=rng.random() < 0.2).slice(1)
        if None in expected:
            refused += 1
            with pytest.raises(DecodeError, match=f"row {expected.index(None)}"):
                decode_rows(data, 3, streamed=streamed)
            continue
        rows = decode_rows(data, 3, streamed=streamed)
        for row, (op, old_kind, new, old) in enumerate(expected):
            assert (chr(rows.op[row]), rows.old_kind[row]) == (
                op.decode(),
                old_kind[0] if old_kind else 0,
            )
            for which, values in ((rows.new, new), (rows.old, old)):
                got = [
                    UNCHANGED if which.unchanged(k)[row] else which.values(k)[row].as_py()
                    for k in range(3)
                ]
                assert got == (values or [None] * 3)
    assert refused > len(tries) * 200 / 1500


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

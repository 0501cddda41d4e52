"""Arrays and ranges in binary format, from bytes that are made here."""

import struct

import pyarrow as pa
import pytest

from tests.support.seeds import chosen_random, rounds
from waldelta.errors import DecodeError
from waldelta.postgres import PgType
from waldelta.types.wire.wire_format import has_wire_format, text_of, wire_name

INT4, TEXT = PgType(23, -1, "integer", type_name="int4"), PgType(25, -1, "text", type_name="text")


def array(elements, bounds=None):
    """array_send of int4 values; ``bounds`` are sizes and lower bounds, by default one."""
    bounds = ([(len(elements), 1)] if elements else []) if bounds is None else bounds
    body = b"".join(
        struct.pack("!i", -1) if v is None else struct.pack("!ii", 4, v) for v in elements
    )
    return (
        struct.pack("!iiI", len(bounds), int(None in elements), 23)
        + b"".join(struct.pack("!ii", *b) for b in bounds)
        + body
    )


CASES = [
    (array([]), "{}"),
    (array([1, None, -3]), "{1,NULL,-3}"),
    (array([None]), "{NULL}"),
    (array([1, 2], [(2, 0)]), "[0:1]={1,2}"),
    (array([1, 2, 3, None], [(2, 1), (2, 1)]), "{{1,2},{3,NULL}}"),
    (array([1, 2, 3, 4], [(2, -1), (2, 5)]), "[-1:0][5:6]={{1,2},{3,4}}"),
    (array(list(range(3000))), "{" + ",".join(map(str, range(3000))) + "}"),
]


@pytest.mark.parametrize("copies", [1, 50])
def test_arrays(copies):
    """Of any shape, alone and among many, with nulls between and a slice's offset."""
    given = [value for sent, _ in CASES for value in (sent, None)] * copies
    expected = [value for _, text in CASES for value in (text.encode(), None)] * copies
    assert (
        text_of(pa.array([b"junk", *given], pa.binary()).slice(1), "int4[]").to_pylist() == expected
    )
    for sent, text in CASES:
        assert text_of(pa.array([sent], pa.binary()), "int4[]").to_pylist() == [text.encode()]


@pytest.mark.parametrize(
    "name, sent",
    [
        ("int4[]", b""),
        ("int4[]", array([1])[:-1]),
        ("int4[]", array([1]) + b"\0"),
        ("int4[]", struct.pack("!iiIii", 1, 0, 23, 1 << 30, 1)),
        ("int4[]", struct.pack("!iiIii", 1, 0, 23, -1, 1)),
        ("int4[]", struct.pack("!iiI", 7, 0, 23) + b"\0" * 56),
        ("int4[]", struct.pack("!iiIiii", 1, 0, 23, 1, 1, -2)),
        ("text[]", struct.pack("!iiIiii", 1, 0, 25, 1, 1, 1) + b"\xff"),
        ("int4range", b""),
        ("int4range", b"\0" + struct.pack("!i", -1) * 2),
        ("int4range", b"\2" + struct.pack("!ii", 4, 1)),
        ("int4multirange", struct.pack("!ii", 1, -1)),
        ("int4multirange", struct.pack("!i", 1 << 30)),
    ],
)
def test_malformed(name, sent):
    """A named error, without memory for what the bytes only claim."""
    for given in ([sent], [None, sent] * 30):
        with pytest.raises(DecodeError, match="value at byte"):
            text_of(pa.array(given, pa.binary()), name)


def test_damage_never_crashes():
    """Whatever is cut, flipped or added: a named error, or the others' texts as ever."""
    rng = chosen_random()
    for _ in rounds(500):
        chosen = [rng.choice(CASES[:6]) for _ in range(rng.choice([1, 3, 40]))]
        given = [sent for sent, _ in chosen]
        at = rng.randrange(len(given))
        value = bytearray(given[at])
        value[rng.randrange(len(value))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        given[at] = bytes(value)[: rng.choice([len(value), rng.randrange(len(value))])]
        try:
            found = text_of(pa.array(given, pa.binary()), "int4[]").to_pylist()
        except DecodeError:
            continue
        assert [f for k, f in enumerate(found) if k != at] == [
            t.encode() for k, (_, t) in enumerate(chosen) if k != at
        ]


@pytest.mark.parametrize(
    "kind, name, is_read",
    [
        (INT4, "int4", True),
        (PgType(1, -1, "integer[]", kind="array", type_name="_int4", element=INT4), "int4[]", True),
        (PgType(1, -1, "d[]", kind="array", element=PgType(2, -1, "d", kind="domain", base=TEXT)),
         "text[]", True),
        (PgType(1, -1, "mood[]", kind="array", element=PgType(2, -1, "mood", kind="enum")),
         "enum[]", True),
        (PgType(1, -1, "public.pair", kind="composite", type_name="pair", type_schema="public"),
         "public.pair", False),
        (PgType(1, -1, "regclass", type_name="regclass"), "regclass", False),
        (PgType(1, -1, "r", kind="range", type_name="int4range", type_schema="public"),
         "public.int4range", False),
    ],
    ids=str,
)  # fmt: skip
def test_names(kind, name, is_read):
    """Only the types that are meant are read, however a user's own are called."""
    assert (wire_name(kind), has_wire_format(kind)) == (name, is_read)

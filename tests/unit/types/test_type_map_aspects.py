"""What each type of the lake answers besides its values: none lacks an answer."""

import pytest

from tests.support.data.pg_types import (
    ANY_NUMERIC,
    AS_DECIMAL,
    AS_DOUBLE,
    AS_VARIANT,
    ENUM,
    HSTORE,
    INT4,
    JSONB,
    VECTOR,
    array_of,
    numeric,
)
from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.postgres import PgType
from waldelta.types.type_map import _STORED, BUILT_INS, key_type, stored_type, target_type

# What may be true of a type, and what is.
ASPECTS = ("is_fixed_size", "is_number", "is_text", "has_one_form", "prints_alike")
BUILT_IN = {
    16: "is_fixed_size has_one_form prints_alike", 17: "has_one_form", 18: "is_text", 19: "is_text",
    20: "is_fixed_size is_number has_one_form prints_alike",
    21: "is_fixed_size is_number has_one_form prints_alike",
    23: "is_fixed_size is_number has_one_form prints_alike", 25: "is_text",
    700: "is_fixed_size is_number has_one_form", 701: "is_fixed_size is_number has_one_form",
    1042: "is_text", 1043: "is_text", 1082: "is_fixed_size has_one_form prints_alike",
    1114: "is_fixed_size has_one_form prints_alike",
    1184: "is_fixed_size has_one_form prints_alike", 2950: "is_text",
}  # fmt: skip
OTHERS = [
    (numeric(12, 2), DEFAULT_TYPES, "is_number has_one_form"),
    (ANY_NUMERIC, DEFAULT_TYPES, "is_text"),
    (ANY_NUMERIC, AS_DECIMAL, "is_number has_one_form"),
    (ANY_NUMERIC, AS_DOUBLE, "is_number has_one_form"),
    (JSONB, AS_VARIANT, ""),
    (ENUM, DEFAULT_TYPES, "is_text"),
    (HSTORE, DEFAULT_TYPES, ""),
    (VECTOR, DEFAULT_TYPES, ""),
    (array_of(INT4), DEFAULT_TYPES, ""),
]


CASES = [(PgType(oid, -1, str(oid)), DEFAULT_TYPES, told) for oid, told in BUILT_IN.items()]


def test_every_type_is_asked():
    assert list(BUILT_IN) == [built_in.oid for built_in in BUILT_INS]
    asked = [target_type(pg_type, options).ledger_name for pg_type, options, _ in [*CASES, *OTHERS]]
    assert _STORED.keys() <= set(asked)


@pytest.mark.parametrize(("pg_type", "options", "expected"), [*CASES, *OTHERS], ids=str)
def test_what_a_type_says_of_itself(pg_type, options, expected):
    kind = target_type(pg_type, options)
    assert [aspect for aspect in ASPECTS if getattr(kind, aspect)] == expected.split()


# The oid and the type in the ledger of a foreign key's column and of the one that it refers to.
REFERENCES = [
    ((23, "int"), (23, "int"), "same"),
    ((21, "smallint"), (20, "bigint"), "integer"),
    ((23, "int"), (1700, "decimal(9,2)"), "number"),
    ((1700, "decimal(9,2)"), (1700, "decimal(12,4)"), "number"),
    ((1700, "decimal(9,2)"), (1700, "decimal(9,2)"), "same"),
    ((1700, "string"), (1700, "string"), None),
    ((1700, "numeric as double"), (1700, "numeric as double"), "same"),
    ((1700, "numeric as double"), (701, "double"), "same"),
    ((23, "int"), (701, "double"), None),
    ((700, "float"), (701, "double"), None),
    ((701, "double"), (701, "double"), "same"),
    ((16, "boolean"), (16, "boolean"), "same"),
    ((17, "binary"), (17, "binary"), "same"),
    ((1082, "date"), (1082, "date"), "same"),
    ((1082, "date"), (1114, "timestamp_ntz"), None),
    ((1114, "timestamp_ntz"), (1184, "timestamp"), None),
    ((1082, "string"), (1082, "string"), "same"),
    ((1082, "string"), (1082, "date"), None),
    ((23, "string"), (20, "string"), None),
    ((17, "string"), (17, "string"), None),
    ((701, "string"), (701, "string"), None),
    ((2950, "string"), (2950, "string"), "same"),
    ((2950, "string"), (25, "string"), None),
    ((869, "string"), (869, "string"), None),
    ((18, "string"), (19, "string"), "same"),
    ((25, "string"), (1043, "string"), "same"),
    ((25, "string"), (1042, "string"), "padded"),
    ((1042, "string"), (1042, "string"), "padded"),
    ((1042, "string"), (19, "string"), "own padded"),
    ((1007, "array<int>"), (1007, "array<int>"), None),
    ((90_000, "map<string,string>"), (90_000, "map<string,string>"), None),
    ((3802, "variant"), (3802, "variant"), None),
]


@pytest.mark.parametrize(("own", "there", "expected"), REFERENCES, ids=str)
def test_how_a_foreign_key_is_compared(own, there, expected):
    left, right = (key_type(oid, stored_type(name)) for oid, name in (own, there))
    assert left.compared_with(right) == expected

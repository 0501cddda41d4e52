"""What each type of the lake answers to those who ask for more than its values: no type is left
without an answer.
"""

from __future__ import annotations

import pytest

from tests.unit.types.test_type_map import (
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
from waldelta.types.type_map import _SCALARS, target_type

# What may be true of a type, and what is.
ASPECTS = ("is_fixed_size", "is_number", "is_text")
BUILT_IN = {
    16: "is_fixed_size",
    17: "",
    20: "is_fixed_size is_number",
    21: "is_fixed_size is_number",
    23: "is_fixed_size is_number",
    25: "is_text",
    700: "is_fixed_size is_number",
    701: "is_fixed_size is_number",
    1043: "is_text",
    1082: "is_fixed_size",
    1114: "is_fixed_size",
    1184: "is_fixed_size",
}
OTHERS = [
    (numeric(12, 2), DEFAULT_TYPES, "is_number"),
    (ANY_NUMERIC, DEFAULT_TYPES, "is_text"),
    (ANY_NUMERIC, AS_DECIMAL, "is_number"),
    (ANY_NUMERIC, AS_DOUBLE, "is_number"),
    (JSONB, AS_VARIANT, ""),
    (ENUM, DEFAULT_TYPES, "is_text"),
    (HSTORE, DEFAULT_TYPES, ""),
    (VECTOR, DEFAULT_TYPES, ""),
    (array_of(INT4), DEFAULT_TYPES, ""),
]


def test_every_built_in_type_is_asked():
    assert BUILT_IN.keys() == _SCALARS.keys()


CASES = [(PgType(oid, -1, str(oid)), DEFAULT_TYPES, told) for oid, told in BUILT_IN.items()]


@pytest.mark.parametrize(("pg_type", "options", "expected"), [*CASES, *OTHERS], ids=str)
def test_what_a_type_says_of_itself(pg_type, options, expected):
    kind = target_type(pg_type, options)
    assert [aspect for aspect in ASPECTS if getattr(kind, aspect)] == expected.split()

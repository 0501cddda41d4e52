"""What each type of the lake answers to those who ask for more than its values: no type is left
without an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Aspects:
    """A new field here needs an answer for every type."""

    is_fixed_size: bool


BUILT_IN = {
    16: Aspects(True),
    17: Aspects(False),
    20: Aspects(True),
    21: Aspects(True),
    23: Aspects(True),
    25: Aspects(False),
    700: Aspects(True),
    701: Aspects(True),
    1043: Aspects(False),
    1082: Aspects(True),
    1114: Aspects(True),
    1184: Aspects(True),
}
OTHERS = [
    (numeric(12, 2), DEFAULT_TYPES, Aspects(False)),
    (ANY_NUMERIC, DEFAULT_TYPES, Aspects(False)),
    (ANY_NUMERIC, AS_DECIMAL, Aspects(False)),
    (ANY_NUMERIC, AS_DOUBLE, Aspects(False)),
    (JSONB, AS_VARIANT, Aspects(False)),
    (ENUM, DEFAULT_TYPES, Aspects(False)),
    (HSTORE, DEFAULT_TYPES, Aspects(False)),
    (VECTOR, DEFAULT_TYPES, Aspects(False)),
    (array_of(INT4), DEFAULT_TYPES, Aspects(False)),
]


def test_every_built_in_type_is_asked():
    assert BUILT_IN.keys() == _SCALARS.keys()


CASES = [(PgType(oid, -1, str(oid)), DEFAULT_TYPES, told) for oid, told in BUILT_IN.items()]


@pytest.mark.parametrize(("pg_type", "options", "expected"), [*CASES, *OTHERS], ids=str)
def test_what_a_type_says_of_itself(pg_type, options, expected):
    kind = target_type(pg_type, options)
    assert Aspects(*(getattr(kind, aspect) for aspect in expected.__dataclass_fields__)) == expected

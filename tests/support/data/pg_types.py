"""Types of PostgreSQL, and options for them."""

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from waldelta.config import TypeOptions
from waldelta.postgres import PgType
from waldelta.types import TargetType


def numeric(precision, scale):
    return PgType(1700, ((precision << 16) | (scale & 0x7FF)) + 4, f"numeric({precision},{scale})")


def array_of(element, oid=1_000_000):
    return PgType(oid, element.typmod, f"{element.name}[]", kind="array", element=element)


def domain_over(base):
    return PgType(20_000, -1, "d", kind="domain", base=base)


BOOL, BYTEA = PgType(16, -1, "boolean"), PgType(17, -1, "bytea")
INT4, TEXT = PgType(23, -1, "integer"), PgType(25, -1, "text")
FLOAT4, FLOAT8 = PgType(700, -1, "real"), PgType(701, -1, "double precision")
DATE, TIMESTAMP = PgType(1082, -1, "date"), PgType(1114, -1, "timestamp")
TIMESTAMPTZ = PgType(1184, -1, "timestamptz")
BOX = PgType(603, -1, "box", type_name="box")
POINT = PgType(600, -1, "point", type_name="point", element=FLOAT8)
ENUM = PgType(20_001, -1, "mood", kind="enum", type_name="mood", type_schema="public")
HSTORE = PgType(20_002, -1, "public.hstore", type_name="hstore", type_schema="public")
VECTOR = PgType(20_003, 3, "public.vector(3)", type_name="vector", type_schema="public")
GEOMETRY = PgType(20_004, -1, "public.geometry", type_name="geometry", type_schema="public")


def texts(*values):
    return pa.array([None if v is None else v.encode() for v in values], pa.binary())


ANY_NUMERIC = PgType(1700, -1, "numeric")
JSON, JSONB = PgType(114, -1, "json"), PgType(3802, -1, "jsonb")
AS_DOUBLE, AS_DECIMAL = TypeOptions(numeric="double"), TypeOptions(numeric="decimal(38,4)")
AS_VARIANT = TypeOptions(json="variant")


@dataclass(frozen=True)
class Mask(TargetType):
    """Texts in place of a column's values; a mask says which, by ``read``."""

    may_be_raw = False
    keeps_value = False

    spark: str = "string"
    arrow: Any = field(default_factory=pa.string)

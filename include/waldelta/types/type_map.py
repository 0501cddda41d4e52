"""Maps PostgreSQL types to types in the lake, the same for the initial copy and for the stream."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

from waldelta.config import TypeOptions
from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.errors import LakeError
from waldelta.postgres import NUMERIC_OID, PgType
from waldelta.types.array import Array
from waldelta.types.base import TargetType
from waldelta.types.binary import Bytea
from waldelta.types.datetime import Moment
from waldelta.types.hstore import Hstore
from waldelta.types.json import Variant
from waldelta.types.numeric import (
    Boolean,
    Decimal,
    Float,
    Number,
    NumericAsDouble,
    NumericAsText,
    decimal,
    scaled_decimal,
)
from waldelta.types.text import Characters, Text


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in type: its oid and name in pg_type, and the name that format_type() prints."""

    oid: int
    name: str
    printed: str
    stored: TargetType


_BOX_OID = 603
_JSON, _JSONB, _UUID = 114, 3802, 2950
_FLOAT = Float("float", pa.float32(), "float4")
BUILT_INS = (
    BuiltIn(16, "bool", "boolean", Boolean()),
    BuiltIn(17, "bytea", "bytea", Bytea()),
    BuiltIn(18, "char", '"char"', Characters()),
    BuiltIn(19, "name", "name", Characters()),
    BuiltIn(20, "int8", "bigint", Number("bigint", pa.int64(), "int8")),
    BuiltIn(21, "int2", "smallint", Number("smallint", pa.int16(), "int2")),
    BuiltIn(23, "int4", "integer", Number("int", pa.int32(), "int4")),
    BuiltIn(25, "text", "text", Characters(is_plain=True)),
    BuiltIn(700, "float4", "real", _FLOAT),
    BuiltIn(701, "float8", "double precision", Float("double", pa.float64(), "float8")),
    BuiltIn(1042, "bpchar", "character", Characters(is_padded=True)),
    BuiltIn(1043, "varchar", "character varying", Characters(is_plain=True)),
    BuiltIn(1082, "date", "date", Moment("date", pa.date32(), "date")),
    BuiltIn(
        1114,
        "timestamp",
        "timestamp without time zone",
        Moment("timestamp_ntz", pa.timestamp("us"), "timestamp"),
    ),
    BuiltIn(
        1184,
        "timestamptz",
        "timestamp with time zone",
        Moment("timestamp", pa.timestamp("us", "UTC"), "timestamptz"),
    ),
    BuiltIn(_UUID, "uuid", "uuid", Text(type_oid=_UUID)),
)
_SCALARS = {built_in.oid: built_in.stored for built_in in BUILT_INS}
_TEXT = Text()
# The types that stored_type() returns, by their names in the ledger; it makes arrays and decimals.
_STORED = {
    kind.ledger_name: kind
    for kind in (*_SCALARS.values(), _TEXT, Hstore(), Variant(), NumericAsDouble())
}
# Arrays of arrays are stored as text.
_ARRAY = re.compile(r"array<((?!array)[^<>]+)>")
_DECIMAL = re.compile(r"decimal\(([1-9]|[12]\d|3[0-8]),\s*(\d|[12]\d|3[0-8])\)", re.ASCII)
# Built-in types with elements that don't print as arrays do.
_NOT_ARRAYS = frozenset({"int2vector", "oidvector", "point", "lseg", "box", "line", "name"})
_VECTORS = frozenset({"vector", "halfvec"})
_FIRST_USER_OID = 16384


def column_types(
    types: Mapping[str, PgType], key_columns: Collection[str], options: TypeOptions
) -> dict[str, TargetType]:
    """Returns the target type of each column, by name.

    Columns in ``options.text`` become strings. So do a key's JSON and hstore, never a variant or a
    map, which have no equality. Without a key, this holds for the JSON of all columns.
    """
    stored = {}
    for name, kind in types.items():
        is_key = name in key_columns
        comparable = options.comparable if is_key or not key_columns else options
        stored[name] = target_type(kind, comparable)
        if name in options.text or (is_key and isinstance(stored[name], Hstore)):
            stored[name] = _as_text((kind.base or kind).oid)
    return stored


def unheld_key(name: str, kind: TargetType) -> str:
    """Returns the message for a key column's value that its type in the lake can't hold.

    Rows are identified by the key.
    """
    return (
        f"key column {name!r} has a value that {kind.spark} can't hold, such as infinity or NaN:"
        " name the column under types.text in the pipeline file, so that it is a string in the"
        " lake, and sync the table again; or leave such rows out by a row filter; or correct such"
        " rows on the source and sync the table again"
    )


@cache
def target_type(pg_type: PgType, options: TypeOptions = DEFAULT_TYPES) -> TargetType:
    """Returns the type of a column of ``pg_type``; types without a counterpart in the lake stay
    text.

    >>> target_type(PgType(1700, ((12 << 16) | 2) + 4, "numeric(12,2)")).spark
    'decimal(12,2)'
    """
    if pg_type.base is not None:
        return target_type(pg_type.base, options)
    if pg_type.oid in _SCALARS:
        return _SCALARS[pg_type.oid]
    if pg_type.oid == NUMERIC_OID:
        return decimal(pg_type.typmod) or _unlimited_numeric(options)
    if pg_type.oid in (_JSON, _JSONB) and options.json_type == "variant":
        return Variant(may_repeat_keys=pg_type.oid == _JSON)
    if pg_type.element is not None and pg_type.type_name not in _NOT_ARRAYS:
        # Arrow has no lists of variants, and only the whole value could be raw.
        return _array(pg_type.element, options.comparable)
    return _extension(pg_type)


def _unlimited_numeric(options: TypeOptions) -> TargetType:
    if options.numeric_scale is not None:
        return scaled_decimal(options.numeric_scale)
    return NumericAsDouble() if options.numeric == "double" else NumericAsText()


def _as_text(oid: int) -> Text:
    if oid == NUMERIC_OID:
        return NumericAsText()
    kind = _SCALARS.get(oid, _TEXT)
    text = Text(type_oid=oid) if kind.prints_alike else _TEXT
    return kind if isinstance(kind, Text) else text


def _extension(pg_type: PgType) -> TargetType:
    # Types of extensions have other oids in every database, so they are recognised by name.
    if pg_type.kind != "base" or pg_type.oid < _FIRST_USER_OID:
        return _TEXT
    if pg_type.type_name == "hstore":
        return Hstore()
    if pg_type.type_name in _VECTORS:
        return Array("array<float>", pa.list_(pa.float32()), _FLOAT, brackets="[]")
    return _TEXT


def _array(element: PgType, options: TypeOptions) -> TargetType:
    """Returns an array's type; text where arrays have nested elements, or their own delimiter."""
    scalar = target_type(element, options)
    innermost = element.base or element
    # A base type of an extension may print its arrays with its own delimiter, as PostGIS does.
    is_foreign = innermost.kind == "base" and innermost.oid >= _FIRST_USER_OID
    if is_foreign or isinstance(scalar, Array | Hstore):
        return _TEXT
    delimiter = ";" if innermost.oid == _BOX_OID else ","
    return Array(f"array<{scalar.spark}>", pa.list_(scalar.arrow), scalar, delimiter)


@cache
def stored_type(name: str) -> TargetType:
    """Returns a column's type by its ``ledger_name``, or by its name in Spark.

    It is for stored values. Reading texts, and PostgreSQL's equality, need what target_type()
    returns, since a domain's name doesn't say what it is based on. Raises LakeError for a type that
    waldelta doesn't store.

    >>> [stored_type(name).may_be_raw for name in ("numeric as double", "double")]
    [True, False]
    """
    if (array := _ARRAY.fullmatch(name)) is not None:
        element = stored_type(array[1])
        return Array(f"array<{element.spark}>", pa.list_(element.arrow), element)
    if limits := _DECIMAL.fullmatch(name):
        precision, scale = (int(limit) for limit in limits.groups())
        return Decimal(name, pa.decimal128(precision, scale))
    if (kind := _STORED.get(name)) is None:
        raise LakeError(
            f"the ledger has a column of type {name!r}, which waldelta doesn't store: find"
            " out which program wrote it, and copy the table again (sync --tables)"
        )
    return kind


def key_type(base_oid: int, stored: TargetType) -> TargetType:
    """Returns the type of a foreign key's column by the oid of its type, of a domain its base type,
    and by its type in the lake.

    >>> number, text, padded = (key_type(oid, _SCALARS[oid]) for oid in (23, 25, 1042))
    >>> number.compared_with(key_type(20, stored_type("bigint")))
    'integer'
    >>> text.compared_with(padded), padded.compared_with(text)
    ('padded', 'own padded')
    >>> numeric = key_type(1700, stored_type("string"))
    >>> numeric.compared_with(numeric) is None  # 1.0 and 1.00
    True
    """
    return _as_text(base_oid) if stored.is_text else stored

"""Turns values in PostgreSQL's binary format into the text of the output functions, by whole
columns.

Events carry text (docs/explanation/decisions/0004), and one reading of text serves both formats.
A value that its Delta type can't hold needs exactly PostgreSQL's text; any other text only has to
read back as the same value. The readers of type families are in ``waldelta.types.wire``.
"""

from __future__ import annotations

from collections.abc import Callable

from waldelta.errors import DecodeError
from waldelta.pgoutput.byte_readers import ArrowArray, Mask, Messages
from waldelta.postgres import PgType
from waldelta.types.wire import _datetime as moment
from waldelta.types.wire import _network as network
from waldelta.types.wire import _numeric as number
from waldelta.types.wire import _text as text
from waldelta.types.wire._nested import (
    ElementReader,
    array_text,
    multirange_text,
    range_text,
    vector_text,
)
from waldelta.types.wire._values import Converter, read_with

_SCALARS: dict[str, Converter] = {
    **text.CONVERTERS,
    **number.CONVERTERS,
    **moment.CONVERTERS,
    **network.CONVERTERS,
}
# Converters to PostgreSQL's exact text; the others' texts are only read as the same value.
_EXACT: dict[str, Converter] = {**number.EXACT, **moment.EXACT}
_RANGES = {
    "int4range": "int4",
    "int8range": "int8",
    "numrange": "numeric",
    "tsrange": "timestamp",
    "tstzrange": "timestamptz",
    "daterange": "date",
}
_MULTIRANGES = {name.replace("range", "multirange"): name for name in _RANGES}
_VECTORS = {"int2vector": "int2", "oidvector": "oid"}
_ARRAY = "[]"


def wire_name(pg_type: PgType) -> str:
    """Returns the name by which text_of() knows a type.

    It is a domain's base type, ``enum`` for every enum, ``int4[]`` for an array.
    """
    base = pg_type.base or pg_type
    if base.kind == "enum":
        return "enum"
    if base.element is not None and base.kind == "array":
        return wire_name(base.element) + _ARRAY
    return (
        base.type_name
        if base.type_schema == "pg_catalog"
        else f"{base.type_schema}.{base.type_name}"
    )


def has_wire_format(pg_type: PgType) -> bool:
    """Returns whether values of this type can be read in binary format."""
    return _converter(wire_name(pg_type), is_exact=False) is not None


def text_of(values: ArrowArray, type_name: str, *, is_exact: bool = False) -> ArrowArray:
    """Returns the texts of binary values, as binary; nulls stay null.

    ``type_name`` is from wire_name(). ``is_exact``: PostgreSQL's exact text, for columns that stay
    text in the lake. Raises DecodeError for a type without a reader and for values that don't have
    the type's size or form.
    """
    convert = _converter(type_name, is_exact=is_exact)
    if convert is None:
        raise DecodeError(
            "row",
            "value",
            0,
            f"type {type_name} came in binary format: set options.binary to false",
        )
    return read_with(convert, values, type_name)


def _converter(name: str, *, is_exact: bool) -> Converter | None:
    if name.endswith(_ARRAY):
        element = name.removesuffix(_ARRAY)
        delimiter = ";" if element == "box" else ","
        return _nested_converter(
            element,
            lambda values, valid, read: array_text(values, valid, read, delimiter),
            is_exact=is_exact,
        )
    if name in _VECTORS:
        return _nested_converter(_VECTORS[name], vector_text)
    if name in _RANGES:
        return _nested_converter(_RANGES[name], range_text)
    if name in _MULTIRANGES:
        return _nested_converter(_MULTIRANGES[name], multirange_text)
    return (_EXACT.get(name) if is_exact else None) or _SCALARS.get(name)


def _nested_converter(
    inner: str,
    convert: Callable[[Messages, Mask, ElementReader], ArrowArray],
    *,
    is_exact: bool = False,
) -> Converter | None:
    plain, exact = (_converter(inner, is_exact=flag) for flag in (False, True))
    if plain is None or exact is None:
        return None
    if is_exact or inner in moment.EXACT:
        # With one infinite or BC timestamp, the whole array is raw.
        plain = exact

    def read(values: ArrowArray, is_exact: bool) -> ArrowArray:
        return read_with(exact if is_exact else plain, values, inner)

    return lambda values, valid: convert(values, valid, read)

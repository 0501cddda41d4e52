"""Canonical texts: represent a value in a checksum, computed by PostgreSQL from the source and by
Arrow from the lake.

Equal texts mean that a copy of the value taken now would equal the target's. Usually it is what
PostgreSQL prints. Floats and moments are their bits in hexadecimal, which is faster than printing
and independent of digits. A numeric without a scale has no trailing zeros. An array is its
elements' texts, joined. A value that the lake's type can't store is PostgreSQL's text on both
sides: the target has it in ``_wd_raw``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal as Exact
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg import sql

from waldelta.arrow import storage
from waldelta.pgoutput.byte_readers import ArrowArray, arrow_buffer
from waldelta.types import TargetType
from waldelta.types.array import Array
from waldelta.types.base import printed, validity
from waldelta.types.binary import Bytea
from waldelta.types.datetime import Moment
from waldelta.types.hstore import Hstore
from waldelta.types.json import Variant
from waldelta.types.numeric import Boolean, Decimal, Number, NumericAsDouble
from waldelta.types.text import Text

_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_HEX = np.stack([np.repeat(_DIGITS, 16), np.tile(_DIGITS, 16)], axis=1)
# PostgreSQL's epoch is 2000, Arrow's 1970.
_DAYS, _MICROSECONDS = 10_957, 946_684_800_000_000
_NANS = {
    4: (np.uint32(0x7F800000), np.uint32(0x7FC00000)),
    8: (np.uint64(0x7FF << 52), np.uint64(0xFFF << 51)),
}
# Of a decimal's scale: with more digits, Arrow prints small values with an exponent.
_EXACT_DIGITS = 6
# True for a numeric that changes when cast to double; one outside a double's range can't be cast.
_ROUNDED = (
    "case when {0} in ('NaN', 'Infinity', '-Infinity', 0) then false when pg_catalog.abs({0})"
    " between 5e-324 and 1.79e308 then {0}::pg_catalog.float8::text::pg_catalog.numeric <> {0} else"
    " {0} is not null end"
)
_FUNCTION_ARGUMENTS = 90  # PostgreSQL takes at most 100.


@dataclass(frozen=True, slots=True)
class Marks:
    """Separators between values and between elements, and the text for null, drawn for each run.

    No value can contain them on purpose, so rows with different values never have the same text.
    """

    between: str
    null: str
    element: str

    @classmethod
    def drawn(cls, nonce: str) -> Marks:
        """Returns marks with a few characters of the run's nonce."""
        return cls(f"\x1f{nonce}", f"\x1e{nonce}", f"\x1d{nonce}")


def is_comparable(kind: TargetType) -> bool:
    """Returns whether both sides can produce the same text.

    A variant's text differs from the document that PostgreSQL prints.
    """
    return not isinstance(kind, Variant)


# PostgreSQL's side


def source_text(
    columns: Sequence[tuple[sql.Composable, TargetType]], marks: Marks, *, raw: bool
) -> sql.Composable:
    """Returns the SQL of a row's text, from these columns.

    Without ``raw``, a value that the lake can't store is null in the target.
    """
    values = [_source_value(column, kind, marks, raw=raw) for column, kind in columns]
    while len(values) > _FUNCTION_ARGUMENTS:
        groups = [
            values[n : n + _FUNCTION_ARGUMENTS] for n in range(0, len(values), _FUNCTION_ARGUMENTS)
        ]
        values = [_joined(group, marks) for group in groups]
    return _joined(values, marks)


def _joined(values: Sequence[sql.Composable], marks: Marks) -> sql.Composable:
    return sql.SQL("pg_catalog.concat_ws({}, {})").format(
        sql.Literal(marks.between), sql.SQL(", ").join(values)
    )


def _source_value(
    column: sql.Composable, kind: TargetType, marks: Marks, *, raw: bool
) -> sql.Composable:
    """Returns the text of one value, with the mark of null for null."""
    value, unheld = _source_texts(column, kind, marks)
    null = sql.Literal(marks.null)
    if unheld is not None:
        other = printed(column) if raw else sql.SQL("null")
        value = sql.SQL("case when {} then {} else {} end").format(unheld, other, value)
    return sql.SQL("coalesce({}, {})").format(value, null)


def _source_texts(
    column: sql.Composable, kind: TargetType, marks: Marks
) -> tuple[sql.Composable, sql.Composable | None]:
    """Returns the text of a value that its lake type can store (null for null), and the condition
    that it can't.
    """
    match kind:
        case Moment():
            return _source_moment(column, kind)
        case Decimal():
            return _source_decimal(column, kind)
        case Array():
            return _source_array(column, kind, marks)
    return _source_plain(column, kind), None


def _source_plain(column: sql.Composable, kind: TargetType) -> sql.Composable:
    """Returns the text of a value of any content."""
    match kind:
        case Number(name="float4" | "float8"):
            return _source_float(column, kind)
        case NumericAsDouble():
            # With any number of digits the text is the same whether a double can store it or not.
            return sql.SQL("pg_catalog.trim_scale({}::pg_catalog.numeric)::text").format(column)
        case Text(is_plain=True) | Number() | Bytea():
            return sql.SQL("{}::text").format(column)
    return printed(column)


def _source_moment(column: sql.Composable, kind: Moment) -> tuple[sql.Composable, sql.Composable]:
    _, outside = kind.copy_expressions(column)
    sent = sql.SQL("pg_catalog.{}({}::pg_catalog.{})::text").format(
        sql.Identifier(f"{kind.name}_send"), column, sql.Identifier(kind.name)
    )
    return sent, sql.SQL("({}) is not null").format(outside)


def _source_float(column: sql.Composable, kind: Number) -> sql.Composable:
    # Floats have many NaN bit patterns.
    return sql.SQL(
        "pg_catalog.{send}(case when {column} = 'NaN' then 'NaN'::pg_catalog.{name} else {column}"
        " end)::text"
    ).format(send=sql.Identifier(f"{kind.name}send"), column=column, name=sql.Identifier(kind.name))


def _source_decimal(
    column: sql.Composable, kind: Decimal
) -> tuple[sql.Composable, sql.Composable | None]:
    value = sql.SQL("{}::pg_catalog.numeric").format(column)
    # NaN is greater than every number.
    limit, scale = (
        sql.SQL(f"1e{kind.arrow.precision - kind.arrow.scale}"),
        sql.SQL(str(kind.arrow.scale)),
    )
    unheld = sql.SQL(
        "pg_catalog.abs({v}) >= {limit} or {v} <> pg_catalog.round({v}, {scale})"
    ).format(v=value, limit=limit, scale=scale)
    return sql.SQL("pg_catalog.round({}, {})::text").format(value, scale), unheld


def _source_array(
    column: sql.Composable, kind: Array, marks: Marks
) -> tuple[sql.Composable, sql.Composable | None]:
    if kind.brackets != "{}":  # The column is a vector, which is always plain.
        column = sql.SQL("{}::pg_catalog.float4[]").format(column)
    element = sql.SQL("({})[_wd_i]").format(column)
    value, unheld = _source_texts(element, kind.element, marks)
    if isinstance(kind.element, NumericAsDouble):
        unheld = sql.SQL(_ROUNDED).format(element)
    texts = sql.SQL(
        "(select coalesce(pg_catalog.string_agg(coalesce({value}, {null}) || {mark}, '' order by"
        " _wd_i), '') from pg_catalog.generate_subscripts({column}, 1) _wd_i)"
    ).format(
        value=value, null=sql.Literal(marks.null), mark=sql.Literal(marks.element), column=column
    )
    joined = sql.SQL("case when {} is not null then '[' || {} || ']' end").format(column, texts)
    plain = sql.SQL(
        "(pg_catalog.array_ndims({c}) > 1 or pg_catalog.array_lower({c}, 1) <> 1)"
    ).format(c=column)
    if unheld is None:
        return joined, plain
    some = sql.SQL(
        "exists (select from pg_catalog.generate_subscripts({}, 1) _wd_i where {})"
    ).format(column, unheld)
    return joined, sql.SQL("({} or {})").format(plain, some)


# The lake's side


def lake_rows(
    columns: Sequence[tuple[ArrowArray, TargetType]],
    raws: Sequence[ArrowArray | None],
    marks: Marks,
) -> ArrowArray:
    """Returns the text of each row, from these columns.

    ``raws`` are each column's raw values from ``_wd_raw`` (None: it has none).
    """
    texts = []
    for (values, kind), raw in zip(columns, raws, strict=True):
        text = lake_text(storage(values), kind, marks)
        if raw is not None and raw.null_count < len(raw):
            text = _with_raw(text, raw, kind, marks)
        texts.append(pc.fill_null(text, marks.null) if text.null_count else text)
    if len(texts) == 1:
        return texts[0]
    rows: ArrowArray = pc.binary_join_element_wise(*texts, marks.between)
    return rows


def _with_raw(text: ArrowArray, raw: ArrowArray, kind: TargetType, marks: Marks) -> ArrowArray:
    if isinstance(kind, NumericAsDouble):
        raw = _without_zeros(raw)
    # waldelta never writes both a value and its raw text, so such a row differs.
    both = pc.binary_join_element_wise(text, raw, marks.element)
    return pc.if_else(raw.is_valid(), pc.if_else(text.is_valid(), both, raw), text)


def lake_text(values: ArrowArray, kind: TargetType, marks: Marks) -> ArrowArray:
    """Returns the text of each value, null for null."""
    match kind:
        case Boolean():
            text = pc.if_else(values, "t", "f")
        case Bytea():
            text = _bytes_text(values)
        case Moment():
            text = _moment_text(values, kind)
        case NumericAsDouble():
            text = _double_text(values)
        case Number(name="float4" | "float8"):
            text = _float_text(values.cast(kind.arrow))
        case Decimal():
            text = _decimal_text(values.cast(kind.arrow))
        case Array():
            text = _list_text(values, kind, marks)
        case Hstore():
            text = _map_text(values)
        case _:
            text = values.cast(pa.string())
    return text


def _moment_text(values: ArrowArray, kind: Moment) -> ArrowArray:
    whole = pa.int32() if kind.name == "date" else pa.int64()
    numbers = _numbers(values.cast(kind.arrow).view(whole))
    if kind.name == "date":
        return _fixed_text((numbers - _DAYS).astype(">i4"), values)
    return _fixed_text((numbers - _MICROSECONDS).astype(">i8"), values)


def _float_text(values: ArrowArray) -> ArrowArray:
    size = values.type.bit_width // 8
    bits = _numbers(values.view(pa.uint32() if size == 4 else pa.uint64())).copy()
    infinite, nan = _NANS[size]
    sign = bits.dtype.type(1 << (size * 8 - 1))
    bits[(bits & ~sign) > infinite] = nan
    return _fixed_text(bits.astype(f">u{size}"), values)


def _numbers(values: ArrowArray) -> NDArray[Any]:
    filled = pc.fill_null(values, 0) if values.null_count else values
    found: NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return found


def _fixed_text(numbers: NDArray[Any], values: ArrowArray) -> ArrowArray:
    """Returns big-endian numbers as PostgreSQL prints them as bytea."""
    size = numbers.dtype.itemsize
    texts = np.empty((len(numbers), 2 + 2 * size), np.uint8)
    texts[:, 0], texts[:, 1] = ord("\\"), ord("x")
    texts[:, 2:] = _HEX[
        np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), size)
    ].reshape(len(numbers), 2 * size)
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * (2 + 2 * size)
    return _string(offsets, texts.reshape(-1), values)


def _bytes_text(values: ArrowArray) -> ArrowArray:
    prefixed: ArrowArray = pc.binary_join_element_wise("\\x", hex_text(values), "")
    return prefixed


def hex_text(values: ArrowArray) -> ArrowArray:
    """Returns the bytes of each text or binary value in hexadecimal."""
    values = values.cast(pa.binary())
    filled = pc.fill_null(values, b"") if values.null_count else values
    _, offsets, data = filled.buffers()
    at = np.frombuffer(memoryview(offsets), np.int32)[
        filled.offset : filled.offset + len(filled) + 1
    ].astype(np.int64)
    raw = (
        np.frombuffer(memoryview(data), np.uint8)[at[0] : at[-1]]
        if data is not None
        else np.zeros(0, np.uint8)
    )
    return _string(((at - at[0]) * 2).astype(np.int32), _HEX[raw].reshape(-1), values)


def _string(offsets: NDArray[np.int32], data: NDArray[np.uint8], like: ArrowArray) -> ArrowArray:
    valid = validity(like.is_valid().to_numpy(zero_copy_only=False)) if like.null_count else None
    buffers: list[pa.Buffer | None] = [valid, arrow_buffer(offsets), arrow_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(like), buffers)


def _decimal_text(values: ArrowArray) -> ArrowArray:
    scale = values.type.scale
    if scale <= _EXACT_DIGITS:
        return values.cast(pa.string())
    whole = _as_integers(values).cast(pa.string())
    negative = pc.starts_with(whole, "-")
    digits = pc.utf8_lpad(pc.utf8_ltrim(whole, "-"), scale + 1, "0")
    parts = pc.utf8_slice_codeunits(digits, 0, -scale), pc.utf8_slice_codeunits(digits, -scale)
    text: ArrowArray = pc.binary_join_element_wise(*parts, ".")
    return pc.if_else(negative, pc.binary_join_element_wise("-", text, ""), text)


def _as_integers(values: ArrowArray) -> ArrowArray:
    """Returns a decimal's digits as a decimal of scale 0."""
    valid, data = values.buffers()
    kind = pa.decimal128(values.type.precision, 0)
    return pa.Array.from_buffers(kind, len(values), [valid, data], values.null_count, values.offset)


def _double_text(values: ArrowArray) -> ArrowArray:
    """Returns a double as PostgreSQL's numeric prints it, without trailing zeros."""
    texts: ArrowArray = values.cast(pa.string())
    odd = pc.match_substring_regex(texts, "[en]")  # The text has an exponent, or is nan or inf.
    if pc.any(odd).as_py():
        plain = iter(_plain(text) for text in texts.filter(odd).to_pylist())
        texts = pc.replace_with_mask(
            texts, pc.fill_null(odd, False), pa.array(list(plain), pa.string())
        )
    return _without_zeros(texts)


def _plain(text: str) -> str:
    found = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text)
    return found or format(Exact(text), "f")


def _without_zeros(texts: ArrowArray) -> ArrowArray:
    dotted = pc.match_substring(texts, ".")
    trimmed = pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")
    found: ArrowArray = pc.if_else(dotted, trimmed, texts)
    return pc.if_else(pc.equal(found, "-0"), "0", found)


def _list_text(values: ArrowArray, kind: Array, marks: Marks) -> ArrowArray:
    elements = lake_text(storage(values.flatten()), kind.element, marks)
    elements = pc.fill_null(elements, marks.null) if elements.null_count else elements
    # The mark follows each element instead of separating them, so an empty element differs from
    # none.
    elements = pc.binary_join_element_wise(elements, marks.element, "")
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), elements)
    joined = pc.binary_join_element_wise("[", pc.binary_join(lists, ""), "]", "")
    return pc.if_else(values.is_valid(), joined, pa.scalar(None, pa.string()))


def _map_text(values: ArrowArray) -> ArrowArray:
    """Returns a map as hstore prints it."""
    lengths = pc.fill_null(pc.list_value_length(_as_lists(values)), 0).to_numpy(
        zero_copy_only=False
    )
    entries = _as_lists(values).flatten()
    keys, texts = (_quoted(storage(entries.field(n)).cast(pa.string())) for n in (0, 1))
    pairs = pc.binary_join_element_wise(keys, pc.fill_null(texts, "NULL"), "=>")
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), pairs), ", ")
    return pc.if_else(values.is_valid(), joined, pa.scalar(None, pa.string()))


def _as_lists(values: ArrowArray) -> ArrowArray:
    return values.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))


def _quoted(texts: ArrowArray) -> ArrowArray:
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    quoted: ArrowArray = pc.binary_join_element_wise('"', escaped, '"', "")
    return quoted

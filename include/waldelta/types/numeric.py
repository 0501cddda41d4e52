"""Booleans, integers, floats and numeric with a precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal as Exact
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.postgres import VARHDRSZ
from waldelta.types.base import (
    Comparison,
    Marks,
    Representable,
    Selected,
    TargetType,
    as_text,
    bytea_text,
    cast_or_raw,
    integers,
    split_representable,
    utf8,
)
from waldelta.types.text import Text

MAX_PRECISION = 38  # The precision of Spark's decimal.
_UNHELD = "^(NaN|-?Infinity)$"
# Arrow's and PostgreSQL's names of values without digits.
_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
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


@dataclass(frozen=True)
class Boolean(TargetType):
    """A boolean, printed as t or f."""

    may_be_raw: ClassVar[bool] = False
    is_fixed_size: ClassVar[bool] = True
    has_one_form: ClassVar[bool] = True
    prints_alike: ClassVar[bool] = True

    spark: str = "boolean"
    arrow: Any = field(default_factory=pa.bool_)

    def read(self, text: ArrowArray) -> Representable:
        """Read t and f; anything else is raw."""
        true: ArrowArray = pc.equal(text, pa.scalar("t"))
        is_letter: ArrowArray = pc.or_(true, pc.equal(text, pa.scalar("f")))
        if pc.all(is_letter).as_py() is not False:
            return true, None
        is_typed = is_letter.fill_null(True)
        _, raw = split_representable(text, is_typed.to_numpy(zero_copy_only=False))
        return pc.if_else(is_typed, true, pa.scalar(None, pa.bool_())), raw

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Returns the value itself."""
        return sql.SQL("{}::pg_catalog.bool").format(column), None

    def pg_text(self, values: ArrowArray) -> ArrowArray:
        """Returns t and f."""
        return pc.if_else(values, "t", "f")


class AnyNumber(TargetType):
    """Integers, floats and decimals; of a float, both zeros and all NaN are equal in joins."""

    is_number: ClassVar[bool] = True
    has_one_form: ClassVar[bool] = True

    def compared_with(self, referenced: TargetType) -> Comparison | None:
        """Compare integers and decimals as numbers; a float may be rounded."""
        kinds = self.arrow, referenced.arrow
        if (comparison := super().compared_with(referenced)) is not None:
            return comparison
        if all(map(pa.types.is_integer, kinds)):
            return "integer"
        is_exact = all(pa.types.is_integer(kind) or pa.types.is_decimal(kind) for kind in kinds)
        return "number" if is_exact else None


@dataclass(frozen=True)
class Number(AnyNumber):
    """Integers; ``name`` is PostgreSQL's."""

    may_be_raw: ClassVar[bool] = False
    is_fixed_size: ClassVar[bool] = True
    prints_alike: ClassVar[bool] = True

    name: str

    def read(self, text: ArrowArray) -> Representable:
        """Read with Arrow's parser: the shortest text that PostgreSQL prints yields the same
        bits.
        """
        return cast_or_raw(text, self.arrow)

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Returns the value itself."""
        return sql.SQL("{}::pg_catalog.{}").format(column, sql.Identifier(self.name)), None

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Returns SQL for the text as PostgreSQL prints it; every value can be stored."""
        return as_text(column), None


class Fraction(AnyNumber):
    """Numbers of which equal ones may have several texts: -0 and 0, or 1.0 and 1.00."""

    prints_alike: ClassVar[bool] = False

    def pg_text(self, values: ArrowArray) -> ArrowArray:
        """Returns the digits, or what PostgreSQL calls them."""
        printed = super().pg_text(values).to_pylist()
        return pa.array([_NAMES.get(text, text) for text in printed], pa.string())

    def equal_texts(self, texts: ArrowArray) -> ArrowArray:
        """Returns the texts of the typed values."""
        typed, _ = self.from_text(texts)
        return self.equal_values(typed).cast(pa.string()).cast(pa.binary())

    def equal_values(self, values: ArrowArray) -> ArrowArray:
        """Returns the numbers, with one zero."""
        is_floating = pa.types.is_floating(values.type)
        # Adding 0 turns -0 into 0.
        return pc.add(values, pa.scalar(0.0, values.type)) if is_floating else values

    def exact_values(self, values: ArrowArray) -> ArrowArray:
        """Returns the texts of floats, which distinguish -0 from 0."""
        return values.cast(pa.string()) if pa.types.is_floating(values.type) else values

    def exact_sql(self, value: str) -> str:
        """Returns Spark SQL for the text of a float, in which -0 and 0 differ."""
        return f"cast({value} as string)" if pa.types.is_floating(self.arrow) else value


@dataclass(frozen=True)
class Float(Fraction, Number):
    """Floats, including NaN, the infinities and negative zero."""

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Returns the bits, which is faster than printing; floats have many NaN bit patterns."""
        bits = sql.SQL(
            "pg_catalog.{send}(case when {column} = 'NaN' then 'NaN'::pg_catalog.{name} else"
            " {column} end)::text"
        ).format(
            send=sql.Identifier(f"{self.name}send"), column=column, name=sql.Identifier(self.name)
        )
        return bits, None

    def checksum_text(self, values: ArrowArray, _: Marks, /) -> ArrowArray:
        """Returns the bits."""
        size = self.arrow.bit_width // 8
        whole = pa.uint32() if size == 4 else pa.uint64()
        bits = integers(values.cast(self.arrow).view(whole)).copy()
        infinite, nan = _NANS[size]
        sign = bits.dtype.type(1 << (size * 8 - 1))
        bits[(bits & ~sign) > infinite] = nan
        return bytea_text(bits.astype(f">u{size}"), values)


@dataclass(frozen=True)
class Decimal(Fraction):
    """numeric(p, s); NaN and values with more digits are raw: ``unheld`` matches such texts."""

    unheld: str = _UNHELD

    def read(self, text: ArrowArray) -> Representable:
        """Read values exactly or as raw, since Arrow refuses to round."""
        return cast_or_raw(text, self.arrow, self.unheld)

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Returns the digits, as many after the point as the type has."""
        value = sql.SQL("{}::pg_catalog.numeric").format(column)
        scale = sql.SQL(str(self.arrow.scale))
        # NaN is greater than every number.
        limit = sql.SQL(f"1e{self.arrow.precision - self.arrow.scale}")
        unheld = sql.SQL(
            "pg_catalog.abs({v}) >= {limit} or {v} <> pg_catalog.round({v}, {scale})"
        ).format(v=value, limit=limit, scale=scale)
        return sql.SQL("pg_catalog.round({}, {})::text").format(value, scale), unheld

    def checksum_text(self, values: ArrowArray, _: Marks, /) -> ArrowArray:
        """Returns the digits, as many after the point as the type has."""
        values, scale = values.cast(self.arrow), self.arrow.scale
        if scale <= _EXACT_DIGITS:
            return values.cast(pa.string())
        # The digits are those of a decimal of scale 0.
        integer = pa.decimal128(values.type.precision, 0)
        whole = pa.Array.from_buffers(
            integer, len(values), values.buffers(), values.null_count, values.offset
        ).cast(pa.string())
        negative = pc.starts_with(whole, "-")
        digits = pc.utf8_lpad(pc.utf8_ltrim(whole, "-"), scale + 1, "0")
        parts = pc.utf8_slice_codeunits(digits, 0, -scale), pc.utf8_slice_codeunits(digits, -scale)
        text: ArrowArray = pc.binary_join_element_wise(*parts, ".")
        return pc.if_else(negative, pc.binary_join_element_wise("-", text, ""), text)


@dataclass(frozen=True)
class NumericAsDouble(Fraction):
    """numeric as double: only values that a double represents with the same digits.

    NaN and the infinities are included.
    """

    spark: str = "double"
    arrow: Any = field(default_factory=pa.float64)

    @property
    def ledger_name(self) -> str:
        """A name that PostgreSQL's own doubles don't have."""
        return "numeric as double"

    def read(self, text: ArrowArray) -> Representable:
        """Read values that a double doesn't round.

        A double prints as the shortest digits that yield it: if these aren't the numeric's digits,
        it was rounded. Only trailing zeros are lost, which change no value. The sign and the
        position of the point need no comparison.
        """
        typed, raw = cast_or_raw(text, self.arrow)
        if raw is not None:
            text, _ = split_representable(text, typed.is_valid().to_numpy(zero_copy_only=False))
        else:
            text = utf8(text)
        has_same_digits: ArrowArray = pc.equal(_digits(text), _digits(typed.cast(pa.string())))
        special: ArrowArray = pc.match_substring_regex(text, _UNHELD)
        is_exact = pc.or_(has_same_digits, special).fill_null(True)
        if pc.all(is_exact).as_py():
            return typed, raw
        _, rounded = split_representable(text, is_exact.to_numpy(zero_copy_only=False))
        return pc.if_else(is_exact, typed, pa.scalar(None, self.arrow)), (
            rounded if raw is None else pc.coalesce(raw, rounded)
        )

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Returns the digits without trailing zeros, whether a double can hold them or not."""
        return sql.SQL("pg_catalog.trim_scale({}::pg_catalog.numeric)::text").format(column), None

    def element_parts(self, column: sql.Composable, marks: Marks, /) -> Selected:
        """Returns the digits, and the condition that a double can't hold exactly these digits."""
        return self.checksum_parts(column, marks)[0], sql.SQL(_ROUNDED).format(column)

    def checksum_text(self, values: ArrowArray, _: Marks, /) -> ArrowArray:
        """Returns each double as PostgreSQL's numeric prints it, without trailing zeros."""
        texts: ArrowArray = values.cast(pa.string())
        odd = pc.match_substring_regex(texts, "[en]")  # The text has an exponent, or is nan or inf.
        if pc.any(odd).as_py():
            odd_texts = texts.filter(odd).to_pylist()
            plain = [_NAMES.get(text) or format(Exact(text), "f") for text in odd_texts]
            texts = pc.replace_with_mask(
                texts, pc.fill_null(odd, False), pa.array(plain, pa.string())
            )
        return self.checksum_raw(texts)

    def checksum_raw(self, raw: ArrowArray) -> ArrowArray:
        """Returns the digits without trailing zeros."""
        texts = _without_zeros(raw)
        return pc.if_else(pc.equal(texts, "-0"), "0", texts)


@dataclass(frozen=True)
class NumericAsText(Text):
    """numeric as PostgreSQL prints it, with any number of digits."""

    def equal_sql(self, value: str) -> str:
        """Returns the text without the zeros at the end of a fraction."""
        shortest = f"trim(trailing '.' from trim(trailing '0' from {value}))"
        return f"case when instr({value}, '.') > 0 then {shortest} else {value} end"

    def equal_values(self, values: ArrowArray) -> ArrowArray:
        """Returns the texts without the zeros at the end of a fraction."""
        return _without_zeros(values)


def _without_zeros(texts: ArrowArray) -> ArrowArray:
    """Returns texts of numbers without the zeros at the end of a fraction."""
    shortest = pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")
    return pc.if_else(pc.match_substring(texts, "."), shortest, texts)


def _digits(text: ArrowArray) -> ArrowArray:
    """Returns only the significant digits.

    >>> _digits(pa.array(["-0.0120", "1.2e-05"])).to_pylist()
    ['12', '12']
    """
    return pc.utf8_trim(pc.replace_substring_regex(text, "e.*$|[-.]", ""), "0")


def scaled_decimal(scale: int) -> Decimal:
    """Returns decimal(38, scale) for a numeric without limits.

    Values with more digits before or after the point are raw.
    """
    too_large, too_precise = (
        rf"^-?[0-9]{{{MAX_PRECISION - scale + 1},}}",
        rf"\.[0-9]{{{scale}}}[0-9]*[1-9]",
    )
    if scale == MAX_PRECISION:
        too_large = "^-?[1-9]"
    unheld = f"{_UNHELD}|{too_large}|{too_precise}"
    return Decimal(f"decimal({MAX_PRECISION},{scale})", pa.decimal128(MAX_PRECISION, scale), unheld)


def decimal(typmod: int) -> Decimal | None:
    """Returns the decimal for a numeric's typmod; None when it has none, or needs more than 38
    digits.

    >>> decimal(((12 << 16) | 2) + 4).spark
    'decimal(12,2)'
    """
    declared = precision_and_scale(typmod)
    if declared is None:
        return None
    precision, scale = declared
    # numeric(3, -2) holds up to 99900, numeric(3, 5) up to 0.00999; Spark requires 0 <= scale <=
    # precision.
    precision, scale = (precision - scale, 0) if scale < 0 else (max(precision, scale), scale)
    if precision > MAX_PRECISION:
        return None
    return Decimal(f"decimal({precision},{scale})", pa.decimal128(precision, scale))


def precision_and_scale(typmod: int) -> tuple[int, int] | None:
    """Returns the precision and the scale of a numeric; None without limits.

    The scale may be negative, or larger than the precision.

    >>> precision_and_scale(((3 << 16) | (-2 & 0x7FF)) + 4)
    (3, -2)
    """
    if typmod < VARHDRSZ:
        return None
    packed = typmod - VARHDRSZ
    scale = packed & 0x7FF
    # The scale has eleven bits, and a sign since PostgreSQL 15.
    return (packed >> 16) & 0xFFFF, (scale ^ 1024) - 1024

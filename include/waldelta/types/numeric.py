"""Booleans, integers, floats and numeric with a precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.postgres.type_catalog import VARHDRSZ
from waldelta.types.base import (
    Representable,
    Selected,
    TargetType,
    cast_or_raw,
    split_representable,
    utf8,
)
from waldelta.types.text import Text

MAX_PRECISION = 38  # The precision of Spark's decimal.
_UNHELD = "^(NaN|-?Infinity)$"


@dataclass(frozen=True)
class Boolean(TargetType):
    """A boolean, printed as t or f."""

    may_be_raw: ClassVar[bool] = False

    spark: str = "boolean"
    arrow: Any = field(default_factory=pa.bool_)

    def read(self, text: ArrowArray) -> Representable:
        """Read t and f; anything else is raw."""
        true: ArrowArray = pc.equal(text, pa.scalar("t"))
        known: ArrowArray = pc.or_(true, pc.equal(text, pa.scalar("f")))
        if pc.all(known).as_py() is not False:
            return true, None
        held = known.fill_null(True)
        _, raw = split_representable(text, held.to_numpy(zero_copy_only=False))
        return pc.if_else(held, true, pa.scalar(None, pa.bool_())), raw

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Return the value itself."""
        return sql.SQL("{}::pg_catalog.bool").format(column), None


@dataclass(frozen=True)
class Number(TargetType):
    """Integers and floats, including NaN, the infinities and negative zero; ``name`` is
    PostgreSQL's.
    """

    may_be_raw: ClassVar[bool] = False

    name: str

    def read(self, text: ArrowArray) -> Representable:
        """Read with Arrow's parser: the shortest text that PostgreSQL prints yields the same
        bits.
        """
        return cast_or_raw(text, self.arrow)

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Return the value itself."""
        return sql.SQL("{}::pg_catalog.{}").format(column, sql.Identifier(self.name)), None

    def exact_sql(self, value: str) -> str:
        """Return a float's text, which distinguishes -0 from 0."""
        return _float_text(value) if pa.types.is_floating(self.arrow) else value


@dataclass(frozen=True)
class Decimal(TargetType):
    """numeric(p, s); NaN and values with more digits are raw: ``unheld`` matches such texts."""

    unheld: str = _UNHELD

    def read(self, text: ArrowArray) -> Representable:
        """Read values exactly or as raw, since Arrow refuses to round."""
        return cast_or_raw(text, self.arrow, self.unheld)


@dataclass(frozen=True)
class NumericAsDouble(TargetType):
    """numeric as double: only values that a double represents with the same digits.

    NaN and the infinities are included.
    """

    spark: str = "double"
    arrow: Any = field(default_factory=pa.float64)

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
        same: ArrowArray = pc.equal(_digits(text), _digits(typed.cast(pa.string())))
        special: ArrowArray = pc.match_substring_regex(text, _UNHELD)
        held = pc.or_(same, special).fill_null(True)
        if pc.all(held).as_py():
            return typed, raw
        _, rounded = split_representable(text, held.to_numpy(zero_copy_only=False))
        return pc.if_else(held, typed, pa.scalar(None, self.arrow)), (
            rounded if raw is None else pc.coalesce(raw, rounded)
        )

    def exact_sql(self, value: str) -> str:
        """Return the text, which distinguishes -0 from 0."""
        return _float_text(value)


@dataclass(frozen=True)
class NumericAsText(Text):
    """numeric as PostgreSQL prints it, with any number of digits."""

    def equal_sql(self, value: str) -> str:
        """Return the text without the zeros at the end of a fraction."""
        shortest = f"trim(trailing '.' from trim(trailing '0' from {value}))"
        return f"case when instr({value}, '.') > 0 then {shortest} else {value} end"


def _float_text(value: str) -> str:
    return f"cast({value} as string)"


def _digits(text: ArrowArray) -> ArrowArray:
    """Return only the significant digits.

    >>> _digits(pa.array(["-0.0120", "1.2e-05"])).to_pylist()
    ['12', '12']
    """
    mantissa: ArrowArray = pc.replace_substring_regex(text, "e.*$|[-.]", "")
    return pc.utf8_trim(mantissa, "0")


def scaled_decimal(scale: int) -> Decimal:
    """Return decimal(38, scale) for a numeric without limits.

    Values with more digits before or after the point are raw.
    """
    before, behind = rf"^-?[0-9]{{{MAX_PRECISION - scale + 1},}}", rf"\.[0-9]{{{scale}}}[0-9]*[1-9]"
    if scale == MAX_PRECISION:
        before = "^-?[1-9]"
    unheld = f"{_UNHELD}|{before}|{behind}"
    return Decimal(f"decimal({MAX_PRECISION},{scale})", pa.decimal128(MAX_PRECISION, scale), unheld)


def decimal(typmod: int) -> Decimal | None:
    """Return the decimal for a numeric's typmod; None when it has none, or needs more than 38
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
    """Return the precision and the scale of a numeric; None without limits.

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

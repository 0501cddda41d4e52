"""Declared limits: lengths and precisions of the source's types that a target's type doesn't
enforce. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from waldelta.postgres.type_catalog import BIT_OID
from waldelta.spark_sql import quote, string
from waldelta.stages.check.constraints import DeclaredType
from waldelta.types import TargetType
from waldelta.types.numeric import Decimal

LENGTHS_BETWEEN = "expect_column_value_lengths_to_be_between"
LENGTHS_EQUAL = "expect_column_value_lengths_to_equal"
MATCH_REGEX = "expect_column_values_to_match_regex"


@dataclass(frozen=True, slots=True)
class Limit:
    """An expectation on a column: Great Expectations' type and arguments, or a Spark SQL
    ``condition``.
    """

    meaning: str
    kind: str | None = None
    arguments: dict[str, Any] | None = None
    condition: str | None = None


def limits(declared: DeclaredType, kind: TargetType) -> Iterator[Limit]:
    """Yields the limits that a column stored as ``kind`` doesn't enforce; null meets them all."""
    meaning = f"{declared.column} fits {declared.base_type}"
    if declared.length is not None and kind.is_text:
        if declared.base_oid == BIT_OID:
            yield Limit(
                meaning, LENGTHS_EQUAL, {"value": declared.length}, _of_length(declared, "=")
            )
        else:
            # char(n) too: a database of encoding SQL_ASCII counts bytes where the lake counts
            # characters.
            yield Limit(
                meaning, LENGTHS_BETWEEN, {"max_value": declared.length}, _of_length(declared, "<=")
            )
    elif declared.precision is not None and kind.is_text:
        regex = printed_numeric(*declared.precision)
        yield Limit(
            meaning,
            MATCH_REGEX,
            {"regex": regex},
            _or_null(declared, f"rlike({{}}, {string(regex)})"),
        )
    elif declared.precision is not None and isinstance(kind, Decimal):
        precision, scale = declared.precision
        if scale < 0:
            yield Limit(meaning, condition=_or_null(declared, f"{{}} % 1{'0' * -scale} = 0"))
        elif scale > precision:
            least = f"0.{'0' * (scale - precision - 1)}1"
            yield Limit(meaning, condition=_or_null(declared, f"abs({{}}) < {least}BD"))


def printed_numeric(precision: int, scale: int) -> str:
    """Returns a regular expression for what a numeric of this precision prints.

    >>> printed_numeric(5, 2)
    '^(NaN|-?[0-9]{1,3}[.][0-9]{2})$'
    """
    if scale < 0:
        digits = f"(0|[0-9]{{1,{precision}}}0{{{-scale}}})"
    elif scale == 0:
        digits = f"[0-9]{{1,{precision}}}"
    elif scale >= precision:
        digits = f"0[.]0{{{scale - precision}}}[0-9]{{{precision}}}"
    else:
        digits = f"[0-9]{{1,{precision - scale}}}[.][0-9]{{{scale}}}"
    return f"^(NaN|-?{digits})$"


def _of_length(declared: DeclaredType, operator: str) -> str:
    return _or_null(declared, f"length({{}}) {operator} {declared.length}")


def _or_null(declared: DeclaredType, condition: str) -> str:
    name = quote(declared.column)
    return f"({name} is null or {condition.replace('{}', name)})"

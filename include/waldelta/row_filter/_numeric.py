"""Limits the digits of numeric results, which decides whether Spark's decimals are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from waldelta.row_filter.typed_tree import NUMERIC, Type, Typed
from waldelta.types.numeric import MAX_PRECISION

Digits: TypeAlias = tuple[int, int]

OF_INTEGERS: dict[str, Digits] = {"int2": (5, 0), "int4": (10, 0), "int8": (19, 0)}


class TooManyDigits(Exception):
    """The result may need more digits than Spark's decimal has."""


def common(types: Sequence[Type]) -> Digits:
    """Return the digits that values of all these types need."""
    digits = [t.digits or (1, 0) for t in types]
    return max(d[0] for d in digits), max(d[1] for d in digits)


def with_digits(typed: Typed) -> Typed:
    """Return the node with the digits of its result; raises TooManyDigits.

    A comparison, or a remainder, uses the digits of both sides together.
    """
    arguments = [a.type.digits or (1, 0) for a in typed.arguments if a.type.name == "numeric"]
    if len(arguments) > 1:
        both = common([a.type for a in typed.arguments if a.type.name == "numeric"])
        if sum(both) > MAX_PRECISION:
            raise TooManyDigits(f"numbers that need more than {MAX_PRECISION} digits together")
    if typed.type.name != "numeric" or typed.key not in _RESULT:
        return typed
    whole, scale = _RESULT[typed.key](arguments, _places(typed))
    if whole + scale + (typed.key == "numeric_multiply") > MAX_PRECISION:
        raise TooManyDigits(f"a result that may need more than {MAX_PRECISION} digits")
    return replace(typed, type=replace(NUMERIC, digits=(whole, scale)))


def _places(typed: Typed) -> int:
    """Return the second argument of round() and trunc()."""
    given = (
        typed.arguments[1].value
        if len(typed.arguments) > 1 and typed.arguments[1].type.name == "int4"
        else None
    )
    places = int(given or 0)
    if places < 0:
        raise TooManyDigits(
            f"{typed.key.removeprefix('numeric_')} to the left of the decimal point"
        )
    return places


def _sum(a: list[Digits], _: int) -> Digits:
    return max(a[0][0], a[1][0]) + 1, max(a[0][1], a[1][1])


def _rounded(a: list[Digits], places: int) -> Digits:
    return a[0][0] + 1, min(a[0][1], places)


_RESULT: dict[str, Callable[[list[Digits], int], Digits]] = {
    "numeric_add": _sum,
    "numeric_subtract": _sum,
    "numeric_multiply": lambda a, _: (a[0][0] + a[1][0], a[0][1] + a[1][1]),
    "numeric_modulo": lambda a, _: (min(a[0][0], a[1][0]), max(a[0][1], a[1][1])),
    "numeric_negative": lambda a, _: a[0],
    "numeric_same": lambda a, _: a[0],
    "numeric_abs": lambda a, _: a[0],
    "numeric_ceil": _rounded,
    "numeric_floor": _rounded,
    "numeric_round": _rounded,
    "numeric_trunc": _rounded,
    "numeric_sign": lambda _, __: (1, 0),
    "extract": lambda _, __: (20, 6),
}

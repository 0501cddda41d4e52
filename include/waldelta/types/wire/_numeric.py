"""Booleans, integers, floats, numeric and money in binary format, and geometric types, which are
made of floats.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waldelta.pgoutput.byte_readers import (
    ArrowArray,
    Bytes,
    Mask,
    Messages,
    Positions,
    i2,
    i4,
    i8,
    u1,
    u2,
    u4,
)
from waldelta.types.wire._values import (
    Converter,
    digits,
    fixed,
    joined,
    masked,
    one_by_one,
    refuse,
    sized,
)

_NEGATIVE, _NAN, _INFINITY, _MINUS_INFINITY = 0x4000, 0xC000, 0xD000, 0xF000
_SPECIAL = {_NAN: "NaN", _INFINITY: "Infinity", _MINUS_INFINITY: "-Infinity"}
_POWERS = np.array([1000, 100, 10, 1], np.int64)


def _or_zero(texts: ArrowArray) -> ArrowArray:
    return pc.if_else(pc.equal(texts, ""), "0", texts)


def _boolean(values: Messages, valid: Mask) -> ArrowArray:
    true = u1(values.bytes, sized(values, valid, 1)) != 0
    return pc.if_else(pa.array(true, mask=~valid), b"t", b"f")


def _integer(
    values: Messages, valid: Mask, *, read: Callable[[Bytes, Positions], Positions], size: int
) -> ArrowArray:
    return pa.array(read(values.bytes, sized(values, valid, size)), mask=~valid).cast(pa.string())


def _floats(values: Messages, valid: Mask, size: int) -> NDArray[np.floating[Any]]:
    start = sized(values, valid, size)
    if size == 8:
        return i8(values.bytes, start).view(np.float64)
    return u4(values.bytes, start).astype(np.uint32).view(np.float32)


def _float(values: Messages, valid: Mask, *, size: int) -> ArrowArray:
    # Arrow prints the shortest digits that yield the same bits.
    return pa.array(_floats(values, valid, size), mask=~valid).cast(pa.string())


def _numeric(values: Messages, valid: Mask) -> ArrowArray:
    """Convert values with the same number of digits and scale together."""
    source, start = values.bytes, values.start
    wrong = valid & (values.end - start < 8)
    count, weight, sign, scale = (
        u2(source, start),
        i2(source, start + 2),
        u2(source, start + 4),
        u2(source, start + 6),
    )
    wrong |= valid & (values.end - start != 8 + 2 * count)
    refuse(values, wrong, "numeric of a wrong size")
    # The four numbers are combined into one, so that equal ones are found by one sort of integers.
    shapes = (count << 48) | ((weight & 0xFFFF) << 32) | (sign << 16) | scale
    rows = np.flatnonzero(valid)
    kinds, first = np.unique(shapes[rows], return_index=True)
    order = rows[np.argsort(shapes[rows], kind="stable")]
    bounds = np.append(np.searchsorted(shapes[order], kinds), len(order))
    parts = []
    for k, row in enumerate(rows[first]):
        shape = (int(of[row]) for of in (count, weight, sign, scale))
        parts.append(_print_numerics(source, start[order[bounds[k] : bounds[k + 1]]] + 8, *shape))
    if not parts:
        return pa.nulls(len(valid), pa.string())
    places = np.empty(len(valid), np.int64)
    places[order] = np.arange(len(rows))
    return pa.concat_arrays(parts).take(pa.array(places, mask=~valid))


def _print_numerics(
    source: np.ndarray, at: Positions, n: int, weight: int, sign: int, scale: int
) -> ArrowArray:
    """Print numerics of one shape.

    They have base-10000 digits, the first of which counts 10000 to the power of ``weight``.
    """
    if sign in _SPECIAL:
        return pa.array([_SPECIAL[sign]] * len(at), pa.string())
    whole, fraction = max(weight + 1, 0), -(-scale // 4)
    groups = np.zeros((len(at), whole + fraction), np.int64)
    for k in range(n):
        place = k - weight - 1 + whole
        if 0 <= place < whole + fraction:
            groups[:, place] = u2(source, at + 2 * k)
    digits = (groups[:, :, None] // _POWERS % 10 + ord("0")).astype(np.uint8).reshape(len(at), -1)
    integer = _or_zero(pc.utf8_ltrim(fixed(digits[:, : 4 * whole]), "0"))
    minus = "-" if sign == _NEGATIVE else ""
    if not scale:
        return joined(minus, integer)
    return joined(minus, integer, ".", fixed(digits[:, 4 * whole : 4 * whole + scale]))


def _float_text(number: np.floating) -> str:
    """Print one float as float8out and float4out do.

    These print the shortest digits, with an exponent outside 1e-4 to 1e15 (1e6).
    """
    if np.isnan(number):
        return "NaN"
    if np.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    scientific = np.format_float_scientific(number, trim="-", exp_digits=2)
    beyond = 15 if number.dtype.itemsize == 8 else 6
    if number == 0 or -4 <= int(scientific.partition("e")[2]) < beyond:
        return str(np.format_float_positional(number, trim="-"))
    return str(scientific)


def _exact_float(values: Messages, valid: Mask, *, size: int) -> ArrowArray:
    """Convert to PostgreSQL's exact text, one by one: only for floats within values that stay
    text.
    """
    numbers = zip(_floats(values, valid, size), valid, strict=True)
    return pa.array([_float_text(number) if v else None for number, v in numbers], pa.string())


def _money(values: Messages, valid: Mask) -> ArrowArray:
    """Convert an amount in cents, with lc_monetary C."""
    cents = i8(values.bytes, sized(values, valid, 8))
    amount = np.where(cents < 0, np.negative(cents), cents).view(
        np.uint64
    )  # The least integer's negative is itself.
    whole, part = (amount // 100).astype(np.int64), (amount % 100).astype(np.int64)
    groups = [digits(whole // 1000**k % 1000, 3) for k in range(5, -1, -1)]
    grouped = pc.binary_join_element_wise(*groups, ",")
    grouped = _or_zero(pc.utf8_ltrim(grouped, "0,"))
    sign = pc.if_else(pa.array(cents < 0), "-$", "$")
    return masked(joined(sign, grouped, ".", digits(part, 2)), valid)


def _lsn(values: Messages, valid: Mask) -> ArrowArray:
    start = sized(values, valid, 8)
    high, low = (_hexadecimal(u4(values.bytes, start + 4 * k)) for k in range(2))
    return masked(joined(high, "/", low), valid)


def _hexadecimal(numbers: Positions) -> ArrowArray:
    nibbles = numbers[:, None] >> np.arange(28, -1, -4) & 15
    return _or_zero(
        pc.utf8_ltrim(fixed(np.frombuffer(b"0123456789ABCDEF", np.uint8)[nibbles]), "0")
    )


def _numbers(data: bytes, at: int, count: int) -> list[str]:
    if len(data) - at != 8 * count:
        raise ValueError(f"{8 * count} bytes of coordinates wanted")
    return [
        _float_text(np.float64(number)) for number in struct.unpack_from(f"!{count}d", data, at)
    ]


def _points(numbers: list[str]) -> str:
    return ",".join(f"({x},{y})" for x, y in zip(numbers[::2], numbers[1::2], strict=True))


def _points_with_count(data: bytes, at: int) -> str:
    (count,) = struct.unpack_from("!i", data, at)
    if not 0 <= count <= len(data) // 16:
        raise ValueError("number of points out of range")
    return _points(_numbers(data, at + 4, 2 * count))


def _circle(data: bytes) -> str:
    x, y, radius = _numbers(data, 0, 3)
    return f"<({x},{y}),{radius}>"


def _path(data: bytes) -> str:
    return f"({_points_with_count(data, 1)})" if data[0] else f"[{_points_with_count(data, 1)}]"


_GEOMETRY: dict[str, Callable[[bytes], str]] = {
    "point": lambda data: _points(_numbers(data, 0, 2)),
    "lseg": lambda data: f"[{_points(_numbers(data, 0, 4))}]",
    "box": lambda data: _points(_numbers(data, 0, 4)),
    "line": lambda data: "{" + ",".join(_numbers(data, 0, 3)) + "}",
    "circle": _circle,
    "path": _path,
    "polygon": lambda data: f"({_points_with_count(data, 0)})",
}
CONVERTERS: dict[str, Converter] = {
    "bool": _boolean,
    "int2": partial(_integer, read=i2, size=2),
    "int4": partial(_integer, read=i4, size=4),
    "int8": partial(_integer, read=i8, size=8),
    "numeric": _numeric,
    "money": _money,
    "float4": partial(_float, size=4),
    "float8": partial(_float, size=8),
    "pg_lsn": _lsn,
    "xid8": partial(_integer, read=lambda source, at: i8(source, at).view(np.uint64), size=8),
    **dict.fromkeys(("oid", "xid", "cid"), partial(_integer, read=u4, size=4)),
    # These are rare, so each distinct value is converted by itself.
    **{name: one_by_one(read) for name, read in _GEOMETRY.items()},
}
EXACT: dict[str, Converter] = {
    "float4": partial(_exact_float, size=4),
    "float8": partial(_exact_float, size=8),
}

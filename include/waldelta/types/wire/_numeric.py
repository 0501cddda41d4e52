"""Booleans, integers, floats, numeric and money in binary format."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.byte_readers import (
    ArrowArray,
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
from waldelta.types.wire._values import Converter, digits, fixed, joined, masked, refuse, sized

_NEGATIVE, _NAN, _INFINITY, _MINUS_INFINITY = 0x4000, 0xC000, 0xD000, 0xF000
_SPECIAL = {_NAN: "NaN", _INFINITY: "Infinity", _MINUS_INFINITY: "-Infinity"}
_SIGNED = {2: i2, 4: i4, 8: i8}
_POWERS = np.array([1000, 100, 10, 1], np.int64)


def _or_zero(texts: ArrowArray) -> ArrowArray:
    return pc.if_else(pc.equal(texts, ""), "0", texts)


def _boolean(values: Messages, valid: Mask) -> ArrowArray:
    true = u1(values.bytes, sized(values, valid, 1)) != 0
    return pc.if_else(pa.array(true, mask=~valid), b"t", b"f")


def _integer(size: int) -> Converter:
    def convert(values: Messages, valid: Mask) -> ArrowArray:
        start = sized(values, valid, size)
        return pa.array(_SIGNED[size](values.bytes, start), mask=~valid).cast(pa.string())

    return convert


def _oid(values: Messages, valid: Mask) -> ArrowArray:
    return pa.array(u4(values.bytes, sized(values, valid, 4)), mask=~valid).cast(pa.string())


def _float(size: int) -> Converter:
    def convert(values: Messages, valid: Mask) -> ArrowArray:
        start = sized(values, valid, size)
        if size == 8:
            number = pa.array(i8(values.bytes, start).view(np.float64), mask=~valid)
        else:
            number = pa.array(
                u4(values.bytes, start).astype(np.uint32).view(np.float32), mask=~valid
            )
        # Arrow prints the shortest digits that yield the same bits.
        return number.cast(pa.string())

    return convert


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
    for k in range(len(kinds)):
        row = rows[first[k]]
        chosen = order[bounds[k] : bounds[k + 1]]
        parts.append(
            _printed(
                source, start[chosen] + 8, *(int(of[row]) for of in (count, weight, sign, scale))
            )
        )
    if not parts:
        return pa.nulls(len(valid), pa.string())
    places = np.empty(len(valid), np.int64)
    places[order] = np.arange(len(rows))
    return pa.concat_arrays(parts).take(pa.array(places, mask=~valid))


def _printed(
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


def float_text(number: np.floating) -> str:
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


def _exact_float(size: int) -> Converter:
    """Convert to PostgreSQL's exact text, one by one: only for floats within values that stay
    text.
    """

    def convert(values: Messages, valid: Mask) -> ArrowArray:
        start = sized(values, valid, size)
        bits = (
            i8(values.bytes, start).view(np.float64)
            if size == 8
            else u4(values.bytes, start).astype(np.uint32)
        )
        numbers = bits if size == 8 else bits.view(np.float32)
        return pa.array(
            [float_text(n) if v else None for n, v in zip(numbers, valid, strict=True)], pa.string()
        )

    return convert


def _unsigned8(values: Messages, valid: Mask) -> ArrowArray:
    return pa.array(i8(values.bytes, sized(values, valid, 8)).view(np.uint64), mask=~valid).cast(
        pa.string()
    )


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


CONVERTERS: dict[str, Converter] = {
    "bool": _boolean,
    "int2": _integer(2),
    "int4": _integer(4),
    "int8": _integer(8),
    "numeric": _numeric,
    "money": _money,
    "float4": _float(4),
    "float8": _float(8),
    "pg_lsn": _lsn,
    "xid8": _unsigned8,
    **dict.fromkeys(("oid", "xid", "cid"), _oid),
}
EXACT: dict[str, Converter] = {"float4": _exact_float(4), "float8": _exact_float(8)}

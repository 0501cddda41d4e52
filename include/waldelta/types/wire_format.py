"""Values in PostgreSQL's binary format, turned into the text that the output functions print; whole columns at once.

Events carry text (docs/decisions/0004), and one reading of text serves both formats. Only where a value has no place in its
type in the lake does its text have to be PostgreSQL's to the letter; elsewhere it has to read back as the same value.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.errors import DecodeError
from waldelta.pgoutput.wire import ArrowArray, Mask, Messages, Positions, arrow_buffer, i8, u1, u2, u4
from waldelta.type_catalog import PgType
from waldelta.types.target import validity

_DAY_US = 86_400_000_000
# PostgreSQL counts from 2000-01-01; the Gregorian calendar repeats after 400 years.
_EPOCH_DAY = 10_957
_CYCLE_DAYS, _CYCLE_YEARS = 146_097, 400
_FIRST_DAY, _BEYOND_DAY = -719_162, 2_932_897  # 0001-01-01 and 10000-01-01, from 1970
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_UUID_DASHES = (8, 12, 16, 20)
_NEGATIVE, _NAN, _INFINITY, _MINUS_INFINITY = 0x4000, 0xC000, 0xD000, 0xF000
_SPECIAL = {_NAN: "NaN", _INFINITY: "Infinity", _MINUS_INFINITY: "-Infinity"}
_POWERS = np.array([1000, 100, 10, 1], np.int64)

Converter = Callable[[Messages, Mask], ArrowArray]


def wire_name(pg_type: PgType) -> str:
    """The name by which text_of() knows a type: a domain's base type, ``enum`` for every enum."""
    base = pg_type.base or pg_type
    if base.kind == "enum":
        return "enum"
    return base.type_name if base.type_schema == "pg_catalog" else f"{base.type_schema}.{base.type_name}"


def has_wire_format(pg_type: PgType) -> bool:
    """Whether values of this type can be read in binary format."""
    return wire_name(pg_type) in _CONVERTERS


def text_of(values: ArrowArray, type_name: str) -> ArrowArray:
    """The texts of binary values, as binary; nulls stay null. ``type_name`` is wire_name()'s.

    Raises DecodeError for a type without a reader and for values that aren't of the type's size or form.
    """
    if type_name not in _CONVERTERS:
        raise DecodeError("row", "value", 0, f"type {type_name} came in binary format: set options.binary to false")
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    found = _CONVERTERS[type_name](
        Messages(pc.fill_null(values, b"") if values.null_count else values, type_name), valid
    )
    return found.cast(pa.binary())


def _sized(values: Messages, valid: Mask, size: int) -> Positions:
    """Where the values begin; each must have this many bytes."""
    wrong = valid & (values.end - values.start != size)
    if wrong.any():
        raise values.error(int(np.argmax(wrong)), "value", int(values.start[np.argmax(wrong)]), f"{size} bytes wanted")
    return values.start


def _same(values: Messages, valid: Mask) -> ArrowArray:
    return _slice(values, valid, 0)


def _slice(values: Messages, valid: Mask, skipped: int) -> ArrowArray:
    """The bytes behind the first few of each value."""
    start = np.where(valid, values.start + skipped, values.start)
    size = np.where(valid, values.end - start, 0)
    offsets = np.concatenate([[0], np.cumsum(size)])
    source = np.repeat(start - offsets[:-1], size) + np.arange(offsets[-1])
    return _strings(values.bytes[source], offsets, valid)


def _strings(data: np.ndarray, offsets: Positions, valid: Mask) -> ArrowArray:
    buffers: list[pa.Buffer | None] = [validity(valid), arrow_buffer(offsets.astype(np.int32)), arrow_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(valid), buffers)


def _jsonb(values: Messages, valid: Mask) -> ArrowArray:
    versions = u1(values.bytes, values.start)
    if (valid & ((versions != 1) | (values.start == values.end))).any():
        raise DecodeError("row", "value", 0, "jsonb of an unknown version")
    return _slice(values, valid, 1)


def _boolean(values: Messages, valid: Mask) -> ArrowArray:
    true = u1(values.bytes, _sized(values, valid, 1)) != 0
    return pc.if_else(pa.array(true, mask=~valid), b"t", b"f")


def _integer(size: int) -> Converter:
    def convert(values: Messages, valid: Mask) -> ArrowArray:
        start = _sized(values, valid, size)
        if size == 8:
            return pa.array(i8(values.bytes, start), mask=~valid).cast(pa.string())
        number = (u2 if size == 2 else u4)(values.bytes, start)
        half = 1 << (8 * size - 1)
        return pa.array((number ^ half) - half, mask=~valid).cast(pa.string())

    return convert


def _oid(values: Messages, valid: Mask) -> ArrowArray:
    return pa.array(u4(values.bytes, _sized(values, valid, 4)), mask=~valid).cast(pa.string())


def _float(size: int) -> Converter:
    def convert(values: Messages, valid: Mask) -> ArrowArray:
        start = _sized(values, valid, size)
        if size == 8:
            number = pa.array(i8(values.bytes, start).view(np.float64), mask=~valid)
        else:
            number = pa.array(u4(values.bytes, start).astype(np.uint32).view(np.float32), mask=~valid)
        # Arrow prints the shortest digits that read back to the same bits.
        return number.cast(pa.string())

    return convert


def _bytea(values: Messages, valid: Mask) -> ArrowArray:
    raw = _slice(values, valid, 0)
    bounds = np.frombuffer(raw.buffers()[1], np.int32)[: len(valid) + 1].astype(np.int64)
    data = np.frombuffer(raw.buffers()[2], np.uint8)[: bounds[-1]]
    digits = np.empty((len(data), 2), np.uint8)
    digits[:, 0], digits[:, 1] = _HEX[data >> 4], _HEX[data & 15]
    # Two bytes of prefix before each value.
    prefixed = np.insert(digits, bounds[:-1], np.frombuffer(b"\\x", np.uint8), axis=0)
    offsets = 2 * (bounds + np.arange(len(bounds)))
    return _strings(prefixed.reshape(-1), offsets, valid)


def _uuid(values: Messages, valid: Mask) -> ArrowArray:
    start = _sized(values, valid, 16)[valid]
    data = values.bytes[start[:, None] + np.arange(16)]
    digits = np.empty((len(start), 32), np.uint8)
    digits[:, 0::2], digits[:, 1::2] = _HEX[data >> 4], _HEX[data & 15]
    text = np.insert(digits, _UUID_DASHES, ord("-"), axis=1)
    return _strings(text.reshape(-1), np.concatenate([[0], np.cumsum(valid * 36)]), valid)


def _date(values: Messages, valid: Mask) -> ArrowArray:
    number = u4(values.bytes, _sized(values, valid, 4))
    days = (number ^ (1 << 31)) - (1 << 31)
    least, most = -(1 << 31), (1 << 31) - 1
    held = (days + _EPOCH_DAY >= _FIRST_DAY) & (days + _EPOCH_DAY < _BEYOND_DAY)
    plain = pa.array(np.where(held, days + _EPOCH_DAY, 0).astype(np.int32)).cast(pa.date32()).cast(pa.string())
    return _with_odd_ones(plain, valid, held, days, lambda day: _infinite(day, least, most) or _far(day, 0, "date"))


def _timestamp(zone: str) -> Converter:
    def convert(values: Messages, valid: Mask) -> ArrowArray:
        at = i8(values.bytes, _sized(values, valid, 8))
        day = at // _DAY_US + _EPOCH_DAY
        held = (day >= _FIRST_DAY) & (day < _BEYOND_DAY)
        unix = pa.array(np.where(held, at + _EPOCH_DAY * _DAY_US, 0)).cast(pa.timestamp("us")).cast(pa.string())
        plain = pc.binary_join_element_wise(unix, zone, "")
        least, most = -(1 << 63), (1 << 63) - 1

        def odd(us: int) -> str:
            return _infinite(us, least, most) or _far(us // _DAY_US, us % _DAY_US, "timestamp") + zone

        def suffixed(us: int) -> str:
            text = odd(us)
            return text.replace(" BC" + zone, zone + " BC")

        return _with_odd_ones(plain, valid, held, at, suffixed)

    return convert


def _with_odd_ones(
    plain: ArrowArray, valid: Mask, held: Mask, numbers: Positions, odd: Callable[[int], str]
) -> ArrowArray:
    """The texts, with those few that lie outside the years 1 to 9999 printed one by one."""
    plain = pc.if_else(pa.array(valid), plain, pa.scalar(None, pa.string()))
    outside = np.flatnonzero(valid & ~held)
    if not len(outside):
        return plain
    texts = pa.array([odd(int(n)) for n in numbers[outside]], pa.string())
    return pc.replace_with_mask(plain, pa.array(valid & ~held), texts)


def _infinite(number: int, least: int, most: int) -> str | None:
    return "infinity" if number == most else "-infinity" if number == least else None


def _far(day: int, us: int, kind: str) -> str:
    """A date, days from 2000, in any year, as PostgreSQL prints it."""
    cycles = day // _CYCLE_DAYS
    shifted = datetime(2000, 1, 1) + timedelta(days=day % _CYCLE_DAYS, microseconds=us)  # noqa: DTZ001 - a calendar, no clock
    year = shifted.year + cycles * _CYCLE_YEARS
    # There is no year 0: 1 BC comes before 1.
    text = f"{year if year > 0 else 1 - year:04d}-{shifted:%m-%d}"
    if kind == "timestamp":
        fraction = f".{shifted.microsecond:06d}".rstrip("0") if shifted.microsecond else ""
        text += f" {shifted:%H:%M:%S}{fraction}"
    return text if year > 0 else f"{text} BC"


def _numeric(values: Messages, valid: Mask) -> ArrowArray:
    """Values alike in their number of digits and in scale are printed together."""
    source, start = values.bytes, values.start
    wrong = valid & (values.end - start < 8)
    count, weight, sign, scale = (u2(source, start + 2 * k) for k in range(4))
    weight = (weight ^ 0x8000) - 0x8000
    wrong |= valid & (values.end - start != 8 + 2 * count)
    if wrong.any():
        raise values.error(int(np.argmax(wrong)), "value", int(start[np.argmax(wrong)]), "numeric of a wrong size")
    # The four numbers as one, so that finding those alike is one sort of integers.
    shapes = (count << 48) | ((weight & 0xFFFF) << 32) | (sign << 16) | scale
    rows = np.flatnonzero(valid)
    kinds, first = np.unique(shapes[rows], return_index=True)
    order = rows[np.argsort(shapes[rows], kind="stable")]
    bounds = np.append(np.searchsorted(shapes[order], kinds), len(order))
    parts = []
    for k in range(len(kinds)):
        row = rows[first[k]]
        chosen = order[bounds[k] : bounds[k + 1]]
        parts.append(_printed(source, start[chosen] + 8, *(int(of[row]) for of in (count, weight, sign, scale))))
    if not parts:
        return pa.nulls(len(valid), pa.string())
    places = np.empty(len(valid), np.int64)
    places[order] = np.arange(len(rows))
    return pa.concat_arrays(parts).take(pa.array(places, mask=~valid))


def _printed(source: np.ndarray, at: Positions, n: int, weight: int, sign: int, scale: int) -> ArrowArray:
    """Numerics of one shape: base-10000 digits, the first of which stands for 10000 to the power of ``weight``."""
    if sign in _SPECIAL:
        return pa.array([_SPECIAL[sign]] * len(at), pa.string())
    whole, fraction = max(weight + 1, 0), -(-scale // 4)
    groups = np.zeros((len(at), whole + fraction), np.int64)
    for k in range(n):
        place = k - weight - 1 + whole
        if 0 <= place < whole + fraction:
            groups[:, place] = u2(source, at + 2 * k)
    digits = (groups[:, :, None] // _POWERS % 10 + ord("0")).astype(np.uint8).reshape(len(at), -1)
    integer = pc.utf8_ltrim(_fixed(digits[:, : 4 * whole]), "0")
    integer = pc.if_else(pc.equal(integer, ""), "0", integer)
    minus = "-" if sign == _NEGATIVE else ""
    if not scale:
        return pc.binary_join_element_wise(minus, integer, "")
    return pc.binary_join_element_wise(minus, integer, ".", _fixed(digits[:, 4 * whole : 4 * whole + scale]), "")


def _fixed(characters: np.ndarray) -> ArrowArray:
    """Rows of characters, all of one width, as strings."""
    count, width = characters.shape
    offsets = arrow_buffer(np.arange(count + 1, dtype=np.int32) * np.int32(width))
    return pa.Array.from_buffers(pa.string(), count, [None, offsets, arrow_buffer(characters.reshape(-1))])


_CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(("text", "varchar", "bpchar", "name", "json", "unknown", "enum"), _same),
    "jsonb": _jsonb, "bool": _boolean, "bytea": _bytea, "uuid": _uuid, "numeric": _numeric, "date": _date,
    "int2": _integer(2), "int4": _integer(4), "int8": _integer(8), "oid": _oid, "float4": _float(4), "float8": _float(8),
    "timestamp": _timestamp(""), "timestamptz": _timestamp("+00"),
}  # fmt: skip

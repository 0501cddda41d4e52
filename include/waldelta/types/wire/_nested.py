"""Arrays, ranges and multiranges in binary format.

Their inner values are converted all at once, by the reader of their own type. Each inner value
follows its length, so its position depends on those before it. All outer values advance together,
by one inner value at a time. When few are left, as in a very long array, each continues alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.byte_readers import ArrowArray, Mask, Messages, Positions, copy_out, i4, u1
from waldelta.types.base import utf8
from waldelta.types.wire._values import joined, masked, refuse

# Reads an array of binary values of a type; as PostgreSQL's exact text where the flag is set.
ElementReader = Callable[[ArrowArray, bool], ArrowArray]
_FEW = 16
_MOST_DIMENSIONS = 6
_EMPTY, _LOWER_INCLUSIVE, _UPPER_INCLUSIVE, _NO_LOWER, _NO_UPPER = 1, 2, 4, 8, 16
_NULL = -1


def array_text(values: Messages, valid: Mask, read: ElementReader, delimiter: str) -> ArrowArray:
    """Returns the texts of arrays.

    One-dimensional arrays with lower bound 1 are joined at once; each other one is printed by
    itself.
    """
    source, start = values.bytes, values.start
    dimensions = np.where(valid, i4(source, start), 0)
    wrong = (values.end - start < 12) | (dimensions < 0) | (dimensions > _MOST_DIMENSIONS)
    wrong |= values.end - start < 12 + 8 * dimensions
    refuse(values, valid & wrong, "no array")
    count, is_odd = (dimensions > 0).astype(np.int64), dimensions > 1
    for k in range(_MOST_DIMENSIONS):
        has_dimension = dimensions > k
        size = i4(source, start + 12 + 8 * k)
        # Each element needs at least the bytes of its length.
        refuse(
            values,
            has_dimension & ((size < 0) | (count * size > values.end - start)),
            "more elements than bytes",
        )
        count = np.where(has_dimension, count * size, count)
        is_odd |= has_dimension & (i4(source, start + 16 + 8 * k) != 1)
    starts, ends = _walk(values, valid, start + 12 + 8 * dimensions, count)
    elements = _copy_bytes(values, starts, ends)
    text = _join_elements(_elements(read(elements, False), delimiter), count, delimiter, "{", "}")
    for row in np.flatnonzero(is_odd & valid):
        first = int(count[:row].sum())
        elements_of_row = _elements(
            read(elements.slice(first, int(count[row])), True), delimiter
        ).to_pylist()
        # The size and the lower bound of each dimension.
        shape = list(struct.iter_unpack("!ii", values.at(int(row))[12 : 12 + 8 * dimensions[row]]))
        text = pc.replace_with_mask(
            text,
            pa.array(np.arange(len(valid)) == row),
            pa.array([_print_array(elements_of_row, shape, delimiter)]),
        )
    return masked(text, valid)


def _print_array(texts: list[str], shape: list[tuple[Any, ...]], delimiter: str) -> str:
    if not texts:
        return "{}"
    for size, _ in reversed(shape):
        texts = [
            "{" + delimiter.join(texts[k : k + size]) + "}" for k in range(0, len(texts), size)
        ]
    bounds = "".join(f"[{lower}:{lower + size - 1}]" for size, lower in shape)
    return f"{bounds}={texts[0]}" if any(lower != 1 for _, lower in shape) else texts[0]


def vector_text(values: Messages, valid: Mask, read: ElementReader) -> ArrowArray:
    """Returns the texts of int2vector and oidvector: arrays with lower bound 0, printed without
    braces.
    """
    text = array_text(values, valid, read, " ")
    return pc.replace_substring_regex(text, r"^(?:\[.*\]=)?\{(.*)\}$", r"\1")


def _elements(texts: ArrowArray, delimiter: str) -> ArrowArray:
    """Quote elements where array_out does."""
    texts = utf8(texts)
    special = rf'^$|^(?i:null)$|["\\{{}}{delimiter}]|[ \t\n\r\v\f]'
    return pc.fill_null(_quote_elements(texts, special, r'(["\\])', r"\\\1"), "NULL")


def _quote_elements(texts: ArrowArray, special: str, escaped: str, replacement: str) -> ArrowArray:
    needs = pc.match_substring_regex(texts, special)
    if not pc.any(needs).as_py():
        return texts
    return pc.if_else(
        needs, joined('"', pc.replace_substring_regex(texts, escaped, replacement), '"'), texts
    )


def _join_elements(
    texts: ArrowArray, count: Positions, delimiter: str, opening: str, closing: str
) -> ArrowArray:
    bounds = pa.array(np.concatenate([[0], np.cumsum(count)]).astype(np.int32))
    return joined(
        opening, pc.binary_join(pa.ListArray.from_arrays(bounds, texts), delimiter), closing
    )


def _copy_bytes(values: Messages, starts: Positions, ends: Positions) -> ArrowArray:
    present = ends >= starts
    # The positions of nulls must be in order, too, as Arrow requires.
    return copy_out(values, starts, np.where(present, ends, starts), present).cast(pa.binary())


def _walk(
    values: Messages, valid: Mask, first: Positions, count: Positions
) -> tuple[Positions, Positions]:
    """Returns where the inner values begin and end, in the order of the outer values.

    A null ends before it begins.
    """
    offsets = np.concatenate([[0], np.cumsum(count)])
    starts, ends = np.zeros(offsets[-1], np.int64), np.zeros(offsets[-1], np.int64)
    at, step = first.copy(), 0
    active = np.flatnonzero(count > 0)
    while len(active) > _FEW:
        start = at[active] + 4
        length = i4(values.bytes, at[active])
        end = np.where(length == _NULL, start, start + length)
        bad = np.zeros(len(valid), np.bool_)
        bad[active] = (length < _NULL) | (end > values.end[active]) | (start > values.end[active])
        refuse(values, bad, "an inner value doesn't fit")
        place = offsets[active] + step
        starts[place], ends[place] = start, np.where(length == _NULL, start - 1, end)
        at[active] = end
        step += 1
        active = active[count[active] > step]
    for row in active:
        at[row] = _walk_alone(
            values,
            int(row),
            int(at[row]),
            slice(int(offsets[row]) + step, int(offsets[row + 1])),
            (starts, ends),
        )
    refuse(values, valid & (at != values.end), "bytes left over")
    return starts, ends


def _walk_alone(
    values: Messages, row: int, at: int, places: slice, bounds: tuple[Positions, Positions]
) -> int:
    starts, ends = bounds
    data, base, limit = values.at(row), int(values.start[row]), int(values.end[row])
    for place in range(places.start, places.stop):
        if at + 4 > limit:
            raise values.error(row, "value", at, "an inner value doesn't fit")
        (length,) = struct.unpack_from("!i", data, at - base)
        start, at = at + 4, at + 4 + max(length, 0)
        if length < _NULL or at > limit:
            raise values.error(row, "value", start, "an inner value doesn't fit")
        starts[place], ends[place] = start, start - 1 if length == _NULL else at
    return at


def _refuse_nulls(
    values: Messages, starts: Positions, ends: Positions, count: Positions, detail: str
) -> None:
    rows = np.arange(len(count))
    refuse(values, np.isin(rows, np.repeat(rows, count)[ends < starts]), detail)


def range_text(values: Messages, valid: Mask, read: ElementReader) -> ArrowArray:
    """Returns the texts of ranges: a byte of flags, then the existing bounds."""
    flags = np.where(valid, u1(values.bytes, values.start), _EMPTY).astype(np.int64)
    refuse(values, valid & (values.end == values.start), "no range")
    has_lower, has_upper = flags & (_EMPTY | _NO_LOWER) == 0, flags & (_EMPTY | _NO_UPPER) == 0
    count = has_lower.astype(np.int64) + has_upper
    starts, ends = _walk(values, valid, np.where(valid, values.start + 1, values.end), count)
    _refuse_nulls(values, starts, ends, count, "a bound is null")
    special = r'^$|["\\()\[\],]|[ \t\n\r\v\f]'
    texts = _quote_elements(
        utf8(read(_copy_bytes(values, starts, ends), True)), special, r'(["\\])', r"\1\1"
    )
    bound_index = np.cumsum(count) - count
    lower = pc.fill_null(texts.take(pa.array(bound_index, mask=~has_lower)), "")
    upper = pc.fill_null(texts.take(pa.array(bound_index + has_lower, mask=~has_upper)), "")
    opening = pc.if_else(pa.array(flags & _LOWER_INCLUSIVE != 0), "[", "(")
    closing = pc.if_else(pa.array(flags & _UPPER_INCLUSIVE != 0), "]", ")")
    text = joined(opening, lower, ",", upper, closing)
    return masked(pc.if_else(pa.array(flags & _EMPTY != 0), "empty", text), valid)


def multirange_text(values: Messages, valid: Mask, read: ElementReader) -> ArrowArray:
    """Returns the texts of multiranges: their number, then ranges that follow their lengths."""
    size = values.end - values.start
    count = np.where(valid, i4(values.bytes, values.start), 0)
    refuse(values, valid & ((size < 4) | (count < 0) | (count > size)), "no multirange")
    starts, ends = _walk(values, valid, np.where(valid, values.start + 4, values.end), count)
    _refuse_nulls(values, starts, ends, count, "a range is null")
    texts = utf8(read(_copy_bytes(values, starts, ends), True))
    return masked(_join_elements(texts, count, ",", "{", "}"), valid)

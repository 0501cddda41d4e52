"""Shared functions of the readers of binary values: size checks, slicing, rows of characters as
strings.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.byte_readers import ArrowArray, Mask, Messages, Positions
from waldelta.types.base import strings

# Converts values of one type to texts, as string or binary; nulls stay null.
Converter = Callable[[Messages, Mask], ArrowArray]
HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


def read_with(convert: Converter, values: ArrowArray, type_name: str) -> ArrowArray:
    """Returns the texts of an array of binary values, as binary."""
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    filled = pc.fill_null(values, b"") if values.null_count else values
    return convert(Messages(filled, type_name), valid).cast(pa.binary())


def refuse(values: Messages, wrong: Mask, detail: str) -> None:
    """Raise DecodeError for the first value that is wrong, if any."""
    if wrong.any():
        row = int(np.argmax(wrong))
        raise values.error(row, "value", int(values.start[row]), detail)


def sized(values: Messages, valid: Mask, size: int) -> Positions:
    """Returns where the values begin, after checking that each has this many bytes."""
    refuse(values, valid & (values.end - values.start != size), f"{size} bytes wanted")
    return values.start


def cut(values: Messages, valid: Mask, skipped: int) -> ArrowArray:
    """Returns each value's bytes after the first few, as binary."""
    start = np.where(valid, values.start + skipped, values.start)
    size = np.where(valid, values.end - start, 0)
    offsets = np.concatenate([[0], np.cumsum(size)])
    source = np.repeat(start - offsets[:-1], size) + np.arange(offsets[-1])
    return strings(values.bytes[source], offsets, valid, pa.binary())


def fixed(characters: np.ndarray) -> ArrowArray:
    """Returns rows of characters of one width as strings."""
    count, width = characters.shape
    return strings(characters.reshape(-1), np.arange(count + 1) * width)


def digits(numbers: Positions, width: int) -> ArrowArray:
    """Returns nonnegative numbers with leading zeros, ``width`` characters each."""
    powers = 10 ** np.arange(width - 1, -1, -1)
    return fixed((numbers[:, None] // powers % 10 + ord("0")).astype(np.uint8))


def joined(*parts: ArrowArray | str) -> ArrowArray:
    """Concatenate strings; null where one of them is."""
    return pc.binary_join_element_wise(*parts, "")


def masked(texts: ArrowArray, valid: Mask) -> ArrowArray:
    """Set values to null where they aren't valid."""
    return texts if valid.all() else pc.if_else(pa.array(valid), texts, pa.scalar(None, texts.type))


def one_by_one(read: Callable[[bytes], str]) -> Converter:
    """Convert each distinct value by itself, for rare types.

    Any error that ``read`` raises for a value's bytes becomes a DecodeError.
    """

    def convert(values: Messages, valid: Mask) -> ArrowArray:
        convert_value = cache(read)
        texts: list[str | None] = [None] * len(valid)
        for row in np.flatnonzero(valid).tolist():
            try:
                texts[row] = convert_value(values.at(row))
            except (ValueError, IndexError, struct.error, OverflowError) as err:
                raise values.error(
                    row, "value", int(values.start[row]), str(err) or "cut off"
                ) from None
        return pa.array(texts, pa.string())

    return convert

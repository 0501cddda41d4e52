"""Finds and prints quoted text in many values at once: arrays, vectors and hstore share their
quoting rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waldelta.pgoutput.byte_readers import ArrowArray, Bytes, Mask, Positions
from waldelta.types.base import strings

_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def numbers(values: NDArray[Any], null: Mask | None = None) -> ArrowArray:
    """Return offsets or indices for Arrow."""
    return pa.array(values.astype(np.int32), mask=null)


def packed(text: ArrowArray, null: str | bytes) -> tuple[Bytes, Positions]:
    """Return the values' bytes without gaps, and their offsets; ``null`` is the text used for
    nulls.
    """
    text = pc.fill_null(text, null) if text.null_count else text
    _, offsets, data = text.buffers()
    at = np.frombuffer(memoryview(offsets), np.int32)[
        text.offset : text.offset + len(text) + 1
    ].astype(np.int64)
    source = (
        np.frombuffer(memoryview(data), np.uint8) if data is not None else np.zeros(0, np.uint8)
    )
    return source[at[0] : at[-1]], at - at[0]


@dataclass(frozen=True)
class Quotes:
    """Which bytes are quotes, are within quotes, or are backslashes that escape the next byte."""

    mark: Mask
    inside: Mask
    escaping: Mask
    balanced: Mask


def quoted(texts: ArrowArray) -> ArrowArray:
    """Return texts in quotes as arrays and hstore print them; the word NULL for null."""
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    return pc.fill_null(pc.binary_join_element_wise('"', escaped, '"', ""), "NULL")


def joined(lists: ArrowArray, elements: ArrowArray, separator: str) -> ArrowArray:
    """Return each list's elements, given as texts without gaps, in one text; null for null."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    offsets = numbers(np.concatenate([[0], np.cumsum(lengths)]))
    texts = pc.binary_join(pa.ListArray.from_arrays(offsets, elements), separator)
    return pc.if_else(lists.is_valid(), texts, pa.scalar(None, pa.string()))


def numbered(values: ArrowArray) -> NDArray[np.int64]:
    """Return integers that are equal exactly where the values are, or where both are null."""
    encoded: Any = values.dictionary_encode()
    indices = encoded.indices.fill_null(len(encoded.dictionary))
    return np.asarray(indices.to_numpy(zero_copy_only=False)).astype(np.int64)


def lists_as_bytes(lists: ArrowArray, *elements: ArrowArray) -> ArrowArray:
    """Return bytes that are equal exactly where lists of these elements are; null for null.

    ``elements`` are columns of values, without gaps. Arrow can't hash lists.
    """
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    numbers_of = np.stack([numbered(column) for column in elements], axis=1)
    width = numbers_of.itemsize * len(elements)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * width
    valid = np.asarray(lists.is_valid())
    return strings(numbers_of.reshape(-1).view(np.uint8), offsets, valid, pa.large_binary())


def find_quotes(source: Bytes, offsets: Positions) -> Quotes | None:
    """Return where the quotes are; None when there is none.

    ``balanced`` says for each value whether its quotes are balanced.
    """
    quote, backslash = source == _QUOTE, source == _BACKSLASH
    if not quote.any() and not backslash.any():
        return None
    escaped = _escaped(backslash)
    mark = quote & ~escaped
    count = np.concatenate([[0], np.cumsum(mark)])
    before = np.repeat(count[offsets[:-1]], np.diff(offsets))
    inside = ((count[1:] - before) & 1).astype(np.bool_)
    balanced = ((count[offsets[1:]] - count[offsets[:-1]]) & 1) == 0
    return Quotes(mark, inside, backslash & ~escaped, balanced)


def _escaped(backslash: Mask) -> Mask:
    """Return the bytes after an odd number of backslashes."""
    if not backslash.any():
        return np.zeros(len(backslash), np.bool_)
    places = np.arange(len(backslash))
    last_other = np.maximum.accumulate(np.where(backslash, -1, places))
    run = places - last_other  # The number of backslashes that end at each position.
    escaped = np.zeros(len(backslash), np.bool_)
    escaped[1:] = (run[:-1] & 1).astype(np.bool_)
    return escaped


def take_bytes(
    source: Bytes, keep: Mask, starts: Positions, ends: Positions, valid: Mask
) -> ArrowArray:
    """Return the kept bytes between ``starts`` and ``ends`` as a string array.

    Every kept byte must be within one of these ranges.
    """
    kept = np.concatenate([[0], np.cumsum(keep)])
    offsets = np.concatenate([[0], np.cumsum(kept[ends] - kept[starts])])
    return strings(source[keep], offsets, valid)

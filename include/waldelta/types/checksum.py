"""Texts of values in checksums: separators, and bytes in hexadecimal as PostgreSQL prints bytea."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waldelta.pgoutput.byte_readers import ArrowArray, Mask
from waldelta.types.base import strings
from waldelta.types.scan import packed

_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_HEX = np.stack([np.repeat(_DIGITS, 16), np.tile(_DIGITS, 16)], axis=1)


@dataclass(frozen=True, slots=True)
class Marks:
    """Separators between values and between elements, and the text for null, drawn for each run.

    No value can contain them on purpose, so rows with different values never have the same text.
    """

    between: str
    null: str
    element: str

    @classmethod
    def drawn(cls, nonce: str) -> Marks:
        """Returns marks with a few characters of the run's nonce."""
        return cls(f"\x1f{nonce}", f"\x1e{nonce}", f"\x1d{nonce}")


def integers(values: ArrowArray) -> NDArray[Any]:
    """Returns integers without nulls, which become 0."""
    filled = pc.fill_null(values, 0) if values.null_count else values
    found: NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return found


def bytea_text(numbers: NDArray[Any], values: ArrowArray) -> ArrowArray:
    """Returns big-endian numbers as PostgreSQL prints them as bytea; null where ``values`` are."""
    size = numbers.dtype.itemsize
    texts = np.empty((len(numbers), 2 + 2 * size), np.uint8)
    texts[:, 0], texts[:, 1] = ord("\\"), ord("x")
    texts[:, 2:] = _HEX[
        np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), size)
    ].reshape(len(numbers), 2 * size)
    offsets = np.arange(len(numbers) + 1) * (2 + 2 * size)
    return strings(texts.reshape(-1), offsets, _valid(values))


def hex_text(values: ArrowArray) -> ArrowArray:
    """Returns the bytes of each text or binary value in hexadecimal."""
    data, offsets = packed(values.cast(pa.binary()), b"")
    return strings(_HEX[data].reshape(-1), 2 * offsets, _valid(values))


def _valid(values: ArrowArray) -> Mask | None:
    return values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else None

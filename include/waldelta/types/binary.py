"""bytea, printed in hex."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from waldelta.pgoutput.byte_readers import ArrowArray, Mask
from waldelta.types.base import (
    Marks,
    Representable,
    Selected,
    TargetType,
    as_text,
    hex_text,
    packed,
    split_representable,
    strings,
)

_BAD = 255
_NIBBLES = np.full(256, _BAD, np.uint8)
for _digit in range(16):
    _NIBBLES[ord(f"{_digit:x}")] = _NIBBLES[ord(f"{_digit:X}")] = _digit
_PREFIX = (ord("\\"), ord("x"))


@dataclass(frozen=True)
class Bytea(TargetType):
    """Bytes, printed as ``\\x`` and two digits each."""

    may_be_raw: ClassVar[bool] = False
    has_one_form: ClassVar[bool] = True

    spark: str = "binary"
    arrow: Any = field(default_factory=pa.binary)

    def read(self, text: ArrowArray) -> Representable:
        """Read all values at once.

        Each value has an even length, so the pairs of digits are aligned over the whole buffer.
        """
        is_typed = _is_hex(text)
        text, raw = (text, None) if is_typed.all() else split_representable(text, is_typed)
        valid = text.is_valid().to_numpy(zero_copy_only=False)
        digits, offsets = packed(text, "\\x")
        pairs = _NIBBLES[digits].reshape(-1, 2)
        data = np.delete((pairs[:, 0] << 4) | (pairs[:, 1] & 15), offsets[:-1] // 2)
        return strings(data, offsets // 2 - np.arange(len(offsets)), valid, pa.binary()), raw

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Returns the value itself."""
        return sql.SQL("{}::pg_catalog.bytea").format(column), None

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Returns the text in hexadecimal."""
        return as_text(column), None

    def pg_text(self, values: ArrowArray) -> ArrowArray:
        """Returns the text in hexadecimal."""
        return pc.binary_join_element_wise("\\x", hex_text(values), "")


def _is_hex(text: ArrowArray) -> Mask:
    digits, offsets = packed(text, "\\x")
    size, start = np.diff(offsets), offsets[:-1]
    is_even = (size >= 2) & (size % 2 == 0)
    is_even[is_even] = (digits[start[is_even]] == _PREFIX[0]) & (
        digits[start[is_even] + 1] == _PREFIX[1]
    )
    # The number of bytes that aren't hex digits, up to each position; the prefix itself has two of
    # them.
    wrong = np.concatenate([[0], np.cumsum(_NIBBLES[digits] == _BAD)])
    return np.asarray(is_even & (wrong[offsets[1:]] - wrong[start] == 2))

"""Text types, bytes and bits in binary format."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa

from waldelta.pgoutput.byte_readers import ArrowArray, Mask, Messages, u1, u4
from waldelta.types.base import hex_text, packed, strings
from waldelta.types.wire._values import HEX, Converter, cut, joined, refuse, sized

_UUID_DASHES = (8, 12, 16, 20)


def _drop_version(values: Messages, valid: Mask) -> ArrowArray:
    versions = u1(values.bytes, values.start)
    refuse(
        values, valid & ((versions != 1) | (values.start == values.end)), "of an unknown version"
    )
    return cut(values, valid, 1)


def _bytea(values: Messages, valid: Mask) -> ArrowArray:
    return joined("\\x", hex_text(cut(values, valid, 0)))


def _uuid(values: Messages, valid: Mask) -> ArrowArray:
    start = sized(values, valid, 16)[valid]
    data = values.bytes[start[:, None] + np.arange(16)]
    digits = np.empty((len(start), 32), np.uint8)
    digits[:, 0::2], digits[:, 1::2] = HEX[data >> 4], HEX[data & 15]
    text = np.insert(digits, _UUID_DASHES, ord("-"), axis=1)
    return strings(text.reshape(-1), np.concatenate([[0], np.cumsum(valid * 36)]), valid)


def _bits(values: Messages, valid: Mask) -> ArrowArray:
    """Convert bits: their number in four bytes, then eight bits in each byte, the last one
    padded.
    """
    size = values.end - values.start
    count = np.where(valid, u4(values.bytes, values.start), 0)
    refuse(values, valid & ((size < 4) | (size - 4 != -(-count // 8))), "bits of a wrong size")
    data, _ = packed(cut(values, valid, 4), b"")
    sizes = np.where(valid, size - 4, 0)
    unpacked = np.unpackbits(data) + np.uint8(ord("0"))
    # The padding at the end of each value is left out.
    place = np.arange(len(unpacked)) - np.repeat(8 * (np.cumsum(sizes) - sizes), 8 * sizes)
    is_bit = place < np.repeat(count, 8 * sizes)
    return strings(unpacked[is_bit], np.concatenate([[0], np.cumsum(count)]), valid)


def _char(values: Messages, valid: Mask) -> ArrowArray:
    byte = u1(values.bytes, sized(values, valid, 1))
    return pa.array(_CHARS, pa.string()).take(pa.array(byte, mask=~valid))


# As charout: nothing for a zero byte, octal beyond ASCII.
_CHARS = ["", *(chr(n) for n in range(1, 128)), *(f"\\{n:03o}" for n in range(128, 256))]
CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(
        ("text", "varchar", "bpchar", "name", "json", "unknown", "enum", "xml"),
        partial(cut, skipped=0),
    ),
    **dict.fromkeys(("jsonb", "jsonpath"), _drop_version),
    "bytea": _bytea, "uuid": _uuid, "bit": _bits, "varbit": _bits, "char": _char,
}  # fmt: skip

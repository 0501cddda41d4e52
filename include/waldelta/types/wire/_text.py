"""Text types, bytes and bits in binary format."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from waldelta.pgoutput.byte_readers import ArrowArray, Mask, Messages, u1, u4
from waldelta.types.wire._values import HEX, Converter, cut, refuse, sized, strings

_UUID_DASHES = (8, 12, 16, 20)


def _same(values: Messages, valid: Mask) -> ArrowArray:
    return cut(values, valid, 0)


def _versioned(values: Messages, valid: Mask) -> ArrowArray:
    versions = u1(values.bytes, values.start)
    refuse(
        values, valid & ((versions != 1) | (values.start == values.end)), "of an unknown version"
    )
    return cut(values, valid, 1)


def _bytea(values: Messages, valid: Mask) -> ArrowArray:
    raw = cut(values, valid, 0)
    bounds = np.frombuffer(raw.buffers()[1], np.int32)[: len(valid) + 1].astype(np.int64)
    data = np.frombuffer(raw.buffers()[2], np.uint8)[: bounds[-1]]
    digits = np.empty((len(data), 2), np.uint8)
    digits[:, 0], digits[:, 1] = HEX[data >> 4], HEX[data & 15]
    # Each value gets a prefix of two bytes.
    prefixed = np.insert(digits, bounds[:-1], np.frombuffer(b"\\x", np.uint8), axis=0)
    offsets = 2 * (bounds + np.arange(len(bounds)))
    return strings(prefixed.reshape(-1), offsets, valid)


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
    packed = cut(values, valid, 4)
    data = (
        np.frombuffer(packed.buffers()[2], np.uint8)
        if packed.buffers()[2] is not None
        else np.zeros(0, np.uint8)
    )
    sizes = np.where(valid, size - 4, 0)
    unpacked = np.unpackbits(data[: sizes.sum()]) + np.uint8(ord("0"))
    # The padding at the end of each value is left out.
    place = np.arange(len(unpacked)) - np.repeat(8 * (np.cumsum(sizes) - sizes), 8 * sizes)
    kept = place < np.repeat(count, 8 * sizes)
    return strings(unpacked[kept], np.concatenate([[0], np.cumsum(count)]), valid)


def _char(values: Messages, valid: Mask) -> ArrowArray:
    byte = u1(values.bytes, sized(values, valid, 1))
    return pa.array(_CHARS, pa.string()).take(pa.array(byte, mask=~valid))


# As charout: nothing for a zero byte, octal beyond ASCII.
_CHARS = ["", *(chr(n) for n in range(1, 128)), *(f"\\{n:03o}" for n in range(128, 256))]
CONVERTERS: dict[str, Converter] = {
    **dict.fromkeys(("text", "varchar", "bpchar", "name", "json", "unknown", "enum", "xml"), _same),
    **dict.fromkeys(("jsonb", "jsonpath"), _versioned),
    "bytea": _bytea, "uuid": _uuid, "bit": _bits, "varbit": _bits, "char": _char,
}  # fmt: skip

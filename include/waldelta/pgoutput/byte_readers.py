"""Reads integers out of bytes, of one message or of many messages at once; no other module does
that.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from waldelta.errors import DecodeError
from waldelta.quantities import counted

Positions = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
# An array of any type; the stubs of pyarrow have overloads for single types only.
ArrowArray: TypeAlias = Any

# PostgreSQL counts microseconds from 2000-01-01, Unix from 1970-01-01.
EPOCH_SHIFT_US = 946_684_800_000_000


class Messages:
    """Many messages in one buffer: message *i* is ``bytes[start[i]:end[i]]``.

    It takes a binary or large_binary array, sliced or not. The functions below clamp the positions
    they read to the buffer's end, so no read can leave the buffer. The caller must check that a
    position is within its *message*.
    """

    def __init__(self, data: ArrowArray, message: str = "row") -> None:
        data = data.combine_chunks() if isinstance(data, pa.ChunkedArray) else data
        if not (pa.types.is_binary(data.type) or pa.types.is_large_binary(data.type)):
            raise TypeError(f"messages must be binary, not {data.type}")
        if data.null_count:
            row = int(np.argmin(data.is_valid().to_numpy(zero_copy_only=False)))
            raise DecodeError(message, f"row {row}", 0, "no bytes")
        self.message = message
        self.is_large = pa.types.is_large_binary(data.type)
        self.start, self.end, self.buffer = _layout(data)
        self.bytes: Bytes = np.frombuffer(self.buffer, np.uint8)
        if len(self) and (
            self.start[0] < 0 or self.end[-1] > len(self.bytes) or (self.start > self.end).any()
        ):
            raise DecodeError(message, "offsets", 0, "the array's offsets leave its buffer")

    def __len__(self) -> int:
        return len(self.start)

    def at(self, row: int) -> bytes:
        """The bytes of one message."""
        return self.bytes[self.start[row] : self.end[row]].tobytes()

    def error(self, row: int, field: str, position: int, detail: str) -> DecodeError:
        """Returns the error for one message.

        ``position`` is in the buffer, the error's offset in the message. The error has the
        message's length, but not its bytes, because these may be values of rows.
        """
        offset, size = int(position - self.start[row]), int(self.end[row] - self.start[row])
        return DecodeError(
            self.message, field, offset, f"{detail} (row {row}, {counted(size, 'byte')})", row
        )


def _layout(data: ArrowArray) -> tuple[Positions, Positions, Any]:
    """Start and end of each value in the values buffer, and that buffer."""
    _, offsets, values = data.buffers()
    if len(data) == 0 or offsets is None:
        empty = np.zeros(0, np.int64)
        return empty, empty, b""
    is_large = pa.types.is_large_binary(data.type) or pa.types.is_large_string(data.type)
    width: np.dtype[Any] = np.dtype(np.int64 if is_large else np.int32)
    # The offsets buffer of a slice is the parent's, so the slice's own offset counts.
    at = np.frombuffer(memoryview(offsets), width)[
        data.offset : data.offset + len(data) + 1
    ].astype(np.int64)
    return at[:-1], at[1:], b"" if values is None else values


def u1(source: Bytes, at: Positions) -> Bytes:
    """One byte at each position."""
    return source.take(at, mode="clip") if len(source) else np.zeros(len(at), np.uint8)


def _integers(source: Bytes, at: Positions, *, dtype: str) -> Positions:
    size = np.dtype(dtype).itemsize
    if len(source) < size:
        return np.zeros(len(at), np.int64)
    # A view with a stride of one byte: element p is the integer that begins at byte p.
    integers = np.ndarray((len(source) - size + 1,), dtype, buffer=source, strides=(1,))
    return np.asarray(integers[np.minimum(at, len(integers) - 1)]).astype(np.int64)


# Unsigned and signed integers of two, four and eight bytes at each position.
u2, i2 = partial(_integers, dtype=">u2"), partial(_integers, dtype=">i2")
u4, i4 = partial(_integers, dtype=">u4"), partial(_integers, dtype=">i4")
i8 = partial(_integers, dtype=">i8")


def unsigned(data: bytes, at: int) -> int | None:
    """An unsigned 32-bit integer in a message that may be cut off; None where it is."""
    return int.from_bytes(data[at : at + 4], "big") if len(data) >= at + 4 else None


class MessageReader:
    """Reads one message from its first byte to its last; every read checks the message's end.

    ``streamed``: the message is between Stream Start and Stop, where an xid comes first.
    """

    def __init__(self, data: bytes, message: str, kind: str, *, streamed: bool = False) -> None:
        self.data, self.message, self.position = data, message, 0
        if self.integer(1, "kind") != ord(kind):
            raise self.error("kind", 0, f"expected {kind!r}")
        if streamed:
            self.integer(4, "xid")

    def error(self, field: str, offset: int, detail: str) -> DecodeError:
        """The error for a field of this message, without the message's bytes."""
        return DecodeError(
            self.message, field, offset, f"{detail} ({counted(len(self.data), 'byte')})"
        )

    def integer(self, size: int, field: str, *, signed: bool = False) -> int:
        """A big-endian integer of ``size`` bytes."""
        at, end = self.position, self.position + size
        if end > len(self.data):
            raise self.error(field, at, f"cut off: {size} bytes wanted, {len(self.data) - at} left")
        self.position = end
        return int.from_bytes(self.data[at:end], "big", signed=signed)

    def text(self, field: str) -> str:
        """A string that ends with a zero byte."""
        at, end = self.position, self.data.find(b"\0", self.position)
        if end < 0:
            raise self.error(field, at, "cut off: no zero byte ends the string")
        self.position = end + 1
        try:
            return self.data[at:end].decode()
        except UnicodeDecodeError as err:
            raise self.error(field, at + err.start, "not UTF-8") from err

    def content(self, field: str) -> bytes:
        """Returns bytes that follow their own length."""
        length = self.integer(4, f"{field}.length", signed=True)
        at, self.position = self.position, self.position + length
        if not 0 <= length <= len(self.data) - at:
            raise self.error(f"{field}.length", at - 4, f"{length} bytes don't fit the message")
        return self.data[at : at + length]

    def finish(self) -> None:
        """Check that the whole message was read."""
        if self.position != len(self.data):
            raise self.error(
                "end", self.position, f"{len(self.data) - self.position} bytes too many"
            )


def arrow_buffer(values: NDArray[Any]) -> pa.Buffer:
    """The array's own memory, without a copy."""
    return pa.py_buffer(memoryview(np.ascontiguousarray(values)))  # type: ignore[arg-type]


def copy_out(messages: Messages, starts: Positions, ends: Positions, valid: Mask) -> ArrowArray:
    """The values between ``starts`` and ``ends`` as an array of their own."""
    kind, width = (pa.large_binary(), np.int64) if messages.is_large else (pa.binary(), np.int32)
    count = len(starts)
    if count == 0:
        return pa.array([], kind)
    # An array over the same bytes: its even elements are the values, its odd ones the bytes in
    # between.
    offsets = np.empty(2 * count, width)
    offsets[0::2], offsets[1::2] = starts, ends
    woven = pa.Array.from_buffers(
        kind, 2 * count - 1, [None, arrow_buffer(offsets), messages.buffer]
    )
    values = woven.take(np.arange(0, 2 * count, 2))
    if valid.all():
        return values
    bits = arrow_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, count, [bits, *values.buffers()[1:]])

"""Geometric types in binary format; they are rare, so each distinct value is converted by
itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from waldelta.types.wire._numeric import float_text
from waldelta.types.wire._values import Converter, one_by_one


def _numbers(data: bytes, at: int, count: int) -> list[str]:
    if len(data) - at != 8 * count:
        raise ValueError(f"{8 * count} bytes of coordinates wanted")
    return [float_text(np.float64(number)) for number in struct.unpack_from(f"!{count}d", data, at)]


def _points(numbers: list[str]) -> str:
    return ",".join(f"({x},{y})" for x, y in zip(numbers[::2], numbers[1::2], strict=True))


def _counted(data: bytes, at: int) -> str:
    (count,) = struct.unpack_from("!i", data, at)
    if not 0 <= count <= len(data) // 16:
        raise ValueError("number of points out of range")
    return _points(_numbers(data, at + 4, 2 * count))


def _circle(data: bytes) -> str:
    x, y, radius = _numbers(data, 0, 3)
    return f"<({x},{y}),{radius}>"


def _path(data: bytes) -> str:
    return f"({_counted(data, 1)})" if data[0] else f"[{_counted(data, 1)}]"


_READERS: dict[str, Callable[[bytes], str]] = {
    "point": lambda data: _points(_numbers(data, 0, 2)),
    "lseg": lambda data: f"[{_points(_numbers(data, 0, 4))}]",
    "box": lambda data: _points(_numbers(data, 0, 4)),
    "line": lambda data: "{" + ",".join(_numbers(data, 0, 3)) + "}",
    "circle": _circle,
    "path": _path,
    "polygon": lambda data: f"({_counted(data, 0)})",
}
CONVERTERS: dict[str, Converter] = {name: one_by_one(read) for name, read in _READERS.items()}

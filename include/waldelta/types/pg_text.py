"""Prints typed values as text that PostgreSQL reads as the same value; for messages about keys and
rows, not for data.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.byte_readers import ArrowArray

# In a timestamp that Arrow has printed: zeros at the end of the fraction, and the zone.
_FRACTION = r"\.?0+(Z?)$"
_FLOATS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def pg_text(values: ArrowArray) -> list[str | None]:
    """Return each value as text, None where it is null; arrays and hstore as their literals.

    >>> pg_text(pa.array([[1.5, None], None]))
    ['{"1.5",NULL}', None]
    """
    kind = values.type
    if pa.types.is_binary(kind):
        return [None if v is None else f"\\x{v.hex()}" for v in values.to_pylist()]
    if pa.types.is_boolean(kind):
        return [None if v is None else "t" if v else "f" for v in values.to_pylist()]
    if pa.types.is_list(kind):
        return [None if not v.is_valid else _array(v.values) for v in values]
    if pa.types.is_map(kind):
        return [None if v is None else _hstore(v) for v in values.to_pylist()]
    return _scalars(values)


def _scalars(values: ArrowArray) -> list[str | None]:
    texts: ArrowArray = values.cast(pa.string())
    if pa.types.is_timestamp(values.type):
        texts = pc.replace_substring_regex(texts, _FRACTION, r"\1")
        return [None if t is None else t.replace("Z", "+00") for t in texts.to_pylist()]
    if pa.types.is_floating(values.type):
        return [None if t is None else _FLOATS.get(t, t) for t in texts.to_pylist()]
    found: list[str | None] = texts.to_pylist()
    return found


def _array(elements: Any) -> str:
    return "{" + ",".join("NULL" if t is None else _quoted(t) for t in pg_text(elements)) + "}"


def _hstore(entries: list[tuple[str, str | None]]) -> str:
    return ", ".join(f"{_quoted(k)}=>{'NULL' if v is None else _quoted(v)}" for k, v in entries)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

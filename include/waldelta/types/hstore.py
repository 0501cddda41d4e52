"""hstore: text to text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import storage
from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.types.base import (
    Representable,
    TargetType,
    find_quotes,
    joined,
    lists_as_bytes,
    numbered,
    numbers,
    packed,
    quoted,
    split_representable,
    take_bytes,
    utf8,
)

# Outside quotes hstore prints exactly these: "=>" in each pair, ", " between pairs, NULL.
_PAIR = '"[^"\\\\]*(?:\\\\.[^"\\\\]*)*"=>(?:"[^"\\\\]*(?:\\\\.[^"\\\\]*)*"|NULL)'
_ENTRIES = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))
_SHAPE = f"(?s)^(?:{_PAIR}(?:, {_PAIR})*)?$"


@dataclass(frozen=True)
class Hstore(TargetType):
    """A map of strings; values may be null."""

    may_be_raw: ClassVar[bool] = False

    spark: str = "map<string,string>"
    arrow: Any = field(default_factory=lambda: pa.map_(pa.string(), pa.string()))

    def read(self, text: ArrowArray) -> Representable:
        """Read keys and values: the quoted texts before and after each => outside quotes."""
        text = utf8(text)
        is_typed = np.asarray(pc.fill_null(pc.match_substring_regex(text, _SHAPE), True))
        typed_text, raw = (text, None) if is_typed.all() else split_representable(text, is_typed)
        source, offsets = packed(typed_text, "")
        valid = typed_text.is_valid().to_numpy(zero_copy_only=False)
        quotes = find_quotes(source, offsets)
        if quotes is None:
            none = pa.array([], pa.string())
            bounds = numbers(np.zeros(len(text) + 1))
            return pa.MapArray.from_arrays(bounds, none, none, mask=pa.array(~valid)), raw
        marks = np.flatnonzero(quotes.mark)
        opens, closes = marks[0::2], marks[1::2]
        arrows = np.flatnonzero((source == ord("=")) & ~quotes.inside)
        key = np.searchsorted(opens, arrows) - 1
        is_text = source[arrows + 2] == ord('"')
        value = np.minimum(key + 1, len(opens) - 1)
        content = quotes.inside & ~quotes.mark & ~quotes.escaping
        texts = take_bytes(source, content, opens + 1, closes, np.ones(len(opens), np.bool_))
        values = texts.take(numbers(value, ~is_text))
        bounds = numbers(np.searchsorted(arrows, offsets))
        return (
            pa.MapArray.from_arrays(
                bounds, texts.take(numbers(key)), values, mask=pa.array(~valid)
            ),
            raw,
        )

    def exact_sql(self, value: str) -> str:
        """Returns the map, which has no equality, as an array of entries."""
        return f"array_sort(map_entries({value}))"

    # Only maps with the same entries are equal.
    equal_sql = exact_sql

    def pg_text(self, values: ArrowArray) -> ArrowArray:
        """Returns each map as hstore prints it."""
        lists = values.cast(_ENTRIES)
        entries = lists.flatten()
        keys, texts = (quoted(storage(entries.field(n)).cast(pa.string())) for n in (0, 1))
        return joined(lists, pc.binary_join_element_wise(keys, texts, "=>"), ", ")

    def exact_values(self, values: ArrowArray) -> ArrowArray:
        """Returns the entries in the order of their keys, packed."""
        lists = values.cast(_ENTRIES)
        entries = lists.flatten()
        keys, texts = (storage(entries.field(n)) for n in (0, 1))
        rows = lists.value_parent_indices().to_numpy(zero_copy_only=False)
        order = numbers(np.lexsort((numbered(keys), rows)))
        return lists_as_bytes(lists, keys.take(order), texts.take(order))

    equal_values = exact_values

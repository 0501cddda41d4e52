"""json and jsonb as Spark's variant: values stay text until Spark parses it.

Only documents that a variant would change are raw. A variant has a document's value: no white
space, no order of keys, no trailing zeros of numbers. PostgreSQL's text has more, so the variant's
value is equal to it as JSON.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.byte_readers import ArrowArray, Bytes, Mask, Positions
from waldelta.types.base import (
    Quotes,
    Representable,
    TargetType,
    find_quotes,
    packed,
    split_representable,
    take_bytes,
    utf8,
)

# Below the limits of Spark's parser: 1,000 levels, names of 50,000 characters, 16 MB of variant.
_MAX_LEVELS, _MAX_NAME_BYTES, _MAX_BYTES = 500, 50_000, 4 << 20
# A variant's decimal has 38 digits; Spark reads any number with more digits, or with an exponent,
# as a double.
_LONG_NUMBER, _EXPONENT = "[0-9.]{39}", "[0-9][eE]"
_ALL_DIGITS = Context(prec=400)
_SURROGATE = r"\\u[dD][89a-fA-F]"
_OPENING, _CLOSING, _LOWER = ord("{"), ord("}"), 0x20  # With this bit set, [ and ] become { and }.


@dataclass(frozen=True)
class Variant(TargetType):
    """A JSON document as a variant.

    ``may_repeat_keys`` is True for json, whose objects may have the same key twice. A variant's
    text differs from the document that PostgreSQL prints, so it has no checksum.
    """

    has_checksum: ClassVar[bool] = False

    spark: str = "variant"
    arrow: Any = field(default_factory=pa.string)
    may_repeat_keys: bool = False

    def read(self, text: ArrowArray) -> Representable:
        """Read all documents at once.

        Only documents with exponents, or with escapes in keys or of surrogates, are examined one by
        one.
        """
        text = utf8(text)
        source, offsets = packed(text, "null")
        quotes = find_quotes(source, offsets)
        if quotes is None:
            nothing = np.zeros(len(source), np.bool_)
            quotes = Quotes(nothing, nothing, nothing, np.ones(len(text), np.bool_))
        if not quotes.balanced.all():  # The text isn't JSON, so PostgreSQL doesn't print it.
            balanced_text, raw = split_representable(text, quotes.balanced)
            typed, deeper_raw = self.read(balanced_text)
            return typed, raw if deeper_raw is None else pc.coalesce(raw, deeper_raw)
        is_typed, odd = self._judge(_Documents(source, offsets, quotes))
        odd |= np.asarray(pc.match_substring_regex(text, _SURROGATE).fill_null(False))
        odd &= is_typed & text.is_valid().to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(odd):
            is_typed[row] = _is_exact(text[int(row)].as_py())
        return (text, None) if is_typed.all() else split_representable(text, is_typed)

    def stored_sql(self, value: str) -> str:
        """Returns the variant of a document's text."""
        return f"parse_json({value})"

    def exact_sql(self, value: str) -> str:
        """Returns the document as text with sorted keys."""
        return f"to_json({value})"

    def exact_values(self, values: ArrowArray) -> ArrowArray:
        """Returns the documents with sorted keys and numbers of one form, also those of
        exact_sql().

        They are read one by one.
        """
        texts = (text if text is None else _canonical(text) for text in values.to_pylist())
        return pa.array(texts, pa.string())

    def _judge(self, documents: _Documents) -> tuple[Mask, Mask]:
        """Returns which documents a variant can hold, and which of them need a closer
        examination.
        """
        outside = documents.outside()
        is_typed = (np.diff(documents.offsets) <= _MAX_BYTES) & documents.are_flat()
        is_typed &= ~np.asarray(pc.match_substring_regex(outside, _LONG_NUMBER))
        odd = np.asarray(pc.match_substring_regex(outside, _EXPONENT)).copy()
        keys = documents.keys()
        is_typed[keys.rows[keys.ends - keys.starts > _MAX_NAME_BYTES]] = False
        if self.may_repeat_keys and len(keys.rows):
            is_typed[documents.rows_that_repeat(keys)] = False
            escaped = np.concatenate([[0], np.cumsum(documents.quotes.escaping)])
            odd[keys.rows[escaped[keys.ends] > escaped[keys.starts]]] = True
        return is_typed, odd


@dataclass(frozen=True)
class _Keys:
    """The positions of the keys of all objects, without quotes; the document and the colon of
    each.
    """

    starts: Positions
    ends: Positions
    rows: Positions
    colons: Positions


class _Documents:
    """Many JSON texts in one buffer."""

    def __init__(self, source: Bytes, offsets: Positions, quotes: Quotes) -> None:
        self.source, self.offsets, self.quotes = source, offsets, quotes
        self._is_outside = ~(quotes.inside | quotes.mark)
        folded = source | _LOWER
        brackets = ((folded == _OPENING) | (folded == _CLOSING)) & self._is_outside
        self._brackets = np.flatnonzero(brackets)
        self._opens = folded[self._brackets] == _OPENING
        # The level after each bracket, counted across documents: complete documents end on the
        # level where they began.
        self._levels = np.cumsum(np.where(self._opens, 1, -1))

    def outside(self) -> ArrowArray:
        """Returns the JSON texts without their string literals and quotes."""
        valid = np.ones(len(self.offsets) - 1, np.bool_)
        return take_bytes(self.source, self._is_outside, self.offsets[:-1], self.offsets[1:], valid)

    def are_flat(self) -> Mask:
        """Returns which documents have matching brackets that aren't nested too deeply."""
        rows = self._rows(self._brackets)
        most, last = (
            np.zeros(len(self.offsets) - 1, np.int64),
            np.zeros(len(self.offsets) - 1, np.int64),
        )
        np.maximum.at(most, rows, self._levels)
        np.add.at(last, rows, np.where(self._opens, 1, -1))
        return np.asarray((most <= _MAX_LEVELS) & (last == 0))

    def keys(self) -> _Keys:
        """Returns the keys: every colon outside strings follows one."""
        colons = np.flatnonzero((self.source == ord(":")) & self._is_outside)
        marks = np.flatnonzero(self.quotes.mark)
        opens, closes = marks[0::2], marks[1::2]
        which = np.searchsorted(opens, colons) - 1
        if len(which) and (not len(opens) or which[0] < 0):
            which, colons = which[:0], colons[:0]
        return _Keys(opens[which] + 1, closes[which], self._rows(colons), colons)

    def rows_that_repeat(self, keys: _Keys) -> Positions:
        """Returns the documents with an object that has two keys of the same bytes."""
        level = self._levels[np.searchsorted(self._brackets, keys.colons) - 1]
        # The object of a key is the last one opened on the key's level before it.
        span = len(self.source) + 1
        opened = np.sort(self._levels[self._opens] * span + self._brackets[self._opens])
        container = np.searchsorted(opened, level * span + keys.colons) - 1
        edges = np.zeros(span, np.int8)
        edges[keys.starts] += 1
        edges[keys.ends] -= 1
        inside = np.cumsum(edges[:-1], dtype=np.int8).astype(np.bool_)
        names = take_bytes(
            self.source, inside, keys.starts, keys.ends, np.ones(len(keys.starts), np.bool_)
        )
        coded: Any = names.dictionary_encode()
        pair = container * (len(coded.dictionary) + 1) + coded.indices.to_numpy(
            zero_copy_only=False
        )
        order = np.argsort(pair, kind="stable")
        again = np.flatnonzero(pair[order][1:] == pair[order][:-1])
        return keys.rows[order[again]]

    def _rows(self, places: Positions) -> Positions:
        return np.asarray(np.searchsorted(self.offsets, places, side="right") - 1)


def _canonical(text: str) -> str:
    return json.dumps(json.loads(text, parse_float=_number, parse_int=_number), sort_keys=True)


def _number(text: str) -> str:
    """Returns a number as its digits, which no string of a document begins like."""
    number = Decimal(repr(float(text)) if "e" in text.lower() else text)
    return f"\0{number.normalize(_ALL_DIGITS) if number else 0}"


def _is_exact(text: str) -> bool:
    """Returns whether one document survives a conversion to a variant and back."""
    try:
        document = json.loads(text, object_pairs_hook=_distinct, parse_float=_exact, parse_int=str)
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key twice")
    return members


def _exact(number: str) -> str:
    """Check that a number that Spark reads as a double prints with its own digits."""
    if "e" in number.lower():
        value = float(number)
        if not math.isfinite(value) or _digits(number) != _digits(repr(value)):
            raise ValueError("digits lost")
    return number


def _digits(number: str) -> str:
    return re.sub(r"[eE].*|[-.]", "", number).strip("0")

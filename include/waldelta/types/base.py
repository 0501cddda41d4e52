"""The interface of all type families, and reading texts that a type may not be able to hold.

Checksums compare values as texts: between separators, and bytes in hexadecimal as PostgreSQL prints
bytea.

Finds and prints quoted text in many values at once: arrays, vectors and hstore share their
quoting rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from psycopg import sql

from waldelta.errors import DecodeError
from waldelta.pgoutput.byte_readers import ArrowArray, Bytes, Mask, Positions, arrow_buffer

_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def numbers(values: NDArray[Any], null: Mask | None = None) -> ArrowArray:
    """Returns offsets or indices for Arrow."""
    return pa.array(values.astype(np.int32), mask=null)


def packed(text: ArrowArray, null: str | bytes) -> tuple[Bytes, Positions]:
    """Returns the values' bytes without gaps, and their offsets; ``null`` is the text used for
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
    """Returns texts in quotes as arrays and hstore print them; the word NULL for null."""
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    return pc.fill_null(pc.binary_join_element_wise('"', escaped, '"', ""), "NULL")


def joined(lists: ArrowArray, elements: ArrowArray, separator: str) -> ArrowArray:
    """Returns each list's elements, given as texts without gaps, in one text; null for null."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    offsets = numbers(np.concatenate([[0], np.cumsum(lengths)]))
    texts = pc.binary_join(pa.ListArray.from_arrays(offsets, elements), separator)
    return pc.if_else(lists.is_valid(), texts, pa.scalar(None, pa.string()))


def numbered(values: ArrowArray) -> NDArray[np.int64]:
    """Returns integers that are equal exactly where the values are, or where both are null."""
    encoded: Any = values.dictionary_encode()
    indices = encoded.indices.fill_null(len(encoded.dictionary))
    return np.asarray(indices.to_numpy(zero_copy_only=False)).astype(np.int64)


def lists_as_bytes(lists: ArrowArray, *elements: ArrowArray) -> ArrowArray:
    """Returns bytes that are equal exactly where lists of these elements are; null for null.

    ``elements`` are columns of values, without gaps. Arrow can't hash lists.
    """
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    numbers_of = np.stack([numbered(column) for column in elements], axis=1)
    width = numbers_of.itemsize * len(elements)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * width
    valid = np.asarray(lists.is_valid())
    return strings(numbers_of.reshape(-1).view(np.uint8), offsets, valid, pa.large_binary())


def find_quotes(source: Bytes, offsets: Positions) -> Quotes | None:
    """Returns where the quotes are; None when there is none.

    ``balanced`` says for each value whether its quotes are balanced.
    """
    quote, backslash = source == _QUOTE, source == _BACKSLASH
    if not quote.any() and not backslash.any():
        return None
    escaped = _escaped_bytes(backslash)
    mark = quote & ~escaped
    count = np.concatenate([[0], np.cumsum(mark)])
    quotes_ahead = np.repeat(count[offsets[:-1]], np.diff(offsets))
    inside = ((count[1:] - quotes_ahead) & 1).astype(np.bool_)
    balanced = ((count[offsets[1:]] - count[offsets[:-1]]) & 1) == 0
    return Quotes(mark, inside, backslash & ~escaped, balanced)


def _escaped_bytes(backslash: Mask) -> Mask:
    """Returns the bytes after an odd number of backslashes."""
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
    """Returns the kept bytes between ``starts`` and ``ends`` as a string array.

    Every kept byte must be within one of these ranges.
    """
    kept_ahead = np.concatenate([[0], np.cumsum(keep)])
    offsets = np.concatenate([[0], np.cumsum(kept_ahead[ends] - kept_ahead[starts])])
    return strings(source[keep], offsets, valid)


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
    numbers: NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return numbers


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


# The typed values, and PostgreSQL's text where the type can't hold the value (None: no such value
# in this array).
Representable: TypeAlias = tuple[ArrowArray, ArrowArray | None]
Selected: TypeAlias = tuple[sql.Composable, sql.Composable | None]
# How values of a foreign key are compared. Trailing blanks don't count on either side ("padded"),
# or only where the referring side is char(n) ("own padded").
Comparison: TypeAlias = Literal["same", "integer", "number", "padded", "own padded"]
_STRING = pa.string()


@dataclass(frozen=True)
class TargetType(ABC):
    """A column's type in the lake: as Spark's DDL names it, and as Arrow carries it.

    ``may_be_raw``: the type can't hold some values that PostgreSQL prints. ``has_checksum``: both
    sides can produce the same text for a checksum. ``is_fixed_size``: PostgreSQL never stores a
    value out of line (TOAST), so it is always sent. ``is_number``: a mean and a deviation have a
    meaning. ``is_text``: PostgreSQL's text is stored, whatever it is. ``has_one_form``: equal
    values are equal as stored, in Spark's joins too. ``prints_alike``: equal values have equal
    texts. ``keeps_value``: what is stored is the value, so filters can judge it; not with a mask.
    """

    may_be_raw: ClassVar[bool] = True
    has_checksum: ClassVar[bool] = True
    is_fixed_size: ClassVar[bool] = False
    is_number: ClassVar[bool] = False
    is_text: ClassVar[bool] = False
    has_one_form: ClassVar[bool] = False
    prints_alike: ClassVar[bool] = False
    keeps_value: ClassVar[bool] = True

    spark: str
    arrow: Any

    @property
    def ledger_name(self) -> str:
        """The name that identifies it in the ledger: Spark's, where no other type has that one."""
        return self.spark

    def from_text(self, values: ArrowArray) -> Representable:
        """Read what PostgreSQL's output function printed (binary or string).

        A value that the type can't hold is null among the typed values, and its raw text is in the
        second array. Raises DecodeError only for bytes that aren't UTF-8. A server with
        ``client_encoding UTF8`` sends such bytes only for databases of encoding SQL_ASCII.
        """
        if values.null_count == len(values):
            return pa.nulls(len(values), self.arrow), None
        if not may_be_text(values.type):
            return values.cast(self.arrow), None
        if pa.types.is_large_binary(values.type):
            values = values.cast(pa.binary())
        if pa.types.is_large_string(values.type):
            values = values.cast(pa.string())
        # A view, not a cast: most families' own parsers are stricter than a check for UTF-8.
        typed, raw = self.read(values.view(pa.string()))
        return typed, raw if raw is not None and raw.null_count < len(raw) else None

    @abstractmethod
    def read(self, text: ArrowArray) -> Representable:
        """Read as from_text() does, from a string array whose bytes may not be UTF-8."""

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Returns what to select so that a copy has the same values as the stream.

        The first expression returns the Arrow type itself, or text for from_text(). The second, if
        any, returns the raw texts.
        """
        return printed(column), None

    def pg_text(self, values: ArrowArray) -> ArrowArray:
        """Returns texts that PostgreSQL reads as the same values; for messages about keys and rows,
        not for data.
        """
        return values.cast(pa.string())

    def stored_sql(self, value: str) -> str:
        """Returns Spark SQL for the stored value, from the value as Arrow carries it."""
        return value

    def exact_sql(self, value: str) -> str:
        """Returns Spark SQL by whose results ``<=>`` and GROUP BY tell all stored values apart."""
        return value

    def equal_sql(self, value: str) -> str:
        """Returns Spark SQL whose results are equal where the values are equal in PostgreSQL."""
        return value

    def exact_values(self, values: ArrowArray) -> ArrowArray:
        """Returns values that Arrow can hash, equal within the array where those of exact_sql()
        are.
        """
        return values

    def equal_values(self, values: ArrowArray) -> ArrowArray:
        """Returns values that Arrow can hash, equal within the array where those of equal_sql()
        are.
        """
        return values

    def compared_with(self, referenced: TargetType) -> Comparison | None:
        """Returns how values of a foreign key are compared with the referenced ones, as PostgreSQL
        does; None where equality is uncertain.
        """
        return "same" if self.has_one_form and self.spark == referenced.spark else None

    def equal_texts(self, texts: ArrowArray) -> ArrowArray:
        """Returns binary texts, the same for printed values that are equal in PostgreSQL."""
        return texts

    def checksum_sql(
        self, column: sql.Composable, marks: Marks, /, *, keeps_raw: bool
    ) -> sql.Composable:
        """Returns what to select for a value's text in a checksum; null for null.

        A value that the type can't hold is PostgreSQL's text with ``keeps_raw``, else null.
        """
        value, unheld = self.checksum_parts(column, marks)
        if unheld is None:
            return value
        raw = printed(column) if keeps_raw else sql.SQL("null")
        return sql.SQL("case when {} then {} else {} end").format(unheld, raw, value)

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Returns SQL for the text of a value that the type can hold, and the condition that it
        can't, if any.
        """
        return printed(column), None

    def element_parts(self, column: sql.Composable, marks: Marks, /) -> Selected:
        """Returns checksum_parts() of an array's element: only a whole array can be raw."""
        return self.checksum_parts(column, marks)

    def checksum_text(self, values: ArrowArray, _: Marks, /) -> ArrowArray:
        """Returns the texts of stored values that checksum_sql() selects; null for null."""
        return self.pg_text(values)

    def checksum_raw(self, raw: ArrowArray) -> ArrowArray:
        """Returns the texts of raw values that checksum_sql() selects."""
        return raw


def may_be_text(kind: pa.DataType) -> bool:
    """Returns True for Arrow types that may contain PostgreSQL's text."""
    return kind in (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())


def utf8(text: ArrowArray) -> ArrowArray:
    """Returns the same array after a check for UTF-8; raises DecodeError."""
    try:
        return text.view(pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        detail = "not UTF-8: the database's encoding must not be SQL_ASCII"
        raise DecodeError("row", "value", 0, detail) from None


def printed(column: sql.Composable) -> sql.Composable:
    """Returns SQL for what the type's output function prints, as pgoutput sends it.

    It isn't ``::text``, which strips the padding of char(n), adds a mask to inet, keeps the XML
    declaration, and returns true for t. ``is distinct from null`` is false for a composite whose
    fields are all null, where ``is null`` would be true.
    """
    return sql.SQL("case when {0} is distinct from null then pg_catalog.concat({0}) end").format(
        column
    )


def as_text(column: sql.Composable) -> sql.Composable:
    """Returns SQL for a value's text, for types whose cast to text equals the output function."""
    return sql.SQL("{}::pg_catalog.text").format(column)


def split_representable(text: ArrowArray, is_typed: Mask) -> tuple[ArrowArray, ArrowArray]:
    """Returns the texts to convert (null where not held), and the raw ones (null where held)."""
    text, keep, nothing = utf8(text), pa.array(is_typed), pa.scalar(None, pa.string())
    return pc.if_else(keep, text, nothing), pc.if_else(keep, nothing, text)


def cast_or_raw(text: ArrowArray, arrow: pa.DataType, unheld: str | None = None) -> Representable:
    """Cast text; values that can't be cast stay text.

    ``unheld`` matches those that PostgreSQL is known to send.
    """
    try:
        return text.cast(arrow), None
    except pa.ArrowInvalid:
        pass
    text = utf8(text)
    is_typed = np.ones(len(text), np.bool_)
    if unheld is not None:
        matched: ArrowArray = pc.match_substring_regex(text, unheld)
        is_typed = ~matched.fill_null(False).to_numpy(zero_copy_only=False)
    castable_text, _ = split_representable(text, is_typed)
    _drop_uncastable(castable_text, arrow, is_typed)
    castable_text, raw = split_representable(text, is_typed)
    return castable_text.cast(arrow), raw


def _drop_uncastable(text: ArrowArray, arrow: pa.DataType, is_typed: Mask) -> None:
    """Find the few other values, if any, by halving."""
    ranges = [(0, len(text))]
    while ranges:
        first, last = ranges.pop()
        try:
            text.slice(first, last - first).cast(arrow)
        except pa.ArrowInvalid:
            if last - first == 1:
                is_typed[first] = False
            else:
                middle = (first + last) // 2
                ranges += [(first, middle), (middle, last)]


def strings(
    data: NDArray[np.uint8],
    offsets: NDArray[np.integer[Any]],
    valid: Mask | None = None,
    kind: pa.DataType = _STRING,
) -> ArrowArray:
    """Build an array of strings, or of another kind with offsets, from bytes and the offsets of its
    values; ``valid`` None: none is null.
    """
    bitmap = None if valid is None else arrow_buffer(np.packbits(valid, bitorder="little"))
    width = np.int64 if kind == pa.large_binary() else np.int32
    buffers = [bitmap, arrow_buffer(offsets.astype(width)), arrow_buffer(data)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)

"""One-dimensional arrays and pgvector's vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from waldelta.arrow import storage
from waldelta.pgoutput.byte_readers import ArrowArray, Bytes, Mask, Positions
from waldelta.types.base import (
    Marks,
    Quotes,
    Representable,
    Selected,
    TargetType,
    find_quotes,
    joined,
    lists_as_bytes,
    numbers,
    packed,
    quoted,
    split_representable,
    take_bytes,
    utf8,
)

_NULL_WORD = b"NULL"


@dataclass(frozen=True)
class Array(TargetType):
    """A list of mapped scalars.

    Arrays with more dimensions, with other lower bounds, or with an element that its type can't
    hold are raw.
    """

    element: TargetType
    delimiter: str = ","
    brackets: str = "{}"

    @property
    def ledger_name(self) -> str:
        """The name with that of its element."""
        return f"array<{self.element.ledger_name}>"

    def read(self, text: ArrowArray) -> Representable:
        """Find the elements of all values at once, then let the element's type read them."""
        text = utf8(text)
        source, offsets = packed(text, self.brackets)
        is_typed = self._is_plain(source, offsets)
        if not is_typed.all():
            source, offsets = packed(split_representable(text, is_typed)[0], self.brackets)
        quotes = find_quotes(source, offsets)
        if quotes is not None and not quotes.balanced.all():
            is_typed &= quotes.balanced
            source, offsets = packed(split_representable(text, is_typed)[0], self.brackets)
            quotes = find_quotes(source, offsets)
        starts, ends, bounds = self._places(source, offsets, quotes)
        elements = self._elements(source, offsets, quotes, starts, ends)
        typed, unheld = self.element.from_text(elements)
        if unheld is not None:
            rows = np.repeat(np.arange(len(text)), np.diff(bounds))
            is_typed[rows[unheld.is_valid().to_numpy(zero_copy_only=False)]] = False
        valid = text.is_valid().to_numpy(zero_copy_only=False) & is_typed
        lists = pa.ListArray.from_arrays(
            numbers(bounds), typed, type=self.arrow, mask=pa.array(~valid)
        )
        return lists, None if is_typed.all() else split_representable(text, is_typed)[1]

    def checksum_parts(self, column: sql.Composable, marks: Marks, /) -> Selected:
        """Returns the elements' texts, joined."""
        if self.brackets != "{}":  # The column is a vector, which is always plain.
            column = sql.SQL("{}::pg_catalog.float4[]").format(column)
        value, unheld = self.element.element_parts(sql.SQL("({})[_wd_i]").format(column), marks)
        texts = sql.SQL(
            "(select coalesce(pg_catalog.string_agg(coalesce({value}, {null}) || {mark}, '' order"
            " by _wd_i), '') from pg_catalog.generate_subscripts({column}, 1) _wd_i)"
        ).format(
            value=value,
            null=sql.Literal(marks.null),
            mark=sql.Literal(marks.element),
            column=column,
        )
        whole = sql.SQL("case when {} is not null then '[' || {} || ']' end").format(column, texts)
        plain = sql.SQL(
            "(pg_catalog.array_ndims({c}) > 1 or pg_catalog.array_lower({c}, 1) <> 1)"
        ).format(c=column)
        if unheld is None:
            return whole, plain
        any_unheld = sql.SQL(
            "exists (select from pg_catalog.generate_subscripts({}, 1) _wd_i where {})"
        ).format(column, unheld)
        return whole, sql.SQL("({} or {})").format(plain, any_unheld)

    def checksum_text(self, values: ArrowArray, marks: Marks, /) -> ArrowArray:
        """Returns the elements' texts, joined."""
        elements = self.element.checksum_text(storage(values.flatten()), marks)
        elements = pc.fill_null(elements, marks.null) if elements.null_count else elements
        # The mark follows each element instead of separating them, so an empty element differs from
        # none.
        elements = pc.binary_join_element_wise(elements, marks.element, "")
        return pc.binary_join_element_wise("[", joined(values, elements, ""), "]", "")

    def pg_text(self, values: ArrowArray) -> ArrowArray:
        """Returns each array as a literal whose elements are all quoted."""
        elements = quoted(self.element.pg_text(storage(values.flatten())))
        return pc.binary_join_element_wise("{", joined(values, elements, ","), "}", "")

    def exact_sql(self, value: str) -> str:
        """Returns the array of its elements' exact forms."""
        return _transform_elements(value, self.element.exact_sql("x"))

    def equal_sql(self, value: str) -> str:
        """Returns the array of its elements' equal forms."""
        return _transform_elements(value, self.element.equal_sql("x"))

    def exact_values(self, values: ArrowArray) -> ArrowArray:
        """Returns the elements' exact forms, packed."""
        return lists_as_bytes(values, self.element.exact_values(storage(values.flatten())))

    def equal_values(self, values: ArrowArray) -> ArrowArray:
        """Returns the elements' equal forms, packed."""
        return lists_as_bytes(values, self.element.equal_values(storage(values.flatten())))

    def _is_plain(self, source: Bytes, offsets: Positions) -> Mask:
        """Returns which values have one dimension with lower bound 1.

        An array with other bounds begins with them, one of more dimensions with {{.
        """
        opening, closing = (ord(b) for b in self.brackets)
        plain = np.asarray(np.diff(offsets) >= 2)
        start, end = offsets[:-1][plain], offsets[1:][plain]
        plain[plain] = (
            (source[start] == opening)
            & (source[start + 1] != opening)
            & (source[end - 1] == closing)
        )
        return plain

    def _places(
        self, source: Bytes, offsets: Positions, quotes: Quotes | None
    ) -> tuple[Positions, Positions, Positions]:
        """Returns start and end of every element, and how many there are up to each value."""
        is_delimiter = source == ord(self.delimiter)
        if quotes is not None:
            is_delimiter &= ~quotes.inside
        delimiters = np.flatnonzero(is_delimiter)
        filled = np.diff(offsets) > 2
        # Each array consists of two sorted sequences, which a stable sort merges.
        starts = np.sort(np.concatenate([offsets[:-1][filled], delimiters]), kind="stable") + 1
        ends = np.sort(np.concatenate([delimiters, offsets[1:][filled] - 1]), kind="stable")
        counts = np.diff(np.searchsorted(delimiters, offsets)) + filled
        return starts, ends, np.concatenate([[0], np.cumsum(counts)])

    def _elements(
        self,
        source: Bytes,
        offsets: Positions,
        quotes: Quotes | None,
        starts: Positions,
        ends: Positions,
    ) -> ArrowArray:
        keep = np.ones(len(source), np.bool_)
        keep[offsets[:-1]] = keep[offsets[1:] - 1] = False
        keep[ends] = False
        if quotes is not None:
            keep &= ~(quotes.mark | quotes.escaping)
        # An element with the text NULL that isn't null is printed in quotes.
        is_null = ends - starts == len(_NULL_WORD)
        places = starts[is_null]
        is_null[is_null] = np.logical_and.reduce(
            [source[places + k] == byte for k, byte in enumerate(_NULL_WORD)]
        )
        for k in range(len(_NULL_WORD)):
            keep[np.minimum(starts[is_null] + k, ends[is_null] - 1)] = False
        return take_bytes(source, keep, starts, ends, ~is_null)


def _transform_elements(value: str, element: str) -> str:
    return value if element == "x" else f"transform({value}, x -> {element})"

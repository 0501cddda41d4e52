"""Decodes Insert, Update and Delete messages of one relation version into Arrow, column by column.

There is no loop over rows: the positions in all messages advance together, one column at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow.compute as pc

from waldelta.errors import DecodeError
from waldelta.pgoutput.byte_readers import (
    ArrowArray,
    Bytes,
    Mask,
    MessageReader,
    Messages,
    Positions,
    copy_out,
    u1,
    u2,
    u4,
)
from waldelta.quantities import counted

_I, _U, _D, _K, _O, _N = (ord(letter) for letter in "IUDKON")
_NULL, _UNCHANGED, _TEXT, _BINARY = (ord(letter) for letter in "nutb")
# The number of rows that are processed together: their arrays fit into the processor's cache.
_BLOCK_ROWS = 32_768


# Turns a column's bytes in binary format, by the column's number, into PostgreSQL's text.
ToText = Callable[[int, ArrowArray], ArrowArray]


class Columns:
    """The old or the new tuples of messages: item *k* is column *k* as PostgreSQL's text, in bytes.

    It is null where the value is NULL, unchanged, or the message has no such tuple;
    ``unchanged(k)`` and ``has_tuple`` distinguish these. An item is copied at first use.
    ``to_text`` turns a column in binary format into text, from its number and bytes; without it,
    such a column is refused. ``values(k)`` returns the bytes. With ``mixed_formats``, a column may
    have text values in some messages and binary ones in others.
    """

    def __init__(
        self,
        messages: Messages,
        column_count: int,
        to_text: ToText | None = None,
        *,
        mixed_formats: bool = False,
    ) -> None:
        self._messages, self._to_text, self._mixed_formats = messages, to_text, mixed_formats
        self._texts: dict[int, ArrowArray] = {}
        self.has_tuple = np.zeros(len(messages), np.bool_)
        # Without any tuple: of rows without one, the range at the message's start is empty.
        shape = (column_count, len(messages))
        self._kinds: Bytes = np.broadcast_to(np.uint8(0), shape)
        self._starts: Positions = np.broadcast_to(messages.start, shape)
        self._ends: Positions = self._starts
        self._is_allocated = False

    def note(
        self, k: int, into: slice | Positions, kind: Bytes, start: Positions, end: Positions
    ) -> None:
        """Note of column ``k`` in the rows ``into`` the kind byte of each value, and where its
        bytes start and end (exclusive) in the message.
        """
        self._kinds[k, into], self._starts[k, into], self._ends[k, into] = kind, start, end

    def allocate(self, *, complete: bool) -> None:
        """Allocate the arrays, once some message has such a tuple."""
        if not self._is_allocated:
            copied = np.empty_like if complete else np.array
            self._kinds, self._starts = copied(self._kinds), copied(self._starts)
            self._ends, self._is_allocated = copied(self._starts), True

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, k: int) -> ArrowArray:
        if k not in self._texts:
            self._texts[k] = self._text(k)
        return self._texts[k]

    def _text(self, k: int) -> ArrowArray:
        kinds = self._kinds[k]
        if (
            self._mixed_formats
            and self._to_text is not None
            and (kinds == _BINARY).any()
            and (kinds == _TEXT).any()
        ):
            texts = self._copied(k, kinds == _TEXT)
            return pc.coalesce(
                self._to_text(k, self._copied(k, kinds == _BINARY)).cast(texts.type), texts
            )
        if self.format(k) != "b":
            return self.values(k)
        if self._to_text is not None:
            return self._to_text(k, self.values(k))
        raise DecodeError(
            "row",
            f"column {k}",
            0,
            "sent in binary format, text wanted: set options.binary to false",
        )

    def format(self, k: int) -> str | None:
        """Returns ``t`` or ``b``, the format of a column's values; None without any value.

        Mixed formats raise DecodeError.
        """
        binary, text = (self._kinds[k] == _BINARY).any(), (self._kinds[k] == _TEXT).any()
        if binary and text:
            raise DecodeError(
                "row", f"column {k}", 0, "text and binary values in one relation version"
            )
        return "b" if binary else "t" if text else None

    def unchanged(self, k: int) -> Mask:
        """Returns where the value is TOASTed and unchanged, and therefore was not sent."""
        return np.asarray(self._kinds[k] == _UNCHANGED)

    def values(self, k: int) -> ArrowArray:
        """Returns a column's bytes, whatever their format."""
        kind = self._kinds[k]
        return self._copied(k, (kind == _TEXT) | (kind == _BINARY))

    def _copied(self, k: int, valid: Mask) -> ArrowArray:
        return copy_out(self._messages, self._starts[k], self._ends[k], valid)


@dataclass(frozen=True)
class Rows:
    """Decoded messages.

    ``op`` is I, U or D; ``old_kind`` is K, O or 0 (no old tuple), both as ASCII codes. A K tuple
    has only the replica identity's columns: null in another column says nothing.
    """

    op: Bytes
    old_kind: Bytes
    new: Columns
    old: Columns

    def __len__(self) -> int:
        return len(self.op)

    @cached_property
    def unchanged(self) -> list[Mask]:
        """For each column, where the new tuple has an unchanged TOASTed value."""
        return [self.new.unchanged(k) for k in range(len(self.new))]


def decode_rows(
    data: ArrowArray,
    column_count: int,
    *,
    streamed: bool = False,
    to_text: ToText | None = None,
    mixed_formats: bool = False,
) -> Rows:
    """Decode the Insert, Update and Delete messages of one relation version, in one pass.

    ``column_count`` is the Relation's. ``streamed``: the messages are between Stream Start and
    Stop, where an xid follows the first byte. ``to_text`` reads values in binary format.
    ``mixed_formats``: the messages are of several calls, each with its own format. Raises
    DecodeError for the first malformed message.
    """
    messages = Messages(data)
    new, old = (
        Columns(messages, column_count, to_text, mixed_formats=mixed_formats) for _ in range(2)
    )
    walk = _Walk(messages, column_count, streamed, new, old)
    for first in range(0, len(messages), _BLOCK_ROWS):
        walk.block(slice(first, min(first + _BLOCK_ROWS, len(messages))))
    return Rows(walk.op, walk.old_kind, new, old)


class _Walk:
    """Moves over blocks of messages and notes the position of every value.

    Lengths are read unsigned, so positions only grow, and reads are clamped to the buffer. So one
    comparison at the end finds every row whose tuples don't end exactly at the message's end,
    whatever went wrong before.
    """

    def __init__(
        self, messages: Messages, column_count: int, streamed: bool, new: Columns, old: Columns
    ) -> None:
        self.messages, self.column_count, self.streamed = messages, column_count, streamed
        self.new, self.old = new, old
        self.op: Bytes = u1(messages.bytes, messages.start)
        self.old_kind: Bytes = np.zeros(len(messages), np.uint8)
        self.marker_offset = 9 if streamed else 5

    def block(self, rows: slice) -> None:
        source, start = self.messages.bytes, self.messages.start[rows]
        at = start + self.marker_offset
        op, marker = self.op[rows], u1(source, at)
        has_old = (marker == _K) | (marker == _O)
        is_delete = op == _D
        bad = (
            ~((op == _I) | (op == _U) | is_delete)
            | (is_delete != (has_old & is_delete))
            | (has_old & (op == _I))
        )
        self.old_kind[rows] = np.where(has_old, marker, 0)
        if has_old.any():
            which = np.flatnonzero(has_old)
            at[which], wrong = self._tuple(self.old, rows, which, at[which])
            bad[which] |= wrong
        has_new = ~is_delete
        if has_new.all():
            bad |= u1(source, at) != _N
            at, wrong = self._tuple(self.new, rows, None, at)
            bad |= wrong
        elif has_new.any():
            which = np.flatnonzero(has_new)
            bad[which] |= u1(source, at[which]) != _N
            at[which], wrong = self._tuple(self.new, rows, which, at[which])
            bad[which] |= wrong
        bad |= at != self.messages.end[rows]
        if bad.any():
            raise _explain(
                self.messages, rows.start + int(np.argmax(bad)), self.column_count, self.streamed
            )

    def _tuple(
        self, columns: Columns, rows: slice, which: Positions | None, at: Positions
    ) -> tuple[Positions, Mask]:
        """Walk the tuples whose marker is at ``at``; returns the end positions and which rows are
        malformed.
        """
        source = self.messages.bytes
        columns.allocate(complete=which is None and rows == slice(0, len(self.messages)))
        into: slice | Positions = rows if which is None else which + rows.start
        columns.has_tuple[into] = True
        bad = u2(source, at + 1) != self.column_count
        at = at + 3
        for k in range(self.column_count):
            kind = u1(source, at)
            length = u4(source, at + 1)
            if (kind == _TEXT).all():
                start = at + 5
            else:
                sized = (kind == _TEXT) | (kind == _BINARY)
                bad |= ~(sized | (kind == _NULL) | (kind == _UNCHANGED))
                length *= sized
                start = at + 1 + (sized * 4)
            at = start + length
            columns.note(k, into, kind, start, at)
        return at, bad


def _explain(messages: Messages, row: int, column_count: int, streamed: bool) -> DecodeError:
    """Read one malformed message slowly, to name the wrong field."""
    data = messages.at(row)
    name = {_I: "Insert", _U: "Update", _D: "Delete"}.get(data[0] if data else 0)
    if name is None:
        return messages.error(
            row, "kind", int(messages.start[row]), "neither Insert, Update nor Delete"
        )
    reader = MessageReader(data, name, chr(data[0]))
    try:
        for _ in range(2 if streamed else 1):
            reader.integer(4, "relation_id")
        allowed = {"Insert": "N", "Update": "KON", "Delete": "KO"}[name]
        marker = chr(reader.integer(1, "tuple"))
        if marker not in allowed:
            raise reader.error("tuple", reader.position - 1, f"expected one of {allowed}")
        _read_tuple(reader, "new" if marker == "N" else "old", column_count)
        if name == "Update" and marker != "N":
            if chr(reader.integer(1, "new tuple")) != "N":
                raise reader.error("new tuple", reader.position - 1, "expected N")
            _read_tuple(reader, "new", column_count)
        reader.finish()
    except DecodeError as err:
        return DecodeError(err.message, err.field, err.offset, f"{err.detail}, row {row}", row)
    return messages.error(row, "row", int(messages.start[row]), "malformed")


def _read_tuple(reader: MessageReader, which: str, column_count: int) -> None:
    count = reader.integer(2, f"{which}.column_count")
    if count != column_count:
        detail = f"{counted(count, 'column')}, but its Relation message has {column_count}"
        raise reader.error(f"{which}.column_count", reader.position - 2, detail)
    for k in range(column_count):
        kind = reader.integer(1, f"{which}[{k}].kind")
        if kind in (_TEXT, _BINARY):
            reader.content(f"{which}[{k}]")
        elif kind not in (_NULL, _UNCHANGED):
            raise reader.error(f"{which}[{k}].kind", reader.position - 1, "unknown kind of a value")

"""Everything that stays text, as PostgreSQL prints it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from psycopg import sql

from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.types.base import (
    Comparison,
    Marks,
    Representable,
    Selected,
    TargetType,
    as_text,
    utf8,
)


@dataclass(frozen=True)
class Text(TargetType):
    """Unchanged text.

    ``is_plain``: the type is text itself and needs no output function. ``type_oid``: the oid
    of a type whose equal values print alike; None for others.
    """

    may_be_raw: ClassVar[bool] = False
    is_text: ClassVar[bool] = True

    spark: str = "string"
    arrow: Any = field(default_factory=pa.string)
    is_plain: bool = False
    type_oid: int | None = None

    def read(self, text: ArrowArray) -> Representable:
        """Read any UTF-8."""
        return utf8(text), None

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Returns the output function's text."""
        return (as_text(column), None) if self.is_plain else super().copy_expressions(column)

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Returns the text that copies select."""
        return self.copy_expressions(column)

    def compared_with(self, referenced: TargetType) -> Comparison | None:
        """Compare the texts of one type whose equal values print alike."""
        is_one = isinstance(referenced, Text) and self.type_oid == referenced.type_oid
        return "same" if is_one and self.type_oid is not None else None


@dataclass(frozen=True)
class Characters(Text):
    """text, varchar, name and "char"; of char(n), which ``is_padded``, blanks at the end don't
    count.
    """

    is_padded: bool = False

    def compared_with(self, referenced: TargetType) -> Comparison | None:
        """Compare as the operator of the referenced column does.

        It casts a text to char(n), whose trailing blanks never count. It casts char(n) to text
        without its trailing blanks, but those of the other side count.
        """
        if not isinstance(referenced, Characters):
            return None
        return "padded" if referenced.is_padded else "own padded" if self.is_padded else "same"

"""Everything that stays text, as PostgreSQL prints it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa
from psycopg import sql

from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.types.base import Representable, Selected, TargetType, as_text, utf8
from waldelta.types.checksum import Marks


@dataclass(frozen=True)
class Text(TargetType):
    """Unchanged text; ``is_plain`` when the type is text itself and needs no output function."""

    may_be_raw: ClassVar[bool] = False
    is_text: ClassVar[bool] = True

    spark: str = "string"
    arrow: Any = field(default_factory=pa.string)
    is_plain: bool = False

    def read(self, text: ArrowArray) -> Representable:
        """Read any UTF-8."""
        return utf8(text), None

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Return the output function's text."""
        if self.is_plain:
            return as_text(column), None
        return super().copy_expressions(column)

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Return the same text."""
        return self.copy_expressions(column)

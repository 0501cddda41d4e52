"""A column whose type changed on the source, as errors and decisions name it and pages find it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# A type's name has commas in parentheses, and any character in quotes.
_TYPE = r'((?:"[^"]*"|\([^)]*\)|[^",;:(\n])+?)'
_TEXT = re.compile(rf"column '(.+?)' changed its type from {_TYPE} to {_TYPE}(?=[,;:\n]|$)")
_UNNAMED = "another type"


@dataclass(frozen=True, slots=True)
class TypeChange:
    """A target's column, its type when it was copied, and its type on the source now."""

    column: str
    old: str
    new: str = ""

    def __str__(self) -> str:
        """Returns the change in words.

        >>> str(TypeChange("a", "numeric(12,2)", "text"))
        "column 'a' changed its type from numeric(12,2) to text"
        >>> str(TypeChange("a", "text", "text"))
        "column 'a' changed its type from text to another type, and back"
        """
        back = f"{_UNNAMED}, and back" if self.new == self.old else self.new or _UNNAMED
        return f"column '{self.column}' changed its type from {self.old} to {back}"

    @classmethod
    def find(cls, text: str) -> Iterator[TypeChange]:
        """Yields the changes that a text names.

        >>> [*TypeChange.find(f"t: {TypeChange('a', 'numeric(12,2)', 'text')}; its changes wait")]
        [TypeChange(column='a', old='numeric(12,2)', new='text')]
        """
        yield from (cls(*match.groups()) for match in _TEXT.finditer(text))

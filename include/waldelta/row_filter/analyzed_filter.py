"""A filter as PostgreSQL analysed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Collation(Enum):
    """What is certain about how texts of a collation compare and change case."""

    # Ordered by code points, case of ASCII letters only: C and POSIX in a UTF-8 database.
    CODE_POINT = "code point"
    # Ordered by code points, but case follows Unicode: C.UTF-8, ucs_basic.
    BINARY_ORDER = "binary order"
    DETERMINISTIC = "deterministic"  # Equal means the same bytes; the order is that of a language.
    NONDETERMINISTIC = "nondeterministic"


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter, analysed by the server.

    ``analysed`` is pg_get_expr's text: every cast is explicit, and names outside pg_catalog are
    qualified. It is stored and translated; ``text`` is what was written. ``columns`` are those
    used, in order of appearance. ``collations`` has what is certain about each text column,
    ``default_collation`` about texts without a column. A column that isn't listed counts as
    DETERMINISTIC, the least certain kind that PostgreSQL's own row filters allow.
    """

    text: str
    analysed: str
    columns: tuple[str, ...]
    collations: Mapping[str, Collation] = field(default_factory=dict)
    default_collation: Collation = Collation.DETERMINISTIC
    # Lengths in bytes and checksums depend on the server's encoding.
    is_utf8: bool = False


def published_filter(analysed: str) -> RowFilter:
    """Return the filter of a publication, from the text that the catalogs print.

    Its columns' collations aren't known, but PostgreSQL allows no user-defined ones in a
    publication, and its own are all deterministic. Raises FilterNotTranslatable for a text that
    can't be read.

    >>> published_filter("((a > 1) AND (b = 'x'::text))").columns
    ('a', 'b')
    """
    from waldelta.row_filter.parse import parse_analysed
    from waldelta.row_filter.parse.parse import column_names

    return RowFilter(analysed, analysed, column_names(parse_analysed(analysed)))

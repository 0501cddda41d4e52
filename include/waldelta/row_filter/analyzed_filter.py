"""A filter as PostgreSQL understood it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Collation(Enum):
    """What is certain about how texts of a collation compare and change case."""

    # ordered by code points, case of ASCII letters only: C and POSIX in a UTF-8 database
    CODE_POINT = "code point"
    # ordered by code points, but case follows Unicode: C.UTF-8, ucs_basic
    BINARY_ORDER = "binary order"
    DETERMINISTIC = "deterministic"  # equal means the same bytes; the order is a language's
    NONDETERMINISTIC = "nondeterministic"


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter, analysed by the server.

    ``analysed`` is pg_get_expr's text: every cast explicit, names outside pg_catalog qualified. It
    is what to store and to translate; ``text`` is what was written. ``columns`` are those used, in
    order of appearance. ``collations`` says what is certain about each text column;
    ``default_collation`` about texts without a column. A column that isn't listed counts as
    DETERMINISTIC: what PostgreSQL's own row filters allow at most.
    """

    text: str
    analysed: str
    columns: tuple[str, ...]
    collations: Mapping[str, Collation] = field(default_factory=dict)
    default_collation: Collation = Collation.DETERMINISTIC
    # Lengths in bytes and checksums follow the server's encoding.
    is_utf8: bool = False


def published_filter(analysed: str) -> RowFilter:
    """The filter of a publication, from the text that the catalogs print.

    Its columns' collations aren't known; PostgreSQL lets no user-defined ones into a publication,
    and its own are all deterministic. Raises FilterNotTranslatable for a text that can't be read.

    >>> published_filter("((a > 1) AND (b = 'x'::text))").columns
    ('a', 'b')
    """
    from waldelta.row_filter.parse import parse_analysed
    from waldelta.row_filter.parse.parse import column_names

    return RowFilter(analysed, analysed, column_names(parse_analysed(analysed)))

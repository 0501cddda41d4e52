"""What needs attention: in words, with a severity and the page that shows more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from waldelta.quantities import first_of

AttentionLevel = Literal["failed", "warning"]

# PostgreSQL's ``wal_status`` in words; other states are shown as they are.
SLOT_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {"reserved": "healthy", "extended": "healthy", "unreserved": "about to be lost"}
)
_MOST_NAMED = 3
_MOST_SHOWN = 600


@dataclass(frozen=True, slots=True)
class Attention:
    """One thing that needs attention, and where to see it.

    ``page`` has the parts of a page's address below the pipeline's own page, and is empty for that
    page. ``anchor`` names a part of the page. Without either there is nothing more to see.
    """

    severity: AttentionLevel
    text: str
    page: tuple[str, ...] = ()
    anchor: str = ""


def names(found: Sequence[str]) -> str:
    """Returns the first names, and how many more there are.

    >>> names(["a", "b"]), names(list("abcde"))
    ('a, b', 'a, b, c and 2 more')
    """
    return first_of(found, _MOST_NAMED)


def on_names(
    severity: AttentionLevel, found: Sequence[str], text: str, *page: str, anchor: str = ""
) -> Iterator[Attention]:
    """Yields attention for a list, unless it is empty: its names replace ``{}`` in ``text``.

    >>> [item.text for item in on_names("failed", ["a", "b"], "{}: the copy failed")]
    ['a, b: the copy failed']
    """
    if found:
        yield Attention(severity, text.format(names(found)), page, anchor)


def shortened(message: str, most: int = _MOST_SHOWN) -> str:
    """Returns a message in one line, without its middle if it is long: the remedy is at its end.

    >>> shortened("2 tables not synced:\\n  - a: run setup")
    '2 tables not synced: - a: run setup'
    >>> shortened("the slot is lost: run resync", 20)
    'the slot … un resync'
    """
    line = " ".join(message.split())
    if len(line) <= most:
        return line
    kept = (most - 2) // 2
    return f"{line[:kept].rstrip()} … {line[-kept:].lstrip()}"


def worst_first(found: Iterable[Attention]) -> tuple[Attention, ...]:
    """Returns problems before warnings, each in their order."""
    return tuple(sorted(found, key=lambda item: item.severity != "failed"))

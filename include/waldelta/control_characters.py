"""Shows control characters of names as escapes, wherever texts are for people.

A table's owner chooses its name, and could otherwise move a terminal's cursor, set the clipboard,
hide a part of a line, or reverse it on a page or in an alert.
"""

from __future__ import annotations

import re

# C0 and C1 without line breaks and tabs, and characters that change the direction of text.
_CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]"
)


def visible(text: str) -> str:
    """Returns a text with its control characters as escapes; line breaks and tabs stay.

    >>> print(visible("a\\x1b[2Jb\\u202ec"))
    a\\x1b[2Jb\\u202ec
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def visible_json(document: str) -> str:
    """Returns a JSON document in which they are JSON's own escapes, so that it stays the same.

    >>> print(visible_json('["\\x9b2J"]'))
    ["\\u009b2J"]
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def as_one_entry(text: str) -> str:
    """Returns an entry of a log in which only the first line may look like the start of one.

    >>> print(as_one_entry("table=a\\n12:00 ERROR b"))
    table=a
      12:00 ERROR b
    """
    return visible(text).replace("\n", "\n  ")

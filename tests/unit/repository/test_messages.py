"""Messages that the code raises, logs or shows are in the words of CONTRIBUTING.md's "Writing"."""

from __future__ import annotations

import re

from tools import messages as catalog
from tools import prose

MESSAGES = catalog.messages()
# Names of columns, options and files among the words.
NAMES = re.compile(r"<[^>]*>|`[^`]*`|\b\w+_\w+\b|--[\w-]+|\b[\w.]+=\S*|change data feed")


def test_the_catalog_has_the_messages():
    """Each with its arguments by name; python tools/messages.py prints them all."""
    texts = [" ".join(message.text.split()) for message in MESSAGES]
    assert len(texts) > 1_000
    assert "sync the table again" in " ".join(texts)
    assert any("<" in text for text in texts)


def test_no_message_has_a_replaced_word():
    """The words that the glossary replaced, as tools/prose.py has them for the pages."""
    found = {
        f"{message.path}:{message.line}: {word[0]!r}: use {better}"
        for message in MESSAGES
        for pattern, better in prose.PATTERNS.items()
        for word in pattern.finditer(NAMES.sub(" ", message.text))
    }
    assert sorted(found) == []

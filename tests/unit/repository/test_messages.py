"""Messages that the code raises, logs or shows are in the words of CONTRIBUTING.md's "Writing"."""

from __future__ import annotations

import re

import pytest

from tools import messages as catalog
from tools import prose

# Names of columns, options and files among the words.
NAMES = re.compile(r"<[^>]*>|`[^`]*`|\b\w+_\w+\b|--[\w-]+|\b[\w.]+=\S*|change data feed")


@pytest.fixture(scope="module")
def messages():
    return catalog.messages()


def test_the_catalog_has_the_messages(messages):
    """Each with its arguments by name; python tools/messages.py prints them all."""
    texts = [" ".join(message.text.split()) for message in messages]
    assert len(texts) > 1_000
    assert "sync the table again" in " ".join(texts)
    assert any("<" in text for text in texts)


def test_no_message_has_a_replaced_word(messages):
    """The words that the glossary replaced, as tools/prose.py has them for the pages."""
    found = {
        f"{message.path}:{message.line}: {word[0]!r}: use {better}"
        for message in messages
        for pattern, better in prose.PATTERNS.items()
        for word in pattern.finditer(NAMES.sub(" ", message.text))
    }
    assert sorted(found) == []


def test_no_message_needs_a_checkout():
    """An installed wheel has none of these: its users have the command `waldelta`."""
    of_wheel = catalog.messages(("include/waldelta", "include/waldelta_airflow"))
    found = [
        f"{message.path}:{message.line}: {message.text}"
        for message in of_wheel
        if re.search(r"make setup|spark_jobs|\.venv", message.text)
    ]
    assert found == []

"""Messages that the code raises, logs or shows are in the words of CONTRIBUTING.md's "Writing"."""

import ast
import re

import pytest

from tests.support import source_code
from tools import messages as catalog
from tools import prose

# Names of columns, options and files among the words.
NAMES = re.compile(r"<[^>]*>|`[^`]*`|\b\w+_\w+\b|--[\w-]+|\b[\w.]+=\S*|change data feed")


@pytest.fixture(scope="module")
def messages():
    return catalog.messages()


def test_the_catalog_has_the_messages(messages):
    """Each once by the names of its arguments, once with them filled in."""
    texts = [" ".join(message.text.split()) for message in messages]
    assert len(texts) > 1_000
    assert "sync the table again" in " ".join(texts)
    assert any("<" in text for text in texts)


def test_arguments_are_filled_in(tmp_path, monkeypatch):
    """As a reader of the printed catalog sees them."""
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    (tmp_path / "code.py").write_text(
        "raise ConfigError(f\"{table}: column {column!r} has {counted(n, 'value')} without\"\n"
        "    f' {x or y} in {size(held)}: drop {\", \".join(names)}')\n"
        "log.warning('%s: the version %d is gone', state.table_name, target.version)\n"
    )
    assert [message.example for message in catalog.messages((".",))] == [
        "public.orders: column 'amount' has 3 values without x in 30 MB: drop first, second",
        "public.orders: the version 12 is gone",
    ]


def test_no_message_has_a_replaced_word(messages):
    """The words that the glossary replaced, as tools/prose.py has them for the pages."""
    found = {
        f"{message.path}:{message.line}: {word[0]!r}: use {better}"
        for message in messages
        for pattern, better in prose.PATTERNS.items()
        for word in pattern.finditer(NAMES.sub(" ", message.text))
    }
    assert sorted(found) == []


def test_no_message_needs_a_checkout(messages):
    """An installed wheel has none of these: its users have the command `waldelta`."""
    found = [
        f"{message.path}:{message.line}: {message.text}"
        for message in messages
        if message.path.parts[1] in ("waldelta", "waldelta_airflow")
        and re.search(r"make setup|spark_jobs|\.venv", message.text)
    ]
    assert found == []


def test_no_line_of_the_log_has_a_class_in_place_of_a_reason():
    """`class_and_text` has both, without values of rows."""
    found = [
        f"{path}:{call.lineno}"
        for path in source_code.modules("include")
        for call in source_code.nodes_of(path)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("log.")
        if any(ast.unparse(value) == "type(err).__name__" for value in call.args)
    ]
    assert found == []

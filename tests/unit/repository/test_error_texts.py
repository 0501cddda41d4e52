"""Errors are recognised by codes; texts are in one file, with their version."""

import ast
import re
from collections.abc import Iterable

import pytest

from tests.support import source_code

ROOT = source_code.ROOT / "include"
TEXTS = ROOT / "waldelta/server_errors/texts.py"
# These name errors that arrive as text, from texts.py alone.
NAMING = {
    "waldelta/lake/write_errors.py",
    "waldelta/pipeline/task_errors.py",
    "waldelta/slot/read/peek.py",
    "waldelta/slot/read/decode_failure.py",
}
_MATCHES = {"search", "match", "fullmatch", "findall", "finditer", "startswith", "endswith"}
_ERRORS = {"err", "error", "exc", "cause", "exception"}


def _is_message(node: ast.AST) -> bool:
    """Whether an expression contains an error's text."""
    return any(
        (isinstance(part, ast.Attribute) and part.attr in ("message_primary", "message_detail"))
        or (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Name)
            and part.func.id in ("str", "repr")
            and any(isinstance(arg, ast.Name) and arg.id in _ERRORS for arg in part.args)
        )
        for part in ast.walk(node)
    )


def _is_from_texts(function: ast.expr) -> bool:
    """Whether a method is that of a pattern from texts.py."""
    pattern = function.value if isinstance(function, ast.Attribute) else function
    if isinstance(pattern, ast.Attribute):
        return isinstance(pattern.value, ast.Name) and pattern.value.id == "texts"
    return isinstance(pattern, ast.Name) and pattern.id.isupper() and pattern.id[0] != "_"


def matched_texts(nodes: Iterable[ast.AST]) -> list[int]:
    """The lines that compare an error's text with words of their own."""
    lines = []
    for node in nodes:
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            if isinstance(node.left, ast.Constant) and _is_message(node.comparators[0]):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            texts = [*node.args, node.func.value]
            is_match = node.func.attr in _MATCHES and any(map(_is_message, texts))
            if is_match and not _is_from_texts(node.func):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "line, is_refused",
    [
        ('"permission denied" in str(err)', True),
        ('"SESSION_CLOSED" not in str(error)', True),
        ('re.search(r"deadlock", str(err))', True),
        ("_GONE.search(str(err))", True),
        ('str(err).startswith("FATAL")', True),
        ('"gone" in err.diag.message_primary', True),
        ("texts.CONFLICT.search(str(err))", False),
        ("DECODED_POSITION.search(str(err))", False),
        ("table in str(err)", False),
        ("str(err).splitlines()[0]", False),
        ("err.sqlstate in GONE", False),
    ],
)
def test_the_rule(line, is_refused):
    assert bool(matched_texts(ast.walk(ast.parse(line)))) is is_refused


def test_no_error_is_recognised_by_words_elsewhere():
    files = [path for path in source_code.modules("include") if path != TEXTS]
    assert len(files) > 300
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in matched_texts(source_code.nodes_of(path))
    ]
    assert not found, "decide by SQLSTATE, condition or number; a text goes to texts.py"


@pytest.mark.parametrize("name", sorted(NAMING))
def test_those_that_name_errors_compile_no_pattern(name):
    assert "re.compile" not in (ROOT / name).read_text()


def test_each_text_says_which_version_printed_it():
    """A comment with a version stands above, in the same part of the file."""
    version = re.compile(r"^#.*\b[a-zA-Z][\w-]+ \d+", re.MULTILINE)
    parts = re.split(r"^(?=# ---)", TEXTS.read_text(), flags=re.MULTILINE)[1:]
    assert len(parts) >= 5
    assert not [part.splitlines()[0] for part in parts if not version.search(part)]
    assert len(re.findall(r"re\.compile", TEXTS.read_text())) > 20

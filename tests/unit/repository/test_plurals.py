"""A number and what it counts agree: "1 row", "2 rows"."""

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.support import source_code
from waldelta.quantities import counted

REPOSITORY = source_code.ROOT
# What messages count; a number in front of one of these in the plural goes through counted().
NOUNS = (
    "attempts|batches|calls|changes|columns|commits|conditions|copies|deletes|differences|errors|"
    "events|expectations|files|"
    "findings|folders|inserts|keys|levels|messages|minutes|"
    "names|numbers|partitions|pipelines|places|positions|problems|"
    "publications|records|relations|reports|rows|runs|sessions|slots|snapshots|statements|"
    "steps|tables|targets|tasks|times|"
    "transactions|truncates|updates|values|versions"
)
_PLURAL = re.compile(
    rf"^ (?:[a-z]+(?:ed|er) |new |more |critical |replication )?(?:{NOUNS})\b(?!/)"
)
_IN_TEMPLATE = re.compile(rf"\}}\}}(?:</?\w+>)? (?:{NOUNS})\b")
# A log line's number is one argument of several: there, too, counted() gives it its noun.
_IN_LOG = re.compile(rf"(?<!=)%d (?:{NOUNS})\b")
_BRACKETS = re.compile(r"[a-z]\(e?s\)")
# In front of these words stands a name, not a number, or what follows is a verb.
_NO_NUMBER = re.compile(
    r"^counted\(|^table$|name|_id\b|\.id\b|uri|gate|leaf|file|path|size\b|code|kind|!r"
)


@pytest.mark.parametrize(
    "given, text",
    {
        (0, "row"): "0 rows", (1, "row"): "1 row", (2, "row"): "2 rows",
        (12_345, "row"): "12,345 rows", (1, "batch", "batches"): "1 batch",
        (3, "batch", "batches"): "3 batches",
    }.items(),
)  # fmt: skip
def test_counted(given, text):
    assert counted(*given) == text


def plural_after_number(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """The places where a number is followed by a noun in the plural, or "(s)" ends one."""
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                words = text.value if isinstance(text, ast.Constant) else ""
                if (
                    isinstance(value, ast.FormattedValue)
                    and _PLURAL.match(words)
                    and is_number(value)
                ):
                    yield node.lineno, f"{{{ast.unparse(value.value)}}}{words[:40]}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = _IN_LOG.search(node.value) or (
                "to_jsonb(s)" not in node.value and _BRACKETS.search(node.value)
            )
            if found:
                yield node.lineno, node.value[:80]


def is_number(value: ast.FormattedValue) -> bool:
    """Whether it may be one: what is named in capitals is a constant above it."""
    text = ast.unparse(value.value)
    return re.fullmatch(r"[A-Z0-9_]+", text) is None and (
        text.startswith("len(") or not _NO_NUMBER.search(text)
    )


def test_what_is_found():
    source = (
        'f"{n} rows, {n:,} new keys, {_MOST} rows, {n} kB, {t.name} keeps"; f"{n} row(s)";'
        ' log.info("%d tables", n)'
    )
    found = [text for _, text in plural_after_number(ast.walk(ast.parse(source)))]
    assert found == ["{n} rows, ", "{n} new keys, ", " row(s)", "%d tables"]


def test_no_plural_after_a_number():
    """Of every message and page."""
    wrong = []
    for folder in (
        "include/waldelta",
        "include/waldelta_airflow",
        "include/demo",
        "spark_jobs",
        "plugins",
        "dags",
    ):
        for path in source_code.modules(folder):
            places = plural_after_number(source_code.nodes_of(path))
            wrong += [f"{path.relative_to(REPOSITORY)}:{line}: {text}" for line, text in places]
        for path in sorted((REPOSITORY / folder).rglob("*.html")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                wrong += [
                    f"{path.relative_to(REPOSITORY)}:{number}: {m[0]}"
                    for m in _IN_TEMPLATE.finditer(line)
                ]
    assert wrong == [], "\n".join(wrong)

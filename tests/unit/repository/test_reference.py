"""The reference pages follow the code, and examples of errors are its messages."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.source_code import ROOT, modules, nodes_of
from tools import alerts, reference
from waldelta.config.pipeline_file import json_schema
from waldelta.error_catalog import ERROR_CATALOG, ERRORS

CODE = modules("include")
# Their messages come from a module that names the class nowhere else.
ELSEWHERE = {
    "ApplyError": "waldelta/types/type_map.py",
    "SlotCritical": "waldelta/slot/health.py",
    "TargetDiffers": "waldelta/jobs/reconcile.py",
}
BASES = {"WaldeltaError", "SourceError", "SlotError", "LakeError", "CatalogError"}


def test_the_reference_pages_are_as_the_code_has_them():
    stale = [page.name for page, text in reference.pages().items() if page.read_text() != text]
    assert stale == [], "run make reference"


def test_every_block_of_the_reference_is_on_one_page():
    """So every key, every verb and every metric is."""
    assert sorted(reference.blocks_on_pages()) == sorted(reference.BLOCKS)


def test_the_code_has_texts_of_every_kind_of_attention():
    """So whatever a page or an alert says stands on the page of alerts, with what to do."""
    texts = alerts.texts()
    assert [kind for kind, of_kind in texts.items() if not of_kind] == []
    assert "…: the copy failed" in texts["failed_copy"]
    assert "slot … lost required WAL" in texts["slot"]


def test_the_schema_for_editors_is_as_the_code_has_it():
    """The file isn't part of a clone: it is compared where `make schema` has written it."""
    written = ROOT / "include/pipelines/pipeline.schema.json"
    if not written.exists():
        pytest.skip("make schema hasn't written it")
    assert json.loads(written.read_text()) == json.loads(json.dumps(json_schema())), (
        "run make schema"
    )


def described(schema: object) -> Iterator[tuple[str, bool]]:
    """Each key of a schema, and whether it has a description."""
    if isinstance(schema, dict):
        # A key may be called "properties", too.
        keys = schema.get("properties", {}) if schema.get("type") == "object" else {}
        for name, key in keys.items():
            yield name, "description" in key
        for part in schema.values():
            yield from described(part)


def test_editors_explain_every_key():
    assert [name for name, is_described in described(json_schema()) if not is_described] == []


def test_the_catalog_has_every_error_that_is_raised():
    """Only the bases of the tree, which are never the whole story, are left out."""
    assert set(ERROR_CATALOG) == set(ERRORS) - BASES


def parts(node: ast.expr) -> list[str] | None:
    """The literal parts of a message between its arguments; None when it isn't a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        found = [""]
        for value in node.values:
            if isinstance(value, ast.Constant):
                found[-1] += str(value.value)
            else:
                found.append("")
        return found
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = parts(node.left), parts(node.right)
        if left is not None and right is not None:
            return [*left[:-1], left[-1] + right[0], *right[1:]]
        return [*left, ""] if left is not None else ["", *right] if right is not None else None
    return None


@cache
def messages(path: Path) -> tuple[tuple[list[str], ...], frozenset[str]]:
    """All texts of a module as literal parts, and the classes of errors that it names."""
    names = {node.id for node in nodes_of(path) if isinstance(node, ast.Name)}
    names |= {node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef)}
    found = [parts(node) for node in nodes_of(path) if isinstance(node, ast.expr)]
    # A text for str.format has its arguments in braces.
    split = [re.split(r"\{[^{}]*\}", "\0".join(text)) for text in found if text is not None]
    return tuple("\0".join(text).split("\0") for text in split), frozenset(names)


def matches(example: str, template: list[str]) -> bool:
    """Whether an example is this message with arguments; an end left out (…) isn't compared."""
    is_cut = example.endswith(" …")
    example = example.removesuffix(" …")
    if not is_cut:
        return is_like(example, template)
    return any(
        example.endswith(part[max(0, end - 8) : end])
        and is_like(example, [*template[:number], part[:end]])
        for number, part in enumerate(template)
        for end in range(len(part), 0, -1)
    )


def is_like(example: str, template: list[str]) -> bool:
    """Whether a text has the literal parts in their order and arguments between them only."""
    if sum(len(re.findall(r"\w+", part)) for part in template) < 3 or not all(
        part in example for part in template
    ):
        return False
    told = ".*".join(map(re.escape, template))
    return re.fullmatch(rf"(?:\S+: )?{told}", example, re.DOTALL) is not None


@pytest.mark.parametrize("name", ERROR_CATALOG)
def test_an_example_is_a_message_that_the_code_raises(name):
    """By the literal parts of the texts in the modules that raise the class."""
    example = ERROR_CATALOG[name].example
    templates = [
        template
        for path in CODE
        if path.name != "error_catalog.py"
        and (
            str(path).endswith(ELSEWHERE.get(name, "-"))
            or (name in path.read_text() and name in messages(path)[1])
        )
        for template in messages(path)[0]
    ]
    assert any(matches(example, template) for template in templates), example


def test_an_example_that_no_message_is_like_is_found():
    assert not matches("slot 's' fell asleep", ["slot ", " is lost: run resync"])
    assert not matches("slot 's' was lost: run …", ["slot ", " is lost: run resync"])
    assert matches("slot 's' is lost: run …", ["slot ", " is lost: run resync"])

"""The examples in docstrings give what they say, and docstrings have one form."""

import ast
import doctest
import importlib

import pytest

from tests.unit.repository.test_architecture import MODULES, nodes_of

WITH_EXAMPLES = [name for name, path in MODULES.items() if ">>>" in path.read_text()]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples(module):
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0


def test_a_docstring_says_returns_and_yields():
    """One form for the same thing."""
    others = [
        f"{name}.{node.name}"
        for name, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
        and (ast.get_docstring(node) or "").startswith(("Return ", "Yield "))
    ]
    assert others == []

"""The syntax trees of the repository's files, parsed once in a process."""

import ast
from functools import cache
from pathlib import Path

from tools.messages import tree_of

ROOT = Path(__file__).parents[2]


def modules(folder: str) -> list[Path]:
    """The Python files below a folder of the repository."""
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, those above first."""
    return tuple(ast.walk(tree_of(path)))

"""Count names in the code that are no nouns: participles, pronouns, adverbs.

    python tools/names.py [--list]

CONTRIBUTING.md's "Writing" has the rule. The number of such names only falls: a change that adds
one fails, and a change that renames some records the new number in ``MOST`` here. ``--list``
prints every one with its place.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("include/waldelta", "include/waldelta_airflow")
MOST = 106
# What names nothing on its own.
WORDS = frozenset(
    re.findall(
        r"\w+",
        """asked before begun chosen done either every fed found given held here kept known left
        lost made more named other others own rest same sent shown some stands taken told wanted""",
    )
)


def names_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields what a module binds, with its line: variables, parameters, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def main() -> int:
    """Print the count, and return 1 where it isn't the recorded one."""
    found = [
        (name, f"{path.relative_to(ROOT)}:{line}")
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line in names_of(ast.parse(path.read_text()))
        if name.strip("_") in WORDS
    ]
    if "--list" in sys.argv[1:]:
        print("\n".join(f"{place}: {name}" for name, place in found))
    common = ", ".join(f"{name} {n}" for name, n in Counter(n for n, _ in found).most_common(5))
    print(f"names: {len(found)} are no nouns, {MOST} recorded ({common})")
    if len(found) > MOST:
        print("names: use a noun for a new name (python tools/names.py --list shows all)")
    elif len(found) < MOST:
        print(f"names: record the lower number, MOST = {len(found)} in tools/names.py")
    return int(len(found) != MOST)


if __name__ == "__main__":
    sys.exit(main())

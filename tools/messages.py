"""Print every string of several words in the code: what it raises, logs or shows.

    python tools/messages.py [FOLDER …]

A message is read here as its reader gets it, without the code around it. An argument appears by
name, in angle brackets.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("include/waldelta", "include/waldelta_airflow", "include/demo", "spark_jobs")
_FEWEST_WORDS = 3


@dataclass(frozen=True, slots=True)
class Message:
    """A message and where it is."""

    path: Path
    line: int
    text: str


def messages(folders: Sequence[str] = FOLDERS) -> list[Message]:
    """The messages of all modules below these folders, in the order of the files."""
    return [
        found
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for found in _of_module(path)
    ]


def _of_module(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside: set[int] = set()
    for node in ast.walk(tree):
        if id(node) in docstrings or id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr | ast.Constant) and (text := _text(node)) is not None:
            inside.update(map(id, ast.walk(node)))
            yield Message(path.relative_to(ROOT), node.lineno, text)


def _text(node: ast.expr) -> str | None:
    """A string of several words that isn't SQL, with placeholders by name; None for others."""
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
    else:
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"<{_name(part)}>"
            for part in node.values  # type: ignore[attr-defined]
        )
    words = [word for word in text.split() if any(letter.isalpha() for letter in word)]
    is_sql = text.lstrip().split(" ")[0].lower() in {"select", "with", "create", "alter", "set"}
    return text if len(words) >= _FEWEST_WORDS and not is_sql else None


def _name(part: ast.expr) -> str:
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return ast.unparse(value)[:40]


def main(arguments: Sequence[str]) -> int:
    """Print them, each below its place."""
    for message in messages(arguments or FOLDERS):
        print(f"{message.path}:{message.line}\n    {' '.join(message.text.split())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

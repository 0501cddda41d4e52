"""Print every string of several words in the code: what it raises, logs or shows.

    python tools/messages.py [FOLDER …]

A message is read here as its reader gets it, without the code around it. Its arguments are filled
in with examples, which follow from their names in the code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("include/waldelta", "include/waldelta_airflow", "include/demo", "spark_jobs")
_FEWEST_WORDS = 3
_PLACEHOLDER = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrfx]|\{\d*\}")
# What an argument of this name looks like; any other is its name, as words.
_EXAMPLES = {
    "table": "public.orders",
    "table_name": "public.orders",
    "names": "id, amount",
    "name": "orders",
    "slot": "shop_lake",
    "pipeline": "shop",
    "column": "amount",
    "columns": "id, amount",
    "path": "shop.yml",
    "folder": "/data/lake/public/orders",
    "root": "/data/lake",
    "uri": "/data/lake/public/orders",
    "err": "connection refused",
    "__name__": "OperationalError",
    "message_primary": "permission denied for table orders",
    "lsn": "0/1A2B3C8",
    "version": "12",
    "role": "lake_reader",
    "by": "ada",
    "publication": "shop_pub",
    "pid": "4711",
    "active_pid": "4711",
    "dag_id": "shop_cdc",
    "conn_id": "shop_db",
    "timeout_s": "30",
    "len": "3",
    "size": "30 MB",
    "duration": "4 minutes",
    "describe": "db.example:5432/shop",
    "describe_server": "db.example:5432/shop",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A message and where it is.

    ``text`` has its arguments by name, in angle brackets; ``example`` has them filled in.
    """

    path: Path
    line: int
    text: str
    example: str


def messages(folders: Sequence[str] = FOLDERS) -> list[Message]:
    """The messages of all modules below these folders, in the order of the files."""
    return [
        found
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for found in _of_module(path)
    ]


def docstrings(path: Path) -> set[int]:
    """The ids of a module's nodes that are docstrings."""
    return {
        id(node.body[0].value)
        for node in nodes_of(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a file, parsed once in a process."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, those above first."""
    return tuple(ast.walk(tree_of(path)))


def _of_module(path: Path) -> Iterator[Message]:
    described = docstrings(path)
    # What the calls of loggers and of str.format() fill in, by their text.
    arguments = dict(_formats(nodes_of(path)))
    inside: set[int] = set()
    for node in nodes_of(path):
        if id(node) in described or id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr | ast.Constant) and (text := _text(node)) is not None:
            inside.update(map(id, ast.walk(node)))
            example = _filled(_example(node), arguments.get(id(node), ()))
            yield Message(path.relative_to(ROOT), node.lineno, text, example)


def _formats(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, list[ast.expr]]]:
    """Texts with placeholders, by id, and the arguments for these."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Constant() as text, attr="format")):
                yield id(text), node.args
            case ast.Call(args=[ast.Constant() as text, _, *_]):
                yield id(text), node.args[1:]


def _filled(text: str, arguments: Iterable[ast.expr]) -> str:
    """A text with its arguments; ``{}`` that is filled in elsewhere is mostly a table."""
    examples = map(_example, arguments)

    def example(found: re.Match[str]) -> str:
        return next(examples, _EXAMPLES["table"] if found[0] == "{}" else found[0])

    return _PLACEHOLDER.sub(example, text)


def _example(node: ast.expr) -> str:
    """What an expression may be in a message."""
    found = "…"
    match node:
        case ast.JoinedStr(values=parts):
            found = "".join(map(_example, parts))
        case ast.Constant(value=value):
            found = str(value)
        case ast.FormattedValue(value=value, conversion=conversion):
            found = f"'{_example(value)}'" if conversion == ord("r") else _example(value)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            found = _EXAMPLES.get(name, name.strip("_").replace("_", " ").lower())
        case ast.Call():
            found = _returned(node)
        case ast.Subscript(value=value) | ast.NamedExpr(value=value) | ast.IfExp(body=value):
            found = _example(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _example(left) + _example(right)
        case ast.BoolOp(values=[value, *_]) | ast.BinOp(left=value):
            found = _example(value)
    return found


def _returned(call: ast.Call) -> str:
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=between), attr="join")):
            return f"first{between}second"
        case ast.Call(func=ast.Name(id="counted"), args=[_, ast.Constant(value=what), *more]):
            return f"3 {_example(more[0])}" if more else f"3 {what}s"
        case ast.Call(func=ast.Name(id=name)) if name in _EXAMPLES:
            return _EXAMPLES[name]
    return _example(call.args[0] if call.args else call.func)


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
        print(f"{message.path}:{message.line}\n    {' '.join(message.example.split())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""How the texts of each kind of attention begin, read from the code that makes them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from waldelta.decision_kinds import WAITING_KINDS
from waldelta.monitoring.attention import KINDS, AttentionTopic

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("include/waldelta/monitoring", "include/waldelta_airflow")
# Its warnings become attention of the kind "slot".
_OF_SLOT: Final = "include/waldelta/slot/health.py"
_MORE: Final = "…"
# The words before a cause, a figure or a remedy, with the names of what they are about.
_BEGINNING: Final = re.compile(r"(?:(?:slot )?…: )?.+?(?=[:;] |(?<=…), | \([^)]*…|$)")


@cache
def texts() -> dict[str, list[str]]:
    """The beginnings of each kind's texts, with ``…`` for their arguments."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in [*paths, ROOT / _OF_SLOT]:
        for node in ast.walk(ast.parse(path.read_text())):
            for kind, text in _of_node(node):
                found[kind].append(_beginning(text))
    found["decision"] = [
        _beginning(kind.text.replace("{}", _MORE)) for kind in WAITING_KINDS.values()
    ]
    return {kind: list(dict.fromkeys(of_kind)) for kind, of_kind in found.items()}


def lines(topic: AttentionTopic) -> Iterator[tuple[list[str], str]]:
    """The texts of each kind of a topic, and what to do about them."""
    of_kind = texts()
    for kind, about in KINDS.items():
        if about.topic == topic:
            yield of_kind[kind], about.remedy


def _of_node(node: ast.AST) -> Iterator[tuple[str, str]]:
    """A kind and the next text after it, in a call or a row of a table."""
    match node:
        case ast.Call(func=ast.Name(id="SlotWarning"), args=[_, text]):
            yield from (("slot", one) for one in _texts(text))
        case ast.Call(func=ast.Name(), args=parts) | ast.Tuple(elts=parts):
            yield from _next_to_kinds(parts)


def _next_to_kinds(parts: Sequence[ast.expr]) -> Iterator[tuple[str, str]]:
    for number, part in enumerate(parts):
        if isinstance(part, ast.Constant) and part.value in KINDS:
            after = (list(_texts(one)) for one in parts[number + 1 :])
            yield from ((part.value, text) for text in next(filter(None, after), []))


def _texts(node: ast.expr) -> Iterator[str]:
    """The texts of several words that an expression may have."""
    match node:
        case ast.IfExp(body=body, orelse=other):
            yield from [*_texts(body), *_texts(other)]
        case ast.Constant(value=str(text)) if " " in text:
            yield text.replace("{}", _MORE)
        case ast.JoinedStr(values=values):
            text = "".join(
                str(one.value) if isinstance(one, ast.Constant) else _MORE for one in values
            )
            # A caller's text in a frame of none of its own is made elsewhere.
            if len(re.findall(r"[a-z]{2,}", text)) > 1:
                yield text.replace("{}", _MORE)


def _beginning(text: str) -> str:
    """The words that a reader searches for.

    >>> _beginning("…: in the pipeline file, but not published: its changes are not replicated")
    '…: in the pipeline file, but not published'
    >>> _beginning("the latest DAG run failed (…): see its log in Airflow")
    'the latest DAG run failed'
    """
    found = _BEGINNING.match(re.sub(r"…(?: …)+", _MORE, text))
    return found[0] if found else text

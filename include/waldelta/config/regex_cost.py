"""Judges whether Java finds out in bounded time that a regular expression doesn't match.

Java tries all ways to share a text among a pattern's repetitions. They are few where the next
character decides whether a repetition goes on: in ``[a-z]+(,[a-z]+)*`` it does, in ``(.*a){12}b``
and ``(a+)+b`` it doesn't.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, takewhile
from operator import or_

# The most unlimited repetitions that may compete for the same text, and the most ways in which
# limited ones may share it.
_MOST_LOOPS = 3
_MOST_WAYS = 1_000
_DEEPEST = 40
_PATTERN_FUNCTION = re.compile(r"\b(?:rlike|regexp\w*|split)\b", re.IGNORECASE)
_QUANTIFIER = re.compile(r"([*+?]|\{(\d+)(,(\d*))?\})([+?]?)")
_GROUP = re.compile(r"\?(?:<[A-Za-z]\w*>|<?[=!]|[>:]|[a-zA-Z-]+[:)])")
_ESCAPE = re.compile(r"\\(?:[pPx]\{[^}]*\}|[pP].|x..|u....|0[0-7]{1,3}|c.|k<\w+>|.)", re.DOTALL)
_ZERO_WIDTH = frozenset({r"\A", r"\z", r"\Z", r"\b", r"\B", r"\G", "^", "$"})
_SAMPLE = [chr(code) for code in range(128)] + list("\x85\xa0éßİЖ中\u2028😀")


def why_slow(pattern: str) -> str | None:
    """Returns why Java may need exponential time for a pattern; None where it doesn't, and for a
    pattern that isn't Java's.

    >>> why_slow("(.*a){12}b")
    '12 repetitions that may share a text in any way'
    >>> why_slow("(a+)+b")
    'a repetition in another one, with no character that parts them'
    >>> why_slow("^[a-z0-9.]+@[a-z0-9.]+[.][a-z]{2,}$"), why_slow("^[a-z]+(,[a-z]+)*$")
    (None, None)
    """
    parser = _Parser(pattern)
    try:
        whole = parser.alternatives(0)
        cost = whole.cost(0) if not parser.rest else _Cost()
    except _MalformedError:
        return None
    except _SlowError as err:
        return str(err)
    if cost.loops > _MOST_LOOPS:
        return f"{cost.loops} repetitions that may share a text in any way"
    if cost.ways > _MOST_WAYS:
        return f"repetitions and alternatives that may share a text in over {_MOST_WAYS} ways"
    return None


def patterns_in(condition: str) -> list[str]:
    """Returns the texts of a Spark SQL condition that it may use as regular expressions.

    Those are all texts of a condition that calls such a function. Spark reads texts in a row as
    one.

    >>> patterns_in("v rlike '^a' '+$' or v = 'b'"), patterns_in("v = '(a+)+b'")
    (['^a+$', 'b'], [])
    """
    if not _PATTERN_FUNCTION.search(condition):
        return []
    import sqlglot  # few conditions have one

    texts: list[str] = []
    is_text = False
    try:
        tokens = sqlglot.tokenize(condition, read="spark")
    except sqlglot.errors.SqlglotError:  # For Spark to refuse.
        return []
    for token in tokens:
        was_text, is_text = is_text, token.token_type.name in ("STRING", "RAW_STRING")
        if was_text and is_text:
            texts[-1] += token.text
        elif is_text:
            texts.append(token.text)
    return texts


class _SlowError(Exception):
    """The message says what may take exponential time."""


class _MalformedError(Exception):
    """The pattern isn't Java's."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """How many unlimited repetitions compete for a text, and in how many ways others share it."""

    loops: int = 0
    ways: int = 1

    def times(self, count: int) -> _Cost:
        many = self.ways > 1 and count > _MOST_WAYS.bit_length()
        return _Cost(self.loops * count, _MOST_WAYS + 1 if many else self.ways**count)

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.loops + other.loops, min(self.ways * other.ways, _MOST_WAYS + 1))


@dataclass(frozen=True, slots=True)
class _Atom:
    """A character of a set, as bits of the sample; or a place, which takes none.

    ``first`` are the characters that a node may begin with, ``is_empty`` is whether it may match
    the empty text. ``cost()`` takes the characters that may follow the node.
    """

    first: int
    is_empty: bool = False

    def cost(self, _: int) -> _Cost:
        return _Cost()


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]

    @property
    def first(self) -> int:
        characters = 0
        for part in self.parts:
            characters |= part.first
            if not part.is_empty:
                break
        return characters

    @property
    def is_empty(self) -> bool:
        return all(part.is_empty for part in self.parts)

    def characters(self) -> list[int]:
        """Returns the sets of the characters with which each text that it matches begins."""
        atoms = takewhile(lambda part: isinstance(part, _Atom), self.parts)
        return [atom.first for atom in atoms if not atom.is_empty]

    def cost(self, follow: int) -> _Cost:
        cost = _Cost()
        for part in reversed(self.parts):
            cost += part.cost(follow)
            follow = part.first | (follow if part.is_empty else 0)
        return cost


@dataclass(frozen=True, slots=True)
class _Alternatives:
    branches: tuple[_Node, ...]

    @property
    def first(self) -> int:
        return reduce(or_, (branch.first for branch in self.branches), 0)

    @property
    def is_empty(self) -> bool:
        return any(branch.is_empty for branch in self.branches)

    def cost(self, follow: int) -> _Cost:
        costs = [branch.cost(follow) for branch in self.branches]
        loops, ways = max(cost.loops for cost in costs), [cost.ways for cost in costs]
        begins = [one.first | (follow if one.is_empty else 0) for one in self.branches]
        are_disjoint = not any(one & other for one, other in combinations(begins, 2))
        # Words of which none is the beginning of another one.
        words = [one.characters() for one in self.branches if isinstance(one, _Sequence)]
        differ = len(words) == len(self.branches) and all(
            any(not a & b for a, b in zip(one, other, strict=False))
            for one, other in combinations(words, 2)
        )
        return _Cost(loops, max(ways) if are_disjoint or differ else sum(ways))


@dataclass(frozen=True, slots=True)
class _Repeat:
    body: _Node
    least: int
    most: int | None
    is_possessive: bool

    @property
    def first(self) -> int:
        return self.body.first

    @property
    def is_empty(self) -> bool:
        return self.least == 0 or self.body.is_empty

    def cost(self, follow: int) -> _Cost:
        begin = self.body.first
        again = begin if self.most != 1 else 0
        inner = self.body.cost(follow | again)
        ends_clearly = not (begin & follow or self.body.is_empty) or self.is_possessive
        if self.most is None:
            if inner != _Cost():
                raise _SlowError("a repetition in another one, with no character that parts them")
            return _Cost() if ends_clearly else _Cost(1)
        choices = 1 if ends_clearly else min(self.most - self.least, _MOST_WAYS) + 1
        return inner.times(self.most) + _Cost(0, choices)


_Node = _Atom | _Sequence | _Alternatives | _Repeat


class _Parser:
    """Reads Java's syntax; what Python's doesn't have counts as any character."""

    def __init__(self, pattern: str) -> None:
        self.rest = pattern
        self._flags = re.DOTALL | (re.IGNORECASE if re.search(r"\(\?[a-z]*i", pattern) else 0)
        self._sample = [*_SAMPLE, *dict.fromkeys(c for c in pattern if not c.isascii())]
        self._any = (1 << len(self._sample)) - 1

    def alternatives(self, depth: int) -> _Node:
        if depth > _DEEPEST:
            raise _SlowError(f"over {_DEEPEST} groups in each other")
        branches = [self._branch(depth)]
        while self._skip("|"):
            branches.append(self._branch(depth))
        return branches[0] if len(branches) == 1 else _Alternatives(tuple(branches))

    def _branch(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self.rest and self.rest[0] not in "|)":
            if self._skip("\\Q"):
                text, _, self.rest = self.rest.partition("\\E")
                parts += [self._set(re.escape(c)) for c in text]
            else:
                parts.append(self._piece(depth))
        return _Sequence(tuple(parts))

    def _piece(self, depth: int) -> _Node:
        node = self._group(depth) if self._skip("(") else self._atom()
        while (quantifier := _QUANTIFIER.match(self.rest)) is not None:
            self.rest = self.rest[quantifier.end() :]
            sign, least, comma, most, mark = quantifier.groups()
            low = int(least) if least else int(sign == "+")
            high = int(most) if most else 1 if sign == "?" else low if least and not comma else None
            node = _Repeat(node, low, high, mark == "+")
        return node

    def _group(self, depth: int) -> _Node:
        head = _GROUP.match(self.rest)
        if head is not None:
            self.rest = self.rest[head.end() :]
            if head[0].endswith(")"):  # Options.
                return _Atom(0, True)
        inner = self.alternatives(depth + 1)
        if not self._skip(")"):
            raise _MalformedError
        looks = head is not None and head[0].endswith(("=", "!"))
        return _Sequence((inner, _Atom(0, True))) if not looks else _Atom(0, True)

    def _atom(self) -> _Node:
        if self.rest[0] == "[":
            return self._set(self._class())
        match = _ESCAPE.match(self.rest)
        text = match[0] if match is not None else self.rest[0]
        self.rest = self.rest[len(text) :]
        if text in _ZERO_WIDTH:
            return _Atom(0, True)
        if re.match(r"\\[1-9k]", text):  # What a group has matched, which may be nothing.
            return _Atom(self._any, True)
        return self._set(text if text in (".",) or len(text) > 1 else re.escape(text))

    def _class(self) -> str:
        depth = 0
        for at, c in enumerate(self.rest):
            if at and self.rest[at - 1] == "\\" and not self.rest[:at].endswith("\\\\"):
                continue
            depth += (c == "[") - (c == "]" and self.rest[:at] not in ("[", "[^"))
            if depth == 0:
                head, self.rest = self.rest[: at + 1], self.rest[at + 1 :]
                return head
        raise _MalformedError

    def _set(self, source: str) -> _Atom:
        if re.search(r"&&|\\[pPhHvVRXNx0uc]|.\[", source, re.DOTALL):
            return _Atom(self._any)
        try:
            matcher = re.compile(source, self._flags)
        except re.error:
            return _Atom(self._any)
        bits = (1 << at for at, c in enumerate(self._sample) if matcher.fullmatch(c))
        return _Atom(reduce(or_, bits, 0))

    def _skip(self, text: str) -> bool:
        if is_next := self.rest.startswith(text):
            self.rest = self.rest[len(text) :]
        return is_next

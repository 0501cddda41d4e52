"""Translates PostgreSQL's LIKE, SIMILAR TO and advanced regular expressions to Java's, if both mean
the same.

Only whether there is a match counts, so greedy and reluctant quantifiers are equivalent. Each
function raises PatternRefused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from waldelta.config.regex_cost import why_slow

_MAX_REPEATS = 255  # DUPMAX of PostgreSQL's regular expressions
_CONTROL = {
    "a": "\a",
    "b": "\b",
    "e": "\033",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
# Under collation C the classes contain only ASCII characters, as in Java.
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\x0B\f\r"}
_NAMED = {
    "alpha": "A-Za-z", "digit": "0-9", "alnum": "0-9A-Za-z", "upper": "A-Z", "lower": "a-z",
    "space": r" \t\n\x0B\f\r", "xdigit": "0-9A-Fa-f", "blank": r" \t",
}  # fmt: skip
_SPECIAL = frozenset("\\^$.|?*+()[]{}&~-#\"'/ ")


class PatternRefused(Exception):
    """The pattern isn't valid in PostgreSQL, or has no certain counterpart in Java.

    The message names the part that is the reason.
    """


def _refuse_if(reject: object, reason: str) -> None:
    if reject:
        raise PatternRefused(reason)


def like_parts(pattern: str, escape: str = "\\") -> list[tuple[str, str]]:
    """Split a LIKE pattern into ("text", …), ("any", "%") and ("one", "_").

    >>> like_parts("a\\\\%b%")
    [('text', 'a%b'), ('any', '%')]
    """
    parts: list[tuple[str, str]] = []
    characters = iter(pattern)
    for c in characters:
        if c == escape:
            if (c := next(characters, "")) == "":
                raise PatternRefused("it ends with its escape character")
        elif c in "%_":
            parts.append(("any" if c == "%" else "one", c))
            continue
        if parts and parts[-1][0] == "text":
            parts[-1] = ("text", parts[-1][1] + c)
        else:
            parts.append(("text", c))
    return parts


def similar_to_regex(pattern: str, escape: str = "\\") -> str:
    """Returns the advanced regular expression that similar_to_escape() makes of a SIMILAR TO
    pattern.

    >>> similar_to_regex("(a|b)%_.")
    '^(?:(?:a|b).*.\\\\.)$'
    """
    if re.search(r"\[\^?\]|\[[^\]]*\[", pattern):
        raise PatternRefused(
            "a bracket within brackets of SIMILAR TO"
        )  # Releases of PostgreSQL differ.
    out, characters, in_brackets = ["^(?:"], iter(pattern), False
    for c in characters:
        if c == escape:
            following = next(characters, "")
            _refuse_if(following == '"', 'the separator \\" of SIMILAR')
            # At the very end PostgreSQL drops the escape character.
            out.append("\\" + following if following else "")
        elif in_brackets:
            out.append("\\\\" if c == "\\" else c)
            in_brackets = c != "]"
        elif c == "[":
            out.append(c)
            in_brackets = True
        else:
            out.append({"%": ".*", "_": ".", "(": "(?:"}.get(c, "\\" + c if c in "\\.^$" else c))
    return "".join([*out, ")$"])


def java_regex(pattern: str, *, certain_case: bool) -> str:
    """Returns a Java pattern that finds a match exactly where PostgreSQL's ARE matches.

    ``certain_case``: the collation is C, so that classes contain only ASCII characters.

    >>> java_regex("^a.c$", certain_case=True)
    '(?s)\\\\Aa.c\\\\z'
    """
    _refuse_if(
        pattern.startswith(("***", "(?")) and not pattern.startswith("(?:"),
        "options at its beginning",
    )
    reader = _Regex(pattern, certain_case)
    java = reader.alternatives()
    _refuse_if(reader.rest, f"an unmatched {reader.rest[:1]!r}")
    if (why := why_slow(java)) is not None:
        raise PatternRefused(f"{why}, which may take Java exponential time")
    return "(?s)" + java


def like_regex(parts: Sequence[tuple[str, str]]) -> str:
    """Returns a Java pattern for the parts of a LIKE pattern, without backtracking.

    The first place where a text between two ``%`` fits is as good as any later one.

    >>> like_regex(like_parts("a%b_%%c"))
    '(?s)\\\\Aa(?>.*?b.).*c\\\\z'
    """
    texts = [""]
    for kind, part in parts:
        if kind == "any":
            texts.append("")
        else:
            texts[-1] += "." if kind == "one" else "".join(map(_literal, part))
    first, *between, last = texts
    atomic = "".join(f"(?>.*?{text})" for text in between if text)
    return rf"(?s)\A{first}{atomic}.*{last}\z"


class _Regex:
    def __init__(self, pattern: str, certain_case: bool) -> None:
        self.rest, self.certain_case = pattern, certain_case

    def skip(self, text: str) -> bool:
        if is_next := self.rest.startswith(text):
            self.rest = self.rest[len(text) :]
        return is_next

    def take(self) -> str:
        _refuse_if(not self.rest, "an unfinished bracket, group or escape")
        character, self.rest = self.rest[0], self.rest[1:]
        return character

    def alternatives(self) -> str:
        branches = [self.branch()]
        while self.skip("|"):
            branches.append(self.branch())
        return "|".join(branches)

    def branch(self) -> str:
        pieces = []
        while self.rest and self.rest[0] not in "|)":
            pieces.append(self.piece())
        return "".join(pieces)

    def piece(self) -> str:
        _refuse_if(
            self.rest[0] in "*+?{", f"the quantifier {self.rest[0]!r} with nothing before it"
        )
        start = self.rest
        atom, is_anchor = self.atom()
        source = start[: len(start) - len(self.rest)]
        quantifier = self.quantifier()
        if not quantifier:
            return atom
        _refuse_if(is_anchor, "a quantified anchor")
        if source.startswith("(") and (quantifier in "*+" or quantifier.endswith(",}")):
            # Java's stack gets one level deeper with each repetition, and it may need exponential
            # time.
            if (letters := re.fullmatch(r"\((?:\?:)?(\w(?:\|\w)*)\)", source)) is None:
                raise PatternRefused("a group that is repeated without limit")
            atom = f"[{letters[1].replace('|', '')}]"
        return atom + quantifier

    def atom(self) -> tuple[str, bool]:
        c = self.take()
        if c == "(":
            return self.group(), False
        if c == "[":
            return self.bracket(), False
        if c == "\\":
            return self.escape()
        anchors = {"^": r"\A", "$": r"\z"}
        if c in anchors:
            return anchors[c], True
        return c if c == "." else _literal(c), False

    def group(self) -> str:
        _refuse_if(
            self.rest.startswith("?") and not self.rest.startswith("?:"),
            "a lookahead or lookbehind",
        )
        self.skip("?:")
        inner = self.alternatives()
        _refuse_if(not self.skip(")"), "an unmatched '('")
        return f"(?:{inner})"

    def escape(self) -> tuple[str, bool]:
        c = self.take()
        if c in ("A", "Z"):
            return {"A": r"\A", "Z": r"\z"}[c], True
        if c.lower() in _CLASSES:
            self.need_ascii(f"\\{c}")
            return f"[{'^' if c.isupper() else ''}{_CLASSES[c.lower()]}]", False
        if c in _CONTROL:
            return _literal(_CONTROL[c]), False
        _refuse_if(c.isascii() and c.isalnum(), f"the escape \\{c}")
        return _literal(c), False

    def quantifier(self) -> str:
        match = re.match(r"[*+?]|\{(\d+)(,(\d*))?\}", self.rest)
        if match is None:
            _refuse_if(self.rest.startswith("{"), "a '{' that begins no quantifier")
            return ""
        self.rest = self.rest[match.end() :]
        least, most = int(match[1] or 0), int(match[3] or match[1] or 0)
        _refuse_if(
            max(least, most) > _MAX_REPEATS or (match[3] and most < least),
            "a number of repetitions that PostgreSQL doesn't take",
        )
        self.skip("?")  # Skips the mark of a reluctant quantifier.
        _refuse_if(self.rest[:1] in ("*", "+", "?", "{") and self.rest, "two quantifiers in a row")
        return match[0]

    def bracket(self) -> str:
        negated = self.skip("^")
        items = [self.bracket_item()]  # A bracket that comes first doesn't end the class.
        while not self.skip("]"):
            items.append(self.bracket_item())
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def bracket_item(self) -> str:
        if match := re.match(r"\[:(\w+):\]", self.rest):
            self.rest = self.rest[match.end() :]
            self.need_ascii(match[0])
            _refuse_if(match[1] not in _NAMED, f"the class {match[0]}")
            return _NAMED[match[1]]
        _refuse_if(self.rest.startswith(("[.", "[=")), "a collating element")
        first = self.bracket_character()
        if len(first) > 1 or not self.rest.startswith("-") or self.rest.startswith("-]"):
            return first if len(first) > 1 else _literal(first)
        self.take()
        _refuse_if(self.rest.startswith("["), "a range that ends in a class")
        last = self.bracket_character()
        _refuse_if(len(last) > 1 or last < first, "a range whose end is before its start")
        return f"{_literal(first)}-{_literal(last)}"

    def bracket_character(self) -> str:
        """Read one character, or the inside of a class."""
        if (c := self.take()) != "\\":
            return c
        c = self.take()
        if c in _CLASSES:
            self.need_ascii(f"\\{c}")
            return _CLASSES[c]
        if c in _CONTROL:
            return _CONTROL[c]
        _refuse_if(c.isascii() and c.isalnum(), f"the escape \\{c} in brackets")
        return c

    def need_ascii(self, what: str) -> None:
        _refuse_if(
            not self.certain_case, f'{what}, which depends on the collation (add COLLATE "C")'
        )


def _literal(c: str) -> str:
    if c in _SPECIAL:
        return "\\" + c
    return c if c.isprintable() else f"\\x{{{ord(c):x}}}"

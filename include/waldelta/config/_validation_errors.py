"""Errors of a rejected file: each problem with its place and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

# By the beginning of pydantic's type of error.
_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "int_": "a whole number is needed",
        "float_": "a number is needed",
        "bool_": "true or false is needed",
        "string_": "a text is needed: quote it",
        "tuple_": "a list is needed, as in `[a, b]`",
        "list_": "a list is needed, as in `[a, b]`",
        "model_": "keys with values are needed, as in `key: value`",
        "dict_": "keys with values are needed, as in `key: value`",
        "invalid_key": "a key is a text: quote it",
        "greater_than_equal": "{ge} or more is needed",
        "greater_than": "more than {gt} is needed",
        "less_than_equal": "{le} or less is needed",
        "less_than": "less than {lt} is needed",
    }
)


class StrictModel(BaseModel, extra="forbid", frozen=True):
    """A part of a file that refuses keys which it doesn't know."""


def refuse_if(found: object, text: str) -> None:
    """Raise ValueError if something was found, or a condition holds."""
    if found:
        raise ValueError(text)


def problems(err: ValidationError, model: type[BaseModel]) -> list[str]:
    """Returns the place and remedy of each problem that validation by the model found."""
    errors: list[dict[str, Any]] = [dict(error) for error in err.errors()]
    # For a list whose only entry is invalid, pydantic also reports that it is empty.
    above = {error["loc"][:depth] for error in errors for depth in range(len(error["loc"]))}
    return [
        f"{place_of(error['loc'])}: {_remedy(error, model)}"
        for error in errors
        if error["type"] != "too_short" or error["loc"] not in above
    ]


def place_of(loc: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".") or "(top level)"


def _remedy(error: dict[str, Any], model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        return _of_unknown(error["loc"], model)
    if error["type"] == "missing":
        return "missing: add it"
    if error["type"] == "too_short":
        return f"too few entries: write {error['ctx']['min_length']} at least"
    message = _needed(error)
    given = error.get("input")
    return (
        f"{message} (given: {given!r})" if isinstance(given, str | int | float | bool) else message
    )


def one_of(expected: Sequence[str], given: Any) -> str:
    """Returns what a value must be that is none of the expected ones.

    >>> one_of(["evolve", "fail"], "evolv")
    'one of evolve, fail is needed: did you mean evolve?'
    """
    near = get_close_matches(str(given), expected, 1)
    hint = f": did you mean {near[0]}?" if near else ""
    return f"one of {', '.join(expected)} is needed{hint}"


def _needed(error: dict[str, Any]) -> str:
    """Returns what a value must be, in place of the library's words for Python's types."""
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind == "literal_error":
        expected = [part.strip("'") for part in re.split(r", | or ", context["expected"])]
        return one_of(expected, error.get("input"))
    for beginning, needed in _NEEDED.items():
        if kind.startswith(beginning):
            return needed.format(**context)
    return str(error["msg"]).removeprefix("Value error, ")


def _of_unknown(loc: Sequence[int | str], model: type[BaseModel]) -> str:
    """Returns the remedy for an unknown key: where that key belongs, else the nearest key there."""
    key, known = str(loc[-1]), _keys(model, loc[:-1])
    if places := [place for place in _places(model, key) if place != key]:
        return f"unknown key here: write it as {' or '.join(places)}"
    if near := get_close_matches(key, known, 1):
        return f"unknown key: did you mean {near[0]}?"
    return f"unknown key: remove it; {', '.join(known)} are known here"


def _keys(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """Returns the keys that a place of the file may have."""
    kind: Any = model
    for part in loc:
        of = _model_of(kind)
        if of is not None:
            kind = next(
                (f.annotation for name, f in of.model_fields.items() if part in (name, f.alias)),
                None,
            )
        else:  # The part is an entry of a list or mapping.
            kind = next((a for a in reversed(get_args(kind)) if a is not Ellipsis), None)
    found = _model_of(kind)
    return (
        [] if found is None else [field.alias or name for name, field in found.model_fields.items()]
    )


def _places(model: type[BaseModel], key: str, above: str = "") -> Iterator[str]:
    """Yields where in the file a key of this name belongs."""
    for name, field in model.model_fields.items():
        written = f"{above}{field.alias or name}"
        if key == (field.alias or name):
            yield written
        kind, entry = field.annotation, ""
        while get_origin(kind) in (tuple, dict):
            entry += "[]" if get_origin(kind) is tuple else ".<name>"
            kind = next((a for a in reversed(get_args(kind)) if a is not Ellipsis), None)
        if (of := _model_of(kind)) is not None:
            yield from _places(of, key, f"{written}{entry}.")


def _model_of(kind: Any) -> type[BaseModel] | None:
    """Returns the model of a field, also of an optional one."""
    if get_origin(kind) in (Union, UnionType):
        return next(
            (found for arg in get_args(kind) if (found := _model_of(arg)) is not None), None
        )
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None

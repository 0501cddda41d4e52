"""Errors of a rejected file: each problem with its place and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

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


class StrictModel(BaseModel):
    """A part of a file that refuses keys which it doesn't know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_yaml(text: str) -> Any:
    """Returns the document of a YAML file; raises yaml.YAMLError, also for duplicate keys.

    YAML itself would take the last one. The error says in one line what is wrong where, without
    the file's text, which may have a secret.
    """
    try:
        return _read_document(text)
    except ReaderError as err:
        before = text[: err.position]
        line, column = before.count("\n") + 1, err.position - before.rfind("\n")
        raise yaml.YAMLError(
            f"line {line}, column {column}: character #x{err.character:04x} isn't allowed"
        ) from None
    except MarkedYAMLError as err:
        raise yaml.YAMLError(_described(err)) from None


def _read_document(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if twice := list(_written_twice(node, (), set())):
            raise yaml.YAMLError(f"each key is written once: {', '.join(twice)}")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _described(err: MarkedYAMLError) -> str:
    mark = err.problem_mark or err.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    begun = f", line {err.context_mark.line + 1}" if err.context_mark is not None else ""
    context = f" ({err.context}{begun})" if err.context and err.problem else ""
    return f"{place}{err.problem or err.context}{context}"


def _written_twice(node: yaml.Node, loc: Sequence[int | str], seen: set[int]) -> Iterator[str]:
    """Yields the place and the lines of each duplicate key of a mapping.

    ``seen`` are nodes that were visited, because aliases refer to them again.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        names: set[str] = set()
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            place, before = (*loc, name), first.setdefault(name, line)
            if name in names:
                where = f"lines {before} and {line}" if before != line else f"line {line} twice"
                yield f"{_place(place)} is on {where}"
            names.add(name)
            yield from _written_twice(value, place, seen)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _written_twice(value, (*loc, number), seen)


def problems(err: ValidationError, model: type[BaseModel]) -> list[str]:
    """Returns the place and remedy of each problem that validation by the model found."""
    found: list[dict[str, Any]] = [dict(error) for error in err.errors()]
    # For a list whose only entry is invalid, pydantic also reports that it is empty.
    found = [
        e
        for e in found
        if e["type"] != "too_short" or not any(_lies_below(o["loc"], e["loc"]) for o in found)
    ]
    return [f"{_place(e['loc'])}: {_remedy(e, model)}" for e in found]


def _lies_below(loc: Sequence[int | str], above: Sequence[int | str]) -> bool:
    return len(loc) > len(above) and tuple(loc[: len(above)]) == tuple(above)


def _place(loc: Sequence[int | str]) -> str:
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

"""Parses YAML and JSON that other programs and people wrote, in bounded time and memory; names the
place and remedy of each problem that a model finds in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from waldelta.errors import ConfigError

# A file of this project has some kilobytes. PyYAML takes ten seconds for a megabyte.
_MOST_BYTES = 1 << 20
# What a document may have, with each alias counted as a copy of what it stands for.
_MOST_VALUES = 50_000
_TOO_DEEP = "lists and mappings are nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """Returns a JSON document; raises ValueError, also where it is nested too deeply.

    json.loads() raises RecursionError for that, which callers that expect invalid JSON don't catch.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_yaml_file(path: Path, lines: list[int] | None = None) -> Any:
    """Returns the document of a YAML file; raises OSError, and ConfigError with the file's name.

    ``lines`` gets the lines of the entries of its lists, where it is a mapping of lists.
    ConfigError is raised for what isn't a regular file, and as parse_yaml() raises yaml.YAMLError.
    """
    if path.exists() and not path.is_file():  # Opening a FIFO would wait without end.
        raise ConfigError(f"{path} is not a regular file: remove it")
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ConfigError(f"{path} has {size:,} bytes, and {_MOST_BYTES:,} are allowed: shorten it")
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), lines)
    except UnicodeDecodeError as err:
        raise ConfigError(
            f"{path} is not text in UTF-8 (byte {err.start}): check the path"
        ) from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{path} is not valid YAML: {err}") from err


def parse_yaml(text: str, lines: list[int] | None = None) -> Any:
    """Returns the document of a YAML text; raises yaml.YAMLError.

    It is raised for duplicate keys, of which YAML itself would take the last one, too; also where
    values are nested too deeply, or aliases and merge keys stand for too many values. It says in
    one line what is wrong where, without the file's text, which may have a secret.
    """
    try:
        return _read_document(text, lines)
    except ReaderError as err:
        text_above = text[: err.position]
        line, column = text_above.count("\n") + 1, err.position - text_above.rfind("\n")
        raise yaml.YAMLError(
            f"line {line}, column {column}: character #x{err.character:04x} isn't allowed"
        ) from None
    except MarkedYAMLError as err:
        raise yaml.YAMLError(_describe_error(err)) from None
    except RecursionError:
        raise yaml.YAMLError(_TOO_DEEP) from None


def _read_document(text: str, lines: list[int] | None) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        if twice := list(_written_twice(node, (), set())):
            raise yaml.YAMLError(f"each key is written once: {', '.join(twice)}")
        if lines is not None and isinstance(node, yaml.MappingNode):
            lists = (of for _, of in node.value if isinstance(of, yaml.SequenceNode))
            lines += [entry.start_mark.line + 1 for of in lists for entry in of.value]
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _describe_error(err: MarkedYAMLError) -> str:
    mark = err.problem_mark or err.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    begin = f", line {err.context_mark.line + 1}" if err.context_mark is not None else ""
    context = f" ({err.context}{begin})" if err.context and err.problem else ""
    return f"{place}{err.problem or err.context}{context}"


def _check_size(document: yaml.Node) -> None:
    """Raise yaml.YAMLError where aliases make a small text a large document, or an endless one."""
    sizes: dict[int, int] = {}

    def size_of(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_VALUES + 1  # For an alias within what it stands for.
            is_mapping = isinstance(node, yaml.MappingNode)
            below = chain.from_iterable(node.value) if is_mapping else node.value
            is_scalar = isinstance(node, yaml.ScalarNode)
            sizes[id(node)] = 1 if is_scalar else 1 + sum(map(size_of, below))
        return sizes[id(node)]

    # Without an alias, each value is a node of its own, and the file's size limits their number.
    if size_of(document) > _MOST_VALUES + len(sizes):
        raise yaml.YAMLError(
            f"its aliases stand for more than {_MOST_VALUES:,} values: write fewer"
        )


def _written_twice(node: yaml.Node, loc: Sequence[int | str], seen: set[int]) -> Iterator[str]:
    """Yields the place and the lines of each duplicate key of a mapping.

    ``seen`` are nodes that were visited, because aliases refer to them again.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            place = (*loc, name)
            if (first_line := first.get(name)) is not None:
                where = (
                    f"lines {first_line} and {line}" if first_line != line else f"line {line} twice"
                )
                yield f"{place_of(place)} is on {where}"
            first.setdefault(name, line)
            yield from _written_twice(value, place, seen)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _written_twice(value, (*loc, number), seen)


# --- problems that a model finds

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


def refuse_if(applies: object, text: str) -> None:
    """Raise ValueError if something was found, or a condition holds."""
    if applies:
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
    """Returns a place of a document as text: keys, and the numbers of entries in brackets."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".") or "(top level)"


def _remedy(error: dict[str, Any], model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        return _of_unknown(error["loc"], model)
    if error["type"] == "missing":
        return "missing: add it"
    if error["type"] == "too_short":
        return f"too few entries: write {error['ctx']['min_length']} at least"
    message = _expected_value(error)
    value = error.get("input")
    return (
        f"{message} (given: {value!r})" if isinstance(value, str | int | float | bool) else message
    )


def one_of(expected: Sequence[str], value: Any) -> str:
    """Returns what a value must be that is none of the expected ones.

    >>> one_of(["evolve", "fail"], "evolv")
    'one of evolve, fail is needed: did you mean evolve?'
    """
    near = get_close_matches(str(value), expected, 1)
    hint = f": did you mean {near[0]}?" if near else ""
    return f"one of {', '.join(expected)} is needed{hint}"


def _expected_value(error: dict[str, Any]) -> str:
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
    key, keys = str(loc[-1]), _keys(model, loc[:-1])
    if places := [place for place in _places(model, key) if place != key]:
        return f"unknown key here: write it as {' or '.join(places)}"
    if near := get_close_matches(key, keys, 1):
        return f"unknown key: did you mean {near[0]}?"
    return f"unknown key: remove it; {', '.join(keys)} are known here"


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
    inner = _model_of(kind)
    return (
        [] if inner is None else [field.alias or name for name, field in inner.model_fields.items()]
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
            (model for arg in get_args(kind) if (model := _model_of(arg)) is not None), None
        )
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None

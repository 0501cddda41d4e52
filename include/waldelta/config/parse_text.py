"""Parses YAML and JSON that other programs and people wrote, in bounded time and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from waldelta.config._validation_errors import place_of
from waldelta.errors import ConfigError

# A file of this project has some kilobytes. PyYAML takes ten seconds for a megabyte.
_MOST_BYTES = 1 << 20
# What a document may have, with each alias counted as a copy of what it stands for.
_MOST_VALUES = 50_000
_TOO_DEEP = "lists and mappings are nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """Return a JSON document; raises ValueError, also where it is nested too deeply.

    json.loads() raises RecursionError for that, which callers that expect invalid JSON don't catch.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def read_yaml_file(path: Path) -> Any:
    """Return the document of a YAML file; raises OSError, and ConfigError with the file's name.

    ConfigError is raised for what isn't a regular file, and as parse_yaml() raises yaml.YAMLError.
    """
    if path.exists() and not path.is_file():  # Opening a FIFO would wait without end.
        raise ConfigError(f"{path} is not a regular file: remove it")
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ConfigError(f"{path} has {size:,} bytes, and {_MOST_BYTES:,} are allowed: shorten it")
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as err:
        raise ConfigError(
            f"{path} is not text in UTF-8 (byte {err.start}): check the path"
        ) from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{path} is not valid YAML: {err}") from err


def parse_yaml(text: str) -> Any:
    """Return the document of a YAML text; raises yaml.YAMLError.

    It is raised for duplicate keys, of which YAML itself would take the last one, too; also where
    values are nested too deeply, or aliases and merge keys stand for too many values. It says in
    one line what is wrong where, without the file's text, which may have a secret.
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
    except RecursionError:
        raise yaml.YAMLError(_TOO_DEEP) from None


def _read_document(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
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

    if size_of(document) > _MOST_VALUES:
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
            if (before := first.get(name)) is not None:
                where = f"lines {before} and {line}" if before != line else f"line {line} twice"
                yield f"{place_of(place)} is on {where}"
            first.setdefault(name, line)
            yield from _written_twice(value, place, seen)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _written_twice(value, (*loc, number), seen)

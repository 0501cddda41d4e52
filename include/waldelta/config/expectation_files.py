"""The engineer's own expectations: one YAML file per table in the folder ``quality.suites``.

::

    # expectations/flights/public.flights.yml
    # (or flights.yml, while one schema has such a table)
    expectations:
      - type: expect_column_values_to_be_between
        kwargs: {column: dep_delay, min_value: -120, max_value: 2000}
        severity: warning          # critical (default) fails the run, warning is only reported
        gate: warn                 # warn (default): judged after the merge;
                                   # stop, quarantine: before it as well (gate.py)
        notes: longest delay ever seen is 1301 minutes

Reading a file checks its shape; names and arguments are checked by Great Expectations when the
suite is built.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from waldelta.config.parse_text import StrictModel, problems, read_yaml_file
from waldelta.config.regex_cost import patterns_in, why_slow
from waldelta.config.source import split_table_name
from waldelta.errors import ConfigError

Severity = Literal["critical", "warning"]
Gate = Literal["warn", "quarantine", "stop"]
_PATTERNS = frozenset({"regex", "regex_list"})
# Arguments in Spark SQL; those of queries end with "_query".
_CONDITIONS = frozenset({"condition", "row_condition", "pass_through_filter"})
_SYNCED = "that has been synced"
_SUFFIXES = (".yml", ".yaml")
# A file with one of these suffixes, in any case, was meant to be read as well.
_MEANT = (*_SUFFIXES, ".json")


def is_condition(argument: str) -> bool:
    """Returns whether an argument of an expectation is a condition or a query.

    >>> is_condition("row_condition"), is_condition("unexpected_rows_query"), is_condition("regex")
    (True, True, False)
    """
    return argument in _CONDITIONS or argument.endswith("_query")


def is_sql(argument: str, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a condition is Spark SQL, and not Great Expectations' own notation."""
    return argument != "row_condition" or kwargs.get("condition_parser", "spark") == "spark"


class OwnExpectation(StrictModel):
    """One expectation by its Great Expectations name, with its arguments."""

    type: str = Field(
        min_length=1,
        description="expect_column_values_to_be_between, or ExpectColumnValuesToBeBetween",
    )
    kwargs: dict[str, Any] = Field({})
    severity: Severity = "critical"
    gate: Gate = Field(
        "warn",
        description="what to do with a batch that fails; quarantine and stop act before the merge",
    )
    notes: str | None = None

    @field_validator("kwargs")
    @classmethod
    def _bounded_arguments(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Refuse regular expressions for which Java may need exponential time.

        Null is removed from ``value_set``: with it, Spark treats no other value as outside the set,
        and the expectation would never fail.
        """
        for name, value in kwargs.items():
            texts = value if isinstance(value, list) else [value]
            if is_condition(name):
                texts = patterns_in(value) if isinstance(value, str) else []
            elif name not in _PATTERNS:
                continue
            for pattern in texts:
                if isinstance(pattern, str) and (why := why_slow(pattern)) is not None:
                    raise ValueError(
                        f"{name} {pattern!r} may take exponential time, since it has {why}: write"
                        " which characters end a repetition"
                    )
        values = kwargs.get("value_set")
        if not isinstance(values, (list, tuple, set)) or None not in values:
            return kwargs
        return kwargs | {"value_set": [value for value in values if value is not None]}

    @property
    def meaning(self) -> str:
        """Returns the expectation's name: its notes, else its type and columns.

        >>> kwargs = {"column_A": "a", "column_B": "b", "column_index": 1}
        >>> OwnExpectation(type="expect_x", kwargs=kwargs).meaning
        'expect_x on a, b'
        """
        if self.notes:
            return self.notes
        values = [value for name, value in self.kwargs.items() if name.startswith("column")]
        lists = [value if isinstance(value, list) else [value] for value in values]
        columns = [column for names in lists for column in names if isinstance(column, str)]
        return f"{self.type} on {', '.join(columns)}" if columns else self.type


class OwnSuite(StrictModel):
    """One table's own expectations, as their file lists them."""

    expectations: tuple[OwnExpectation, ...] = Field(min_length=1)


@dataclass(frozen=True)
class OwnSuiteFile:
    """A suite and its file, so that problems found later can name their place.

    ``lines`` are the lines of the expectations, none where they come from no file.
    """

    path: Path
    suite: OwnSuite
    lines: Sequence[int] = ()

    def place(self, number: int, folder: Path | None = None) -> str:
        """Returns the file, relative to ``folder``, line and number of an expectation (from 0)."""
        path = self.path if folder is None else os.path.relpath(self.path, folder)
        line = f":{self.lines[number]}" if self.lines else ""
        return f"{path}{line}: expectations[{number}]"

    def meaning(self, number: int) -> str:
        """Returns the expectation's name, unique in its file, which identifies its results."""
        meaning = self.suite.expectations[number].meaning
        is_alone = self._meanings[meaning] == 1
        return meaning if is_alone else f"{meaning} (expectations[{number}])"

    @cached_property
    def _meanings(self) -> Counter[str]:
        return Counter(item.meaning for item in self.suite.expectations)


@dataclass(frozen=True, slots=True)
class TargetColumns:
    """What own expectations of a target may name: its columns, with Spark types.

    ``unpublished`` are columns that only the source has.
    """

    types: Mapping[str, str]
    has_key: bool
    unpublished: Collection[str] = ()

    def type_of(self, name: str) -> str | None:
        """Returns a column's Spark type, in whatever case it is written; None for no column."""
        exact = self.types.get(name)
        lower = name.lower()
        return exact or next((t for c, t in self.types.items() if c.lower() == lower), None)


@dataclass(frozen=True, slots=True)
class OwnSuites:
    """The suites of tables, the errors of rejected ones, and messages about files without a
    table.
    """

    by_table: Mapping[str, OwnSuiteFile] = field(default_factory=dict)
    refused: Mapping[str, ConfigError] = field(default_factory=dict)
    unused: Sequence[str] = ()

    def digest_of(self, table: str) -> str:
        """Returns a digest of a table's own expectations, or of the error that rejects them."""
        file = self.by_table.get(table)
        text = str(self.refused.get(table, "")) if file is None else file.suite.model_dump_json()
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_own_suites(folder: Path | None, tables: Iterable[str], which: str = _SYNCED) -> OwnSuites:
    """Read the suites of these tables; raises ConfigError when there is no folder.

    ``which`` describes the tables in messages about files without a table. A rejected file affects
    only its own table.
    """
    if folder is None:
        return OwnSuites()
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder} for own expectations (quality.suites): create it"
        )
    return assign_suites(read_each(folder), tables, which)


def has_suites(folder: str | None) -> bool:
    """Returns whether a folder has files of own expectations."""
    return folder is not None and any(path.suffix in _SUFFIXES for path in Path(folder).glob("*"))


def read_each(folder: Path) -> dict[Path, OwnSuiteFile | ConfigError]:
    """Returns each file of a folder, or the error that rejects it."""
    files: dict[Path, OwnSuiteFile | ConfigError] = {}
    for path in sorted(p for p in folder.glob("*") if p.suffix.lower() in _MEANT):
        try:
            if path.suffix not in _SUFFIXES:
                raise ConfigError(f"{path}: isn't read: rename it {path.stem}.yml")
            files[path] = _read_suite(path)
        except ConfigError as err:
            files[path] = err
    return files


def assign_suites(
    files: Mapping[Path, OwnSuiteFile | ConfigError], tables: Iterable[str], which: str = _SYNCED
) -> OwnSuites:
    """Assign each table its suite, or the error that rejects it.

    A file's stem is ``schema.table`` or, where only one schema has it, the table's name alone.
    """
    parts_of = {name: split_table_name(name) for name in tables}
    fitting: dict[str, list[Path]] = {}
    refused: dict[str, ConfigError] = {}
    unused: list[str] = []
    for path, file in files.items():
        matches = [name for name, parts in parts_of.items() if path.stem in (name, ".".join(parts))]
        matches = matches or [name for name, parts in parts_of.items() if path.stem == parts[1]]
        if not matches:
            detail = f": {file}" if isinstance(file, ConfigError) else ""
            near = get_close_matches(path.stem, {".".join(parts) for parts in parts_of.values()}, 1)
            detail += f": did you mean {near[0]}{path.suffix}?" if near else ""
            unused.append(f"{path} fits no table {which}{detail}")
        elif len(matches) > 1:
            several = f"{path} fits {' and '.join(sorted(matches))}: name it schema.table.yml"
            refused |= dict.fromkeys(matches, ConfigError(several))
        else:
            fitting.setdefault(matches[0], []).append(path)
    for name, paths in fitting.items():
        if len(paths) > 1:
            several = f"{' and '.join(map(str, paths))} both hold the suite of {name}: merge them"
            refused.setdefault(name, ConfigError(several))
        elif isinstance(file := files[paths[0]], ConfigError):
            refused.setdefault(name, file)
    by_table = {
        name: file
        for name, (path, *_) in fitting.items()
        if isinstance(file := files[path], OwnSuiteFile)
    }
    return OwnSuites(
        {name: file for name, file in by_table.items() if name not in refused}, refused, unused
    )


def _read_suite(path: Path) -> OwnSuiteFile:
    lines: list[int] = []
    try:
        document = read_yaml_file(path, lines)
    except OSError as err:
        raise ConfigError(f"{path}: can't be read ({err.strerror}): check the file") from err
    try:
        suite = OwnSuite.model_validate(document if document is not None else {})
    except ValidationError as err:
        listed = "; ".join(_with_line(problem, lines) for problem in problems(err, OwnSuite))
        raise ConfigError(f"{path}: {listed}") from err
    return OwnSuiteFile(path, suite, lines)


def _with_line(problem: str, lines: Sequence[int]) -> str:
    """Returns a problem with its line, where it is about an expectation."""
    place = re.match(r"expectations\[(\d+)\]", problem)
    return problem if place is None else f"line {lines[int(place[1])]}: {problem}"

"""The engineer's own expectations: one YAML file per table in ``include/expectations/<pipeline>/``.

::

    # include/expectations/flights/public.flights.yml   (or flights.yml, while one schema has such a table)
    expectations:
      - type: expect_column_values_to_be_between
        kwargs: {column: dep_delay, min_value: -120, max_value: 2000}
        severity: warning          # critical (default) fails the run, warning is only reported
        gate: warn                 # warn (default): judged after the merge; stop, quarantine: before it as well (gate.py)
        notes: longest delay ever seen is 1301 minutes

Reading a file checks its shape; names and arguments are checked by Great Expectations when the suite is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from waldelta.errors import ConfigError
from waldelta.pipeline_file import split_table_name

Severity = Literal["critical", "warning"]
Gate = Literal["warn", "quarantine", "stop"]
_SUFFIXES = (".yml", ".yaml")


class OwnExpectation(BaseModel):
    """One expectation by Great Expectations' name for it, with its arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str = Field(min_length=1, description="expect_column_values_to_be_between, or ExpectColumnValuesToBeBetween")
    kwargs: dict[str, Any] = {}
    severity: Severity = "critical"
    gate: Gate = Field(
        "warn", description="what to do with a batch that fails; quarantine and stop act before the merge"
    )
    notes: str | None = None


class OwnSuite(BaseModel):
    """The content of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    expectations: tuple[OwnExpectation, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class OwnSuiteFile:
    """A suite and the file it came from, so that problems found later can name their place."""

    path: Path
    suite: OwnSuite

    def place(self, number: int) -> str:
        """Where expectation ``number`` (from 0) stands."""
        return f"{self.path}: expectations[{number}]"


def read_own_suites(folder: Path | None) -> dict[str, OwnSuiteFile]:
    """Read all suites of a folder by file stem; raises ConfigError that lists every problem with its place."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} for own expectations (quality.suites): create it")
    found: dict[str, OwnSuiteFile] = {}
    problems: list[str] = []
    for path, file in read_each(folder).items():
        if isinstance(file, ConfigError):
            problems.append(str(file))
        else:
            found[path.stem] = file
    if problems:
        raise ConfigError("expectation files are refused:\n" + "\n".join(f"  - {p}" for p in problems))
    return found


def read_each(folder: Path) -> dict[Path, OwnSuiteFile | ConfigError]:
    """Each file of a folder, or why it is refused."""
    found: dict[Path, OwnSuiteFile | ConfigError] = {}
    stems: dict[str, Path] = {}
    for path in sorted(p for p in folder.glob("*") if p.suffix in _SUFFIXES):
        first = stems.setdefault(path.stem, path)
        if first != path:
            found[path] = ConfigError(f"{path}: a second file for the same table: merge it into {first.name}")
            continue
        try:
            found[path] = OwnSuiteFile(path, _read_suite(path))
        except ConfigError as err:
            found[path] = err
    return found


def assign_suites(
    suites: Mapping[str, OwnSuiteFile], tables: Iterable[str]
) -> tuple[dict[str, OwnSuiteFile], list[str]]:
    """Give each table its suite; the second value names the files that fit no table.

    A stem is ``schema.table`` or, where only one schema has it, the table's name alone.
    """
    known = {name: split_table_name(name) for name in tables}
    assigned: dict[str, OwnSuiteFile] = {}
    unused: list[str] = []
    for stem, suite in suites.items():
        matches = [name for name, parts in known.items() if stem in (name, ".".join(parts))]
        matches = matches or [name for name, parts in known.items() if stem == parts[1]]
        if len(matches) > 1:
            raise ConfigError(f"{suite.path} fits {' and '.join(sorted(matches))}: name it schema.table.yml")
        if not matches:
            unused.append(f"{suite.path} fits no table that has been synced")
        elif matches[0] in assigned:
            first = assigned[matches[0]].path
            raise ConfigError(f"{first} and {suite.path} both hold the suite of {matches[0]}: merge them")
        else:
            assigned[matches[0]] = suite
    return assigned, unused


def _read_suite(path: Path) -> OwnSuite:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: can't be read ({err}): check the file") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{path}: not valid YAML: {err}") from err
    try:
        return OwnSuite.model_validate(document if document is not None else {})
    except ValidationError as err:
        lines = "; ".join(f"{_place(e['loc'])}: {_remedy(dict(e))}" for e in err.errors())
        raise ConfigError(f"{path}: {lines}") from err


def _place(loc: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".") or "(top level)"


def _remedy(error: dict[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key: use type, kwargs, severity, gate, notes" if len(error["loc"]) > 1 else "unknown key"
    if error["type"] == "missing":
        return "missing: add it"
    return str(error["msg"])

"""Chooses tables of an inventory by the names that a user gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from waldelta.errors import ConfigError
from waldelta.postgres import TableId
from waldelta.quantities import first_of
from waldelta.stages.setup.draft import FoundTable, Inventory

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def choose_named(inventory: Inventory, names: Iterable[str]) -> list[FoundTable]:
    """Returns these tables; raises ConfigError for a name that isn't a table to replicate."""
    return [_table(inventory, name) for name in names]


def choose_schemas(inventory: Inventory, names: Iterable[str]) -> list[FoundTable]:
    """Returns the tables of these schemas; raises ConfigError for one without any."""
    chosen = []
    for name in map(_unquoted, names):
        found = [table for table in inventory.tables if table.id.schema == name]
        if not found:
            raise ConfigError(
                f"schema {name!r} has no table that can be replicated; schemas with some:"
                f" {first_of(inventory.schemas)}"
            )
        chosen += found
    return chosen


def choose_answered(inventory: Inventory, answers: Iterable[str]) -> list[FoundTable]:
    """Returns the tables of an answer: numbers in the list (``1``, ``3-5``), tables and schemas."""
    chosen = [table for answer in answers for table in _answered(inventory, answer)]
    return sorted(dict.fromkeys(chosen), key=lambda table: table.id)


def _answered(inventory: Inventory, answer: str) -> Iterator[FoundTable]:
    if answer == "all":
        yield from inventory.tables
    elif found := _RANGE.fullmatch(answer):
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last <= len(inventory.tables):
            raise ConfigError(f"the list has numbers 1 to {len(inventory.tables)}, not {answer}")
        yield from inventory.tables[first - 1 : last]
    elif _unquoted(answer) in inventory.schemas:
        yield from choose_schemas(inventory, [answer])
    else:
        yield _table(inventory, answer)


def _table(inventory: Inventory, name: str) -> FoundTable:
    try:
        wanted = TableId.parse(name)
    except ValueError as err:
        raise ConfigError(str(err)) from None
    for table in inventory.tables:
        if table.id == wanted:
            return table
    for other in inventory.excluded:
        if other.id == wanted:
            raise ConfigError(f"{wanted} can't be replicated: {other.reason}")
    for table in inventory.tables:
        if wanted in (leaf.id for leaf in table.leaves):
            raise ConfigError(f"{wanted} is a partition: name its root, {table.id}")
    near = get_close_matches(str(wanted), [str(table.id) for table in inventory.tables], 1)
    hint = f"did you mean {near[0]}?" if near else "check schema and spelling"
    raise ConfigError(f"there is no table {wanted} in database {inventory.database!r}: {hint}")


def _unquoted(name: str) -> str:
    is_quoted = len(name) > 1 and name.startswith('"') and name.endswith('"')
    return name[1:-1].replace('""', '"') if is_quoted else name

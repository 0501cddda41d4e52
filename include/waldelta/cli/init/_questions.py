"""The questions of init, each with a default that Enter takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from waldelta.cli.init._selection import choose_answered
from waldelta.cli.init.options import split_names
from waldelta.errors import ConfigError
from waldelta.stages.setup.draft import Draft, Inventory
from waldelta.stages.setup.draft.notes import facts_of, notes_of

_Answer = TypeVar("_Answer")


def ask(draft: Draft) -> Draft:
    """Return the draft with the user's answers; raises ConfigError at the end of the input."""
    inventory = draft.inventory
    sys.stdout.write(table_list(inventory))
    tables = _prompt(
        "Tables (numbers, names or schemas, separated by commas)",
        "all",
        lambda answer: choose_answered(inventory, split_names(answer)),
    )
    draft = replace(draft, tables=tuple(tables))
    draft = _prompt(
        "Pipeline name", draft.pipeline, lambda name: _fit(replace(draft, pipeline=name))
    )
    draft = _prompt("Root of the lake", draft.root, lambda root: _fit(replace(draft, root=root)))
    return _prompt(
        "Schedule (cron, UTC)",
        draft.schedule,
        lambda schedule: _fit(replace(draft, schedule=schedule)),
    )


def table_list(inventory: Inventory) -> str:
    """Return the tables by number, each with what the file will say about it."""
    lines = []
    for number, table in enumerate(inventory.tables, 1):
        lines.append(f"{number:>4}  {table.id}: {facts_of(table)}")
        lines += [f"      {note}" for note in notes_of(table)]
    lines += [f"   -  {table.id}: left out: {table.reason}" for table in inventory.excluded]
    return "\n".join([*lines, ""])


def _fit(draft: Draft) -> Draft:
    """Return a draft that the product reads; raises ConfigError for another one."""
    draft.load()
    return draft


def _prompt(question: str, default: str, read: Callable[[str], _Answer]) -> _Answer:
    while True:
        try:
            answer = input(f"{question} [{default}]: ").strip()
        except EOFError:
            raise ConfigError(
                "the input ended before all questions were answered: choose with --tables or"
                " --schema, or take the defaults with --yes"
            ) from None
        try:
            found = read(answer or default)
            if found:
                return found
        except ConfigError as err:
            sys.stdout.write(f"{err}\n")

"""An operator's decision on what waits: the actions, what each takes, and a request for one.

The command ``decide``, the params of the ``_decide`` DAG and the pages' forms use these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from waldelta.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Action:
    """What an action ``does``, for helps and forms, and whether it takes ids, tables or both."""

    does: str
    takes: tuple[str, ...] = ("ids", "tables")
    needs_reason: bool = True


ACTIONS: Final[Mapping[str, Action]] = MappingProxyType(
    {
        "retry": Action(
            "read the rows of tables from the source again, and keep out what fails a gate",
            ("tables",),
            needs_reason=False,
        ),
        "accept": Action(
            "read rows from the source again and write them, even if they fail their gate, or"
            " agree to external commits"
        ),
        "discard": Action(
            "leave rows out of their targets, or close skipped messages",
        ),
        "release": Action(
            "apply the landed changes of tables, although a gate stopped these tables", ("tables",)
        ),
        "agree": Action("follow changes of source tables that wait (schema_changes: ask)"),
        "refuse": Action(
            "keep dropped or retyped columns with their last values, or a table as it is instead of"
            " a new copy"
        ),
        "skip": Action("let runs go on without messages that can't be read", ("ids",)),
    }
)


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """One action on what has these ids, or on all of these tables; ``by`` is the operator, None
    for the user of this process.
    """

    action: str
    ids: Collection[str] = ()
    tables: Collection[str] | None = None
    reason: str | None = None
    by: str | None = None

    def check(self) -> None:
        """Raise ConfigError for what no run can carry out."""
        action = ACTIONS[self.action]
        given = {"ids": self.ids, "tables": self.tables}
        if unused := [name for name in given if given[name] and name not in action.takes]:
            raise ConfigError(f"{self.action} takes {action.takes[0]}, not {unused[0]}")
        if action.needs_reason and not any(given.values()):
            raise ConfigError(
                f"nothing is named to {self.action}: name {' or '.join(action.takes)}"
            )
        if action.needs_reason and not (self.reason or "").strip():
            raise ConfigError(f"{self.action} needs a reason, which the ledger keeps")

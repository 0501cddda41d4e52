"""What follows a run's commits: asset events, lineage, metrics and the registration in a catalog
read here what a run did to its targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ROWS = ("inserted", "updated", "deleted")


@dataclass(frozen=True, slots=True)
class TargetCommit:
    """What a run did to one target; ``counts`` is its part of the run's result.

    ``is_fine``: the target has all changes of the run, and met its critical expectations.
    """

    table: str
    counts: Mapping[str, Any]
    is_fine: bool

    @property
    def rows(self) -> int:
        """Returns the number of rows that were copied, or else written or removed."""
        return self.count("rows") or sum(map(self.count, _ROWS))

    def count(self, name: str) -> int:
        """Returns a count by its name in the result; 0 where the run has none."""
        return int(self.counts.get(name) or 0)


def targets_of(document: Mapping[str, Any]) -> list[TargetCommit]:
    """Returns the targets that a run worked on, in the order of their names.

    A run also reports commits that an earlier run was killed after.
    """
    passed, behind = (document.get(key) or () for key in ("passed", "not_applied"))
    return [
        TargetCommit(table, counts, table in passed and table not in behind)
        for table, counts in sorted((document.get("tables") or {}).items())
    ]


def commits_of(document: Mapping[str, Any]) -> list[TargetCommit]:
    """Returns the targets that a run changed, in the order of their names.

    A copy counts even if it has no rows, because its target exists from then on.
    """
    return [
        commit
        for commit in targets_of(document)
        if commit.counts.get("rows") is not None or any(map(commit.count, (*_ROWS, "truncated")))
    ]

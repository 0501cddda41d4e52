"""What follows a run's commits: asset events and lineage read here which targets a run changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ROWS = ("inserted", "updated", "deleted")


@dataclass(frozen=True, slots=True)
class TargetCommit:
    """What a run's commits did to one target; ``counts`` is its part of the run's result.

    ``is_fine``: the target has all changes of the run, and met its critical expectations.
    """

    table: str
    counts: Mapping[str, Any]
    is_fine: bool

    @property
    def rows(self) -> int:
        """Returns the number of rows that were copied, or else written or removed."""
        copied = self.counts.get("rows")
        return sum(self.counts.get(of) or 0 for of in _ROWS) if copied is None else copied


def commits_of(document: Mapping[str, Any]) -> list[TargetCommit]:
    """Returns the targets that a run changed, in the order of their names.

    A run also reports commits that an earlier run was killed after. A copy counts even if it has no
    rows, because its target exists from then on.
    """
    passed, behind = (document.get(key) or () for key in ("passed", "not_applied"))
    return [
        TargetCommit(table, counts, table in passed and table not in behind)
        for table, counts in sorted((document.get("tables") or {}).items())
        if counts.get("rows") is not None
        or counts.get("truncated")
        or any(counts.get(of) for of in _ROWS)
    ]

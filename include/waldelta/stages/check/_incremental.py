"""What earlier checks established about a target: whether it changed since a full check, and from
which position on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from waldelta.lake.ledger import BatchCut, TableState
from waldelta.lake.ledger.check_records import PassedSuite
from waldelta.metadata_columns import LSN
from waldelta.stages.check.suite import Outcome, SuitePlan
from waldelta.stages.check.suite.kinds import depends_on
from waldelta.stages.check.suite.target_facts import CheckedTarget

# These depend on more than the target's rows, and an unchanged target is judged again by them.
_NOT_OF_ROWS = ("earlier runs", "other data")
# While an expectation fails, no new result is stored, and each check reads all commits since the
# last stored one. After more commits than this, all rows are judged.
MOST_COMMITS = 200


@dataclass(frozen=True, slots=True)
class Known:
    """What earlier checks established: the latest stored results of each target, and the newest
    consistent cut.
    """

    judged: Mapping[str, Sequence[PassedSuite]] = field(default_factory=dict)
    cut: BatchCut | None = None

    def end_of(self, state: TableState, version: int) -> int | None:
        """Returns the position up to which a version contains exactly all changes.

        Returns None for versions that don't belong to the newest cut.
        """
        if self.cut is None or (target := self.cut.of(state)) is None:
            return None
        return self.cut.end_lsn if target.version == version else None


def suite_of(plan: SuitePlan) -> str:
    """Returns a digest of the expectations that depend only on the target's rows."""
    parts = [
        [p.type, p.kwargs, p.severity]
        for p in plan.expectations
        if depends_on(p) not in _NOT_OF_ROWS
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def are_met(outcomes: Sequence[Outcome]) -> bool:
    """Returns whether all outcomes that depend on the target's rows are successful."""
    return all(o.success for o in outcomes if depends_on(o.planned) not in _NOT_OF_ROWS)


def rest_of(plan: SuitePlan) -> SuitePlan:
    """Returns the part of a plan that a target needs when it is unchanged since a full check."""
    rest = (p for p in plan.expectations if depends_on(p) == "other data")
    return replace(plan, expectations=tuple(rest))


def is_unchanged_since_full_check(known: Known, target: CheckedTarget, plan: SuitePlan) -> bool:
    """Returns whether a full check found a version's rows to meet the whole suite."""
    found = next((row for row in known.judged.get(target.state.table_name, ()) if row.whole), None)
    if found is None or plan.refused is not None or not _fits(found, target, plan):
        return False
    # Own expectations may also depend on the current date or on other tables.
    if any(depends_on(planned) == "anything" for planned in plan.expectations):
        return False
    first, last = sorted((found.version, target.version))
    return first == last or target.table.log.same_rows_as(first) >= last


def changed_since(
    known: Known, target: CheckedTarget, plan: SuitePlan, columns: Sequence[str]
) -> int | None:
    """Returns the position from which rows have changed since all of them met the suite.

    Returns None where that is unknown. Only applied changes may lie between the two versions,
    because their rows carry their position. Rows that were copied, repaired or written by an
    external writer carry an older position, or none.
    """
    found = next(iter(reversed(known.judged.get(target.state.table_name, ()))), None)
    if found is None or found.end_lsn is None or not _fits(found, target, plan):
        return None
    if (
        LSN not in columns
        or target.state.kept_as.keeps_rows
        or target.version - found.version > MOST_COMMITS
    ):
        return None
    seen = found.version
    for commit in target.table.log.behind(found.version):
        if commit.version > target.version:
            break
        # The verb comes first because a large commit has a line for each file.
        if commit.metadata.get("verb") != "apply" and commit.changes_data:
            return None
        seen = commit.version
    return found.end_lsn if seen == target.version else None


def met_at(known: Known, target: CheckedTarget, plan: SuitePlan) -> int | None:
    """Returns the latest version up to this one whose rows are all known to meet the suite, or
    None.
    """
    found = next(iter(reversed(known.judged.get(target.state.table_name, ()))), None)
    return (
        found.version
        if found is not None and found.version <= target.version and _fits(found, target, plan)
        else None
    )


def _fits(found: PassedSuite, target: CheckedTarget, plan: SuitePlan) -> bool:
    return (found.generation, found.suite) == (target.state.generation, suite_of(plan))

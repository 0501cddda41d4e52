"""What earlier checks established about a target: whether it changed since a full check, and from
which position on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from waldelta.lake import DeltaLog
from waldelta.lake.ledger import BatchCut, TableState
from waldelta.lake.ledger.expectation_results import CAN_BE_JUDGED, ON_OTHERS
from waldelta.lake.ledger.passed_suites import PassedSuite
from waldelta.metadata_columns import LSN
from waldelta.stages.check.measure.row_conditions import is_of_row_alone, snake
from waldelta.stages.check.suite import Outcome, PlannedExpectation, SuitePlan
from waldelta.stages.check.suite.plan import AS_BEFORE

# These depend on more than the target's rows; each check judges them again.
_NOT_OF_ROWS = (*ON_OTHERS, AS_BEFORE, CAN_BE_JUDGED)
# Kinds of Great Expectations that judge only the target's rows, together or one by one.
_OF_ROWS = (
    "expect_column_",
    "expect_compound_columns_",
    "expect_multicolumn_",
    "expect_select_column_",
    "expect_table_column",
    "expect_table_row_count_to_be_between",
    "expect_table_row_count_to_equal",
)
# This kind also has one of the prefixes above, but depends on another table.
_OF_OTHERS = "expect_table_row_count_to_equal_other_table"

# While an expectation fails, no new result is stored, and each check reads all commits since the
# last stored one. After more commits than this, all rows are judged.
MOST_COMMITS = 200


@dataclass(frozen=True, slots=True)
class At:
    """A target's state at one version."""

    state: TableState
    version: int


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
        for target in self.cut.targets if self.cut is not None else ():
            if (target.table_name, target.generation, target.version) == (
                state.table_name,
                state.generation,
                version,
            ):
                return self.cut.end_lsn if self.cut is not None else None
        return None


def suite_of(plan: SuitePlan) -> str:
    """Returns a digest of the expectations that depend only on the target's rows."""
    parts = [
        [p.type, p.kwargs, p.severity] for p in plan.expectations if p.type not in _NOT_OF_ROWS
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def are_met(outcomes: Sequence[Outcome]) -> bool:
    """Returns whether all outcomes that depend on the target's rows are successful."""
    return all(o.success for o in outcomes if o.planned.type not in (*ON_OTHERS, AS_BEFORE))


def rest_of(plan: SuitePlan) -> SuitePlan:
    """Returns the part of a plan that a target needs when it is unchanged since a full check."""
    return replace(plan, expectations=tuple(p for p in plan.expectations if p.type in ON_OTHERS))


def is_unchanged_since_full_check(known: Known, at: At, plan: SuitePlan, log: DeltaLog) -> bool:
    """Returns whether a full check found a version's rows to meet the whole suite."""
    found = next((row for row in known.judged.get(at.state.table_name, ()) if row.whole), None)
    if found is None or plan.refused is not None or not _fits(found, at, plan):
        return False
    if not all(_is_of_rows(planned) for planned in plan.expectations):
        return False
    first, last = sorted((found.version, at.version))
    return first == last or log.same_rows_as(first) >= last


def changed_since(
    known: Known, at: At, plan: SuitePlan, columns: Sequence[str], log: DeltaLog
) -> int | None:
    """Returns the position from which rows have changed since all of them met the suite.

    Returns None where that is unknown. Only applied changes may lie between the two versions,
    because their rows carry their position. Rows that were copied, repaired or written by an
    external writer carry an older position, or none.
    """
    found = next(iter(reversed(known.judged.get(at.state.table_name, ()))), None)
    if found is None or found.end_lsn is None or not _fits(found, at, plan):
        return None
    if (
        LSN not in columns
        or at.state.kept_as.keeps_rows
        or at.version - found.version > MOST_COMMITS
    ):
        return None
    seen = found.version
    for commit in log.behind(found.version):
        if commit.version > at.version:
            break
        # The verb comes first because a large commit has a line for each file.
        if commit.metadata.get("verb") != "apply" and commit.changes_data:
            return None
        seen = commit.version
    return found.end_lsn if seen == at.version else None


def met_at(known: Known, at: At, plan: SuitePlan) -> int | None:
    """Returns the latest version up to this one whose rows are all known to meet the suite, or
    None.
    """
    found = next(iter(reversed(known.judged.get(at.state.table_name, ()))), None)
    return (
        found.version
        if found is not None and found.version <= at.version and _fits(found, at, plan)
        else None
    )


def _is_of_rows(planned: PlannedExpectation) -> bool:
    """Returns whether an unchanged target keeps this result, apart from rest_of().

    Own expectations may also depend on the current date or on other tables.
    """
    kind, kwargs = snake(planned.type), planned.kwargs
    if planned.origin != "own" or is_of_row_alone(kind, kwargs):
        return True
    is_plain = "row_condition" not in kwargs and not any(
        isinstance(value, Mapping) for value in kwargs.values()
    )
    return is_plain and kind.startswith(_OF_ROWS) and kind != _OF_OTHERS


def _fits(found: PassedSuite, at: At, plan: SuitePlan) -> bool:
    return (found.generation, found.suite) == (at.state.generation, suite_of(plan))

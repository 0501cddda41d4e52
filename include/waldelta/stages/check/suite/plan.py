"""Plans which expectations a target must meet: derived from its ledger record, plus own ones.

Pure: the plan names Great Expectations' types and arguments; ``waldelta.stages.check.check`` runs
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from waldelta.config.expectation_files import OwnSuiteFile
from waldelta.errors import ConfigError
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import RAW
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kinds import KINDS, asks_for_nulls, with_raw
from waldelta.stages.check.suite.profile_drift import Before
from waldelta.stages.check.suite.target_facts import SourceRules, TargetFacts
from waldelta.types import stored_type


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """A target's expectations, the rules that could not be planned, and the error for refused own
    ones.
    """

    table: str
    expectations: tuple[PlannedExpectation, ...]
    omitted: tuple[str, ...] = ()
    refused: ConfigError | None = None


def plan_suite(
    state: TableState,
    held_columns: Sequence[str],
    own: OwnSuiteFile | None = None,
    sure: SourceRules | None = None,
    before: Before | None = None,
) -> SuitePlan:
    """Plan the suite of one target.

    ``held_columns`` are the columns its Delta table has now, which show whether ``_wd_raw`` exists.
    ``sure`` are the source's guarantees, ``before`` earlier measurements (None: not judged).
    """
    sure = sure or SourceRules()
    facts = TargetFacts(state, held_columns, sure, before, list(sure.omitted))
    planned = [one for kind in KINDS.values() for one in kind.plan(facts)]
    planned += _own(facts, own)
    return SuitePlan(state.table_name, tuple(planned), tuple(facts.omitted))


def _own(facts: TargetFacts, own: OwnSuiteFile | None) -> Iterator[PlannedExpectation]:
    if own is None:
        return
    types = {c.name: stored_type(c.type_name, c.spark_type) for c in facts.state.columns}
    raw = [name for name, kind in types.items() if kind.may_be_raw and RAW in facts.columns]
    # Expectations with a gate are included, because the gate never judged rows of a copy or
    # released rows.
    for number, item in enumerate(own.suite.expectations):
        meaning = own.meaning(number)
        kind, kwargs = with_raw(item.type, item.kwargs, raw, meaning)
        if kind == item.type and (column := asks_for_nulls(kind, kwargs, raw)) is not None:
            told = (
                f"values of {column} that only {RAW} has count as null: use no argument but mostly"
            )
            facts.omitted.append(f"{meaning}: {told}")
        yield PlannedExpectation(
            kind,
            kwargs,
            item.severity,
            "own",
            meaning,
            own.place(number),
            is_gate=item.gate != "warn",
        )

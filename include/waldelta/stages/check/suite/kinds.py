"""The registry of the kinds of expectations, and the plan of the suite that a target must meet.

To add a kind, add its class or its entry in ``row_kinds`` or ``target_kinds``, and name a class in
``KINDS``. A plan is derived from a target's ledger record, plus own expectations. It names Great
Expectations' types and arguments; ``waldelta.stages.check.check`` runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waldelta.config.expectation_files import OwnSuiteFile
from waldelta.errors import ConfigError
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import RAW
from waldelta.stages.check.measure.profile import Before
from waldelta.stages.check.suite._row_rules import ROWS_SATISFY
from waldelta.stages.check.suite.expectation import (
    DependsOn,
    ExpectationKind,
    OtherKind,
    PlannedExpectation,
)
from waldelta.stages.check.suite.row_kinds import ROW_EXPECTATION_KINDS, are_common, column_name
from waldelta.stages.check.suite.target_facts import SourceRules, TargetFacts
from waldelta.stages.check.suite.target_kinds import (
    AllValuesKnown,
    AsBefore,
    ColumnsMatch,
    IsFresh,
    KeptRowsHold,
    KeyUnique,
    ReferencesHold,
)
from waldelta.types import stored_type

# By type. A suite lists its expectations in this order, of which ``PassedSuite`` has a digest.
KINDS: dict[str, ExpectationKind] = {
    kind.type: kind
    for kind in (
        ColumnsMatch(),
        KeyUnique(),
        KeptRowsHold(),
        *ROW_EXPECTATION_KINDS,
        ReferencesHold(),
        AllValuesKnown(),
        IsFresh(),
        AsBefore(),
    )
}


def kind_of(type_name: str) -> ExpectationKind:
    """Returns the kind of an expectation by its type or class.

    Kinds that aren't in the registry are Great Expectations' own.

    >>> kind_of("ExpectColumnMaxToBeBetween").type
    'expect_column_max_to_be_between'
    """
    name = type_name
    if name[:1].isupper():
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
    return KINDS.get(name) or OtherKind(name)


def depends_on(planned: PlannedExpectation) -> DependsOn:
    """Returns what decides the result of an expectation."""
    return kind_of(planned.type).depends_on(planned)


def asks_for_nulls(type_name: str, kwargs: Mapping[str, Any], raw: Iterable[str]) -> str | None:
    """Returns the column in ``raw`` for which an expectation judges nulls, or None.

    Values of the columns in ``raw`` may be stored in ``_wd_raw``.
    """
    # Spark matches column names case-insensitively, but not keys of a map.
    name = column_name(kwargs.get("column")).lower()
    return next((c for c in raw if kind_of(type_name).of_nulls and c.lower() == name), None)


def with_raw(
    type_name: str, kwargs: Mapping[str, Any], raw: Iterable[str], meaning: str
) -> tuple[str, dict[str, Any]]:
    """Returns an expectation's type and arguments that don't take a value in ``_wd_raw`` for null.

    They are unchanged where that makes no difference, and where an argument is known only to Great
    Expectations.

    >>> options = {"column": "d", "mostly": 0.5}
    >>> with_raw("expect_column_values_to_be_null", options, ["d"], "no d")[1]["condition"]
    "(`d` is null and not coalesce(map_contains_key(_wd_raw, 'd'), false))"
    """
    of_nulls, column = kind_of(type_name).of_nulls, asks_for_nulls(type_name, kwargs, raw)
    rest = {name: value for name, value in kwargs.items() if name != "column"}
    if of_nulls is None or column is None or not are_common(rest):
        return type_name, dict(kwargs)
    return ROWS_SATISFY, {"condition": of_nulls(column), "meaning": meaning, **rest}


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

"""Changes of a source table that an operator decides on first (``schema_changes: ask``).

A change that takes data from the target, or needs a new copy of it, waits in the change log. It is
recorded as a decision, and the run that follows an agreement goes on as ``evolve`` does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from waldelta.config.pipeline_file import SchemaRules
from waldelta.decision_kinds import COPY, DROPPED_COLUMN, RETYPED_COLUMN
from waldelta.errors import ConfigError, ConsentNeeded, Question, SchemaChanged, WaldeltaError
from waldelta.lake.ledger import (
    WAITING,
    ColumnState,
    Decision,
    Decisions,
    Ledger,
    TableState,
    now,
)
from waldelta.lake.ledger.decisions import AGREED, REFUSED
from waldelta.pipeline.drift.type_change import TypeChange
from waldelta.pipeline.job import Job
from waldelta.quantities import counted

log = logging.getLogger(__name__)

# An agreement to another kind permits no new copy.
_PERMITS_COPY = (RETYPED_COLUMN, COPY)


def schema_rules(job: Job, state: TableState) -> SchemaRules:
    """Returns a table's rules, with an operator's answers on this copy where these count."""
    rules = job.pipeline.target.schema_rules_of(state.table_name)
    if rules.policy != "ask":
        return rules
    rows = _answered_questions(job, state)
    may_copy = any(row.status == AGREED and row.kind in _PERMITS_COPY for row in rows)
    return replace(rules, answers={row.key: row.status for row in rows}, may_copy=may_copy)


def _answered_questions(job: Job, state: TableState) -> list[Decision]:
    """Returns the questions that an operator has answered, by time of the answer."""
    rows = Decisions(job.lake).questions([state.table_name])
    return [row for row in rows if row.status != WAITING and _concerns(row, state)]


def _concerns(question: Decision, state: TableState) -> bool:
    """Returns whether a question is on this copy, or on a column that it still has."""
    if question.kind == DROPPED_COLUMN:
        return question.key in {_dropped_column_key(state, column) for column in state.columns}
    return question.generation == state.generation


def _dropped_column_key(state: TableState, column: ColumnState) -> str:
    """Returns the key of a dropped column's question.

    It has no generation, because an answer still counts after a repair, which begins another one.
    """
    relation = state.relation_ids[0] if state.root_id is None else state.root_id
    return json.dumps({"dropped": column.name, "attnum": column.attnum, "relation": relation})


def columns_to_stop(
    rules: SchemaRules,
    state: TableState,
    dropped: Collection[str] = (),
    retyped: Mapping[str, TypeChange] = MappingProxyType({}),
) -> frozenset[str]:
    """Returns the target's columns that get no new values.

    Those are columns that are stopped already, and each of the ``dropped`` and ``retyped`` ones for
    which an operator refused the change; retyped ones only where they don't identify rows, which
    without a key all columns do. Raises ConsentNeeded where nobody has decided on one of
    them, and SchemaChanged where one was refused in a table without a key.
    """
    questions, identity = {}, state.key_columns or [column.name for column in state.columns]
    for column in state.columns:
        stays = f"{column.name} stays with its last values, and new rows have none"
        if column.stopped:
            continue
        if column.name in dropped:
            questions[column.name] = Question(
                DROPPED_COLUMN,
                _dropped_column_key(state, column),
                f"the source has dropped column {column.name}",
                f"the target loses its values in all rows, {state.rows:,} at the last copy",
                stays if state.key_columns else f"{_WAITS}, since all columns identify its rows",
                (column.name,),
            )
        elif column.name in retyped and column.name not in identity:
            key = {"retyped": column.name, "attnum": column.attnum, "generation": state.generation}
            questions[column.name] = Question(
                RETYPED_COLUMN,
                json.dumps(key),
                f"{retyped[column.name]}, and the source doesn't send the changed values",
                _copies(state),
                stays,
                (column.name,),
            )
    answers = _answers(rules, state, list(questions.values()))
    refused = [name for name, of in questions.items() if answers[of.key] == REFUSED]
    if refused and not state.key_columns:
        raise SchemaChanged(
            f"{state.table_name}: {', '.join(refused)} can't stay in the target, because"
            " the table has no key and its rows are identified by all columns: sync it again"
        )
    return frozenset(refused).union(column.name for column in state.columns if column.stopped)


_WAITS = "its changes wait until it is synced"


def _copies(state: TableState) -> str:
    stopped = [column.name for column in state.columns if column.stopped]
    without = f", without {', '.join(stopped)}" if stopped else ""
    return f"a new copy of {counted(state.rows, 'row')} replaces the target's rows{without}"


def check_may_copy(rules: SchemaRules, state: TableState, change: str) -> None:
    """Check that an operator has agreed to a new copy of a table, because of a change of it.

    Raises ConsentNeeded without a decision, SchemaChanged when the copy was refused.
    """
    if rules.may_copy:
        return
    # The same change after another copy asks for another decision.
    key = json.dumps({"copy": change, "generation": state.generation})
    _answers(rules, state, [Question(COPY, key, change, _copies(state), _WAITS)])
    raise SchemaChanged(
        f"{state.table_name}: {change}; an operator refused a new copy, and only that would be"
        " exact, so its changes wait in the change log: sync it when it may be copied (initial"
        f" sync with tables={state.table_name})"
    )


def _answers(
    rules: SchemaRules, state: TableState, questions: Sequence[Question]
) -> Mapping[str, str]:
    unanswered = [of for of in questions if of.key not in rules.answers]
    if unanswered:
        raise ConsentNeeded(state.table_name, unanswered)
    return rules.answers


def open_questions(ledger: Ledger) -> list[Decision]:
    """Returns the changes that wait for a decision, and answered ones that no run has followed yet;
    by table.

    A refused column is followed once it is stopped. A refused copy isn't one of these changes: its
    table fails until it is synced.
    """
    questions = Decisions(ledger.lake).questions()
    states = ledger.table_states() if questions else {}
    return [
        row
        for row in sorted(questions, key=lambda row: row.table_name)
        if (state := states.get(row.table_name)) is not None
        and _concerns(row, state)
        and (
            row.status != REFUSED
            or any(c.name in row.columns and not c.stopped for c in state.columns)
        )
    ]


def answer_questions(
    job: Job,
    answer: str,
    ids: Collection[str],
    tables: Collection[str] | None,
    by: str | None,
    reason: str | None,
) -> list[Decision]:
    """Record an operator's answer (AGREED, REFUSED) to schema changes that wait for it: to those
    with these ids, or without ids to all of these tables.

    Returns the recorded decisions. Raises ConfigError, and records nothing, if there is no such
    schema change, or if one of the ids doesn't wait.
    """
    questions = {row.id: row for row in open_questions(job.ledger)}
    selected_ids = set(ids) or {
        of.id for of in questions.values() if of.table_name in (tables or ())
    }
    if unknown := sorted(selected_ids - questions.keys()):
        raise ConfigError(
            f"no schema change with id {unknown[0]} waits for a decision: list what does with"
            " `waldelta decide FILE list`"
        )
    if not selected_ids:
        raise ConfigError(f"no schema change of {', '.join(tables or ())} waits for a decision")
    at = now()
    rows = [
        questions[of].decided(answer, job.run_id, at, by, reason) for of in sorted(selected_ids)
    ]
    Decisions(job.lake).add(rows)
    return rows


def may_resync(job: Job, state: TableState) -> bool:
    """Returns whether a run may copy this table again without a question, where only a copy makes
    the target exact.

    It may not while the target has columns that stay with their last values, because an operator
    refused to drop them: a copy would drop them, so the operator decides again.
    """
    target = job.pipeline.target
    if not target.recopies(state.table_name):
        return False
    if target.schema_rules_of(state.table_name).policy != "ask":
        return True
    for row in reversed(_answered_questions(job, state)):
        if row.kind != COPY and row.status == REFUSED:
            return False
        if row.kind in _PERMITS_COPY and row.status == AGREED:
            return True
    return not any(column.stopped for column in state.columns)


def record_questions(job: Job, state: TableState, questions: Sequence[Question]) -> None:
    """Record which changes wait for a decision, each once; an error of the lake is logged."""
    decisions = Decisions(job.lake)
    try:
        recorded_keys = {row.key for row in decisions.questions([state.table_name])}
        rows = [
            Decision(
                now(),
                job.run_id,
                WAITING,
                state.table_name,
                state.generation,
                0,  # A run that applies a batch again doesn't replace it.
                question.key,
                list(question.columns),
                reason=question.describe(),
                kind=question.kind,
            )
            for question in questions
            if question.key not in recorded_keys
        ]
        if rows:
            decisions.add(rows)
    except (WaldeltaError, OSError) as err:
        log.warning("table=%s what waits for consent can't be recorded: %s", state.table_name, err)

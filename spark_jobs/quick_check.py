"""Quick check: a planned suite without Great Expectations, where that can be: one query for all that judges rows by themselves.

Great Expectations costs half a second for each table, whatever its size, and seconds to be imported. Here the same is evaluated in
one aggregate, beside the question for duplicate keys; small targets are read by Arrow, without Spark, where only nulls and keys are
asked for. What isn't met, or isn't known here, is Great Expectations' to judge and to report, as is every table of a full check.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import functions as F

from spark_jobs.collapse import codes_of
from spark_jobs.expectation_suite import COLUMNS_MATCH, KEY_UNIQUE, PlannedExpectation, SuitePlan
from spark_jobs.row_conditions import RowCondition, row_condition
from spark_jobs.target_columns import column_differences, listed
from spark_jobs.verdict import Outcome
from waldelta.lake import SPARKS_TIMESTAMPS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pyspark.sql import DataFrame

    from spark_jobs.duplicate_keys import DuplicateKeys

log = logging.getLogger(__name__)

# Read here, beyond Spark: as small as targets that are merged without it (merge_here).
_MOST_ROWS = 100_000
_MOST_FILE_BYTES = 16 << 20
_NOT_NULL = "expect_column_values_to_not_be_null"


def quick_outcomes(
    frame: DataFrame, plan: SuitePlan, asked_ahead: Mapping[tuple[str, ...], Future[DuplicateKeys]]
) -> tuple[Outcome, ...] | None:
    """What each expectation found, when all are met; None when Great Expectations has to look."""
    conditions: dict[int, RowCondition] = {}
    for number, planned in enumerate(plan.expectations):
        if planned.type in (COLUMNS_MATCH, KEY_UNIQUE):
            continue
        condition = row_condition(planned.type, planned.kwargs)
        if condition is None:
            return None
        conditions[number] = condition
    if not _columns_match(frame, plan):
        return None
    try:
        if conditions and not _are_met(frame, conditions):
            return None
        if any(asked.result().rows for asked in asked_ahead.values()):
            return None
    except Exception as err:  # Great Expectations tells which one it is
        log.info("table=%s isn't checked quickly: %s", plan.table, type(err).__name__)
        return None
    return tuple(_met(planned) for planned in plan.expectations)


def outcomes_here(
    uri: str, version: int, plan: SuitePlan, storage_options: Mapping[str, str] | None = None
) -> tuple[Outcome, ...] | None:
    """The same of a small target, by Arrow; None also when Spark has to look."""
    if any(planned.type not in (COLUMNS_MATCH, KEY_UNIQUE, _NOT_NULL) for planned in plan.expectations):
        return None
    try:
        table = DeltaTable(uri, version=version, storage_options=dict(storage_options or {}) or None)
        rows = _read_small(table, plan)
    except (DeltaError, OSError, pa.ArrowException, KeyError) as err:
        log.info("table=%s isn't read here: %s", plan.table, type(err).__name__)
        return None
    if rows is None:
        return None
    for planned in plan.expectations:
        if planned.type == _NOT_NULL and rows[_unlisted(planned.kwargs["column"])].null_count:
            return None
        if planned.type == KEY_UNIQUE and _has_duplicates(rows, planned.kwargs["columns"]):
            return None
    return tuple(_met(planned) for planned in plan.expectations)


def _read_small(table: DeltaTable, plan: SuitePlan) -> pa.Table | None:
    files = pa.table(table.get_add_actions(flatten=True))
    sizes = files.select(["num_records", "size_bytes"])
    if len(sizes) and (
        sizes["num_records"].null_count
        or pc.sum(sizes["num_records"]).as_py() > _MOST_ROWS
        or pc.sum(sizes["size_bytes"]).as_py() > _MOST_FILE_BYTES
    ):
        return None
    held = {field.name: field.type for field in table.schema().fields}
    recorded = next((p.kwargs["columns"] for p in plan.expectations if p.type == COLUMNS_MATCH), None)
    if recorded is not None and column_differences(recorded, {listed(n): _spark_name(t) for n, t in held.items()}):
        return None
    wanted = {_unlisted(p.kwargs["column"]) for p in plan.expectations if p.type == _NOT_NULL}
    wanted |= {name for p in plan.expectations if p.type == KEY_UNIQUE for name in p.kwargs["columns"]}
    return table.to_pyarrow_dataset(parquet_read_options=SPARKS_TIMESTAMPS).to_table(columns=sorted(wanted))


def _spark_name(kind: object) -> str:
    """A Delta type as Spark's simpleString; of nested ones what is no type here, so that Spark looks."""
    name = getattr(kind, "type", None)
    names = {"integer": "int", "long": "bigint", "short": "smallint", "byte": "tinyint"}
    return names.get(name, name) if isinstance(name, str) and name not in ("array", "map", "struct") else "nested"


def _has_duplicates(rows: pa.Table, columns: Sequence[str]) -> bool:
    codes = codes_of([rows[name] for name in columns])
    return len(np.unique(codes)) < len(codes)


def _unlisted(column: str) -> str:
    return column[1:-1] if "." in column and column.startswith("`") and column.endswith("`") else column


def _columns_match(frame: DataFrame, plan: SuitePlan) -> bool:
    held = {listed(field.name): field.dataType.simpleString() for field in frame.schema.fields}
    recorded = [planned.kwargs["columns"] for planned in plan.expectations if planned.type == COLUMNS_MATCH]
    return not any(column_differences(columns, held) for columns in recorded)


def _are_met(frame: DataFrame, conditions: Mapping[int, RowCondition]) -> bool:
    asked = []
    for number, condition in conditions.items():
        asked.append(F.count(F.when(condition.unexpected, 1)).alias(f"f{number}"))
        if condition.mostly < 1:
            asked.append(F.count(F.when(condition.judged, 1)).alias(f"j{number}"))
    row = frame.agg(*asked).first()
    if row is None:
        return False
    found = row.asDict()
    return all(
        not found[f"f{n}"] or (c.mostly < 1 and found[f"j{n}"] - found[f"f{n}"] >= c.mostly * found[f"j{n}"])
        for n, c in conditions.items()
    )


def _met(planned: PlannedExpectation) -> Outcome:
    observed = {COLUMNS_MATCH: "as recorded", KEY_UNIQUE: "0 rows share their key"}.get(planned.type)
    return Outcome(
        planned, success=True, observed=observed, unexpected_count=None if planned.type == COLUMNS_MATCH else 0
    )

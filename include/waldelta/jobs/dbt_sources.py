"""dbt's ``sources.yml`` of a pipeline: its targets with their comments, tests and freshness.

A test is written for what a run judges as well: the key, columns that are NOT NULL, and own
expectations that dbt has a test of. See https://docs.getdbt.com/reference/source-properties.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from waldelta.config import split_table_name
from waldelta.config.expectation_files import OwnExpectation, read_own_suites
from waldelta.config.quality import Freshness
from waldelta.errors import StateError
from waldelta.lake.delta_statements import dbt_properties
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import COMMIT_TS
from waldelta.pipeline import Job
from waldelta.postgres.comments import Comments, read_comments

# dbt's generic tests, by the expectation that means the same.
_TESTS = {
    "expect_column_values_to_not_be_null": "not_null",
    "expect_column_values_to_be_unique": "unique",
    "expect_column_values_to_be_in_set": "accepted_values",
}


def dbt_sources(job: Job) -> str:
    """Returns the YAML; a source for each schema of the targets that have been copied.

    Raises StateError before the first copy.
    """
    states = {name: state for name, state in job.read_states().items() if state.columns}
    if not states:
        raise StateError("no table has been copied yet, so there is nothing to describe: run sync")
    pipeline = job.pipeline
    folder = pipeline.quality.suites
    suites = read_own_suites(Path(folder) if folder else None, states).by_table
    tables = {name: state.source_table or name for name, state in states.items()}
    with job.source.connect("dbt-sources") as connection:
        comments = read_comments(connection, tables)
    schemas: dict[str, list[dict[str, Any]]] = {}
    for name, state in sorted(states.items()):
        expectations = suites[name].suite.expectations if name in suites else ()
        schemas.setdefault(split_table_name(job.lake.stored_name(name))[0], []).append(
            _table(job, state, comments, expectations)
        )
    document = {
        "version": 2,
        "sources": [
            {
                "name": pipeline.pipeline if len(schemas) == 1 else f"{pipeline.pipeline}_{schema}",
                "schema": schema,
                "description": f"Replicated from PostgreSQL by pipeline {pipeline.pipeline}.",
                **_freshness(pipeline.quality.freshness, pipeline.target.metadata_columns),
                "tables": tables,
            }
            for schema, tables in schemas.items()
        ],
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def _table(
    job: Job, state: TableState, comments: Comments, expectations: Iterable[OwnExpectation]
) -> dict[str, Any]:
    tests = _tests(state, expectations)
    table: dict[str, Any] = {
        "name": split_table_name(job.lake.stored_name(state.table_name))[1],
        "description": comments.get((state.table_name, None), ""),
        "config": {"meta": dbt_properties(job.lake.target(state.table_name))},
        "columns": [
            {
                "name": column.name,
                "description": comments.get((state.table_name, column.name_on_source), ""),
                "data_type": column.spark_type,
                "data_tests": tests[column.name],
            }
            for column in state.columns
        ],
    }
    for part in (table, *table["columns"]):
        for key in ("description", "data_tests"):
            if not part.get(key, True):
                del part[key]
    return table


def _tests(state: TableState, expectations: Iterable[OwnExpectation]) -> dict[str, list[Any]]:
    """Returns dbt's tests by column; an expectation on a part of the rows has none."""
    tests: dict[str, list[Any]] = {column.name: [] for column in state.columns}
    for column in state.columns:
        if column.not_null or column.name in state.key_columns:
            tests[column.name].append("not_null")
    if len(state.key_columns) == 1:
        tests[state.key_columns[0]].append("unique")
    for item in expectations:
        test, kwargs = _TESTS.get(item.type), item.kwargs
        name, other_arguments = str(kwargs.get("column")), kwargs.keys() - {"column", "value_set"}
        if test is None or other_arguments or name not in tests:
            continue
        config = {"config": {"severity": "warn"}} if item.severity == "warning" else {}
        values = {"arguments": {"values": kwargs["value_set"]}} if "value_set" in kwargs else {}
        tests[name].append({test: values | config} if values or config else test)
    return {
        name: [test for n, test in enumerate(of) if test not in of[:n]]
        for name, of in tests.items()
    }


def _freshness(freshness: Freshness, has_commit_time: bool) -> dict[str, Any]:
    """Returns when dbt calls a table stale: by its newest change, where rows have its time."""
    names = {"warning": "warn_after", "critical": "error_after"}
    periods = {
        names[severity]: {"count": -(-seconds // 60), "period": "minute"}
        for severity, seconds in freshness.limits("seconds").items()
    }
    if not has_commit_time or not periods:
        return {}
    return {"config": {"loaded_at_field": COMMIT_TS, "freshness": periods}}

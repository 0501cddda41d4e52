"""What a table's columns meet in the lake: names that Delta can't keep apart, values that would be lost; a part of preflight."""

from __future__ import annotations

from collections.abc import Iterator

from waldelta.catalog import Column, Relation
from waldelta.column_names import clashes
from waldelta.finding import Finding, problem, warning
from waldelta.pipeline_file import Target
from waldelta.publication import PublicationState, PublicationTable
from waldelta.source_facts import Facts
from waldelta.type_map import column_types

# Spark's types that hold every value of their PostgreSQL type.
_COMPLETE = frozenset(
    {"boolean", "smallint", "int", "bigint", "float", "double", "string", "binary", "map<string,string>"}
)


def judge_columns(state: PublicationState, table: PublicationTable, facts: Facts, target: Target) -> Iterator[Finding]:
    """Columns that their target can't have, or whose values it can't all hold."""
    found = facts.tables.get(table.id)
    if found is None:
        return
    where = f"publication {state.name!r}, table {table.id}"
    columns = _published(state, table, found.relation)
    for clash in clashes((column.name for column in columns), metadata_columns=target.metadata_columns):
        yield problem(f"{where}: {clash}")
    if not target.metadata_columns:
        key = found.relation.identity_columns
        types = column_types({c.name: c.type for c in columns}, key, target.types_of(str(table.id)))
        if partial := [name for name, kind in types.items() if kind.spark not in _COMPLETE]:
            yield warning(
                f"{where}: metadata_columns is off, so values that a type of the lake can't hold (NaN in a decimal, infinite "
                f"dates, years BC) become null and are lost: {', '.join(partial)}; name columns that may have such values "
                "under types.text"
            )


def _published(state: PublicationState, table: PublicationTable, relation: Relation) -> list[Column]:
    if table.columns is not None:
        return [column for column in relation.columns if column.name in table.columns]
    return [column for column in relation.columns if state.sends(column)]

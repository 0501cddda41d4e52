"""A target's own filter (``target.tables.<table>.where``): PostgreSQL analyses it, the ledger
stores it.

The copy is read through the filter, and later changes are routed by it. Both use the filter as
PostgreSQL analysed it when the copy began.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from waldelta.config import TypeOptions
from waldelta.config.parse_text import parse_json
from waldelta.errors import ConfigError, StateError
from waldelta.lake.ledger import ColumnState, TableState
from waldelta.postgres import Connection, PublishedTable, TableColumn
from waldelta.row_filter import Collation, EnumType, RowFilter, resolve_filter
from waldelta.types import column_types


def read_target_filter(
    conn: Connection, target: str, where: str | None, table: PublishedTable
) -> RowFilter | None:
    """Return a target's filter over its source table, as the server understands it now; None
    without one.

    Raises ConfigError for a filter that the server refuses, or that uses unpublished columns.
    """
    if where is None:
        return None
    row_filter = resolve_filter(conn, table.read_as, where)
    if absent := sorted(set(row_filter.columns) - {column.name for column in table.columns}):
        raise ConfigError(unpublished(target, absent))
    return row_filter


def both(constraint: str | None, where: str | None) -> str | None:
    """Combine a partition's constraint and a filter into one filter.

    >>> both("(a > 1)", "b or c")
    '((a > 1)) and (b or c\\n)'
    """
    if constraint is None or where is None:
        return constraint or where
    return f"({constraint}) and ({where}\n)"  # The line break ends a comment in the filter.


def unpublished(table: str, columns: Sequence[str]) -> str:
    """Describe a filter that uses columns which never arrive."""
    return (
        f"target.tables.{table}.where uses column {', '.join(columns)}, which isn't published: add"
        " it to the column list, or remove it from the filter"
    )


def column_states(
    columns: Sequence[TableColumn], key_columns: Sequence[str], options: TypeOptions
) -> list[ColumnState]:
    """Return published columns as the ledger records them."""
    types = column_types({c.name: c.type for c in columns}, tuple(key_columns), options)
    return [
        ColumnState(
            c.name,
            c.type.oid,
            c.type.typmod,
            c.type.name,
            types[c.name].spark,
            c.not_null,
            c.attnum,
        )
        for c in columns
    ]


def to_text(row_filter: RowFilter | None) -> str | None:
    """Return a filter in the ledger's form.

    >>> from_text(to_text(RowFilter("a > 5", "(a > 5)", ("a",)))).analysed
    '(a > 5)'
    """
    if row_filter is None:
        return None
    return json.dumps(
        {
            "text": row_filter.text,
            "analysed": row_filter.analysed,
            "columns": list(row_filter.columns),
            "collations": {
                name: collation.value for name, collation in row_filter.collations.items()
            },
            "default_collation": row_filter.default_collation.value,
            "is_utf8": row_filter.is_utf8,
            "enums": {name: enum.name for name, enum in row_filter.enums.items()},
        }
    )


def from_text(text: str) -> RowFilter:
    """Read a filter from the ledger; raises StateError for any other text."""
    try:
        held = parse_json(text)
        return RowFilter(
            held["text"],
            held["analysed"],
            tuple(held["columns"]),
            {name: Collation(value) for name, value in held["collations"].items()},
            Collation(held["default_collation"]),
            held["is_utf8"],
            {name: EnumType(printed) for name, printed in held["enums"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise StateError(
            f"the ledger holds no readable filter of a target ({err}): sync the table again"
        ) from None


def filter_of(state: TableState) -> RowFilter | None:
    """Return the filter of a target's copy, by which its changes are routed, too."""
    return None if state.target_filter is None else from_text(state.target_filter)

"""What a pipeline file says about a table in comments: what it has, and what to know of it."""

from __future__ import annotations

from collections.abc import Iterator

from waldelta.postgres import TableColumn
from waldelta.quantities import counted, first_of, size
from waldelta.stages.setup.draft.inventory import FoundTable
from waldelta.types.array import Array
from waldelta.types.text import Characters
from waldelta.types.type_map import target_type

_IDENTITIES = {"d": "default", "i": "using index", "f": "full", "n": "nothing"}


def rows_of(table: FoundTable) -> str:
    """Returns a table's estimated number of rows."""
    return "not analyzed yet" if table.rows is None else f"≈ {counted(table.rows, 'row')}"


def key_of(table: FoundTable) -> str:
    """Returns the columns of a table's primary key."""
    return (
        f"key ({', '.join(table.relation.primary_key)})" if table.relation.primary_key else "no key"
    )


def identity_of(table: FoundTable) -> str:
    """Returns a table's replica identity, as ALTER TABLE names it."""
    return f"replica identity {_IDENTITIES[table.relation.replica_identity]}"


def facts_of(table: FoundTable) -> str:
    """Returns rows, size, key and replica identity in one line."""
    whole = table.size_bytes + table.toast_bytes
    return f"{rows_of(table)}, {size(whole)}, {key_of(table)}, {identity_of(table)}"


def notes_of(table: FoundTable) -> Iterator[str]:
    """Yields a line for each thing to know before the table is replicated."""
    if not table.identity:
        yield f"{_why_keyless(table)}; then move it to the first publication"
    elif table.relation.replica_identity == "f":
        yield "replica identity full: each UPDATE and DELETE writes the whole old row to WAL"
    if table.is_root:
        yield (
            f"partition root with {counted(len(table.leaves), 'partition')}: one target; partitions"
            " aren't listed singly"
        )
    if table.wide:
        toasted = f", {size(table.toast_bytes)} stored out of line" if table.toast_bytes else ""
        yield (
            f"big values in {first_of(table.wide)}{toasted}: a list of `columns` leaves out what"
            " the lake doesn't need"
        )
    if generated := [c.name for c in table.relation.columns if c.generated]:
        yield f"generated, not published: {', '.join(generated)}"
    if texts := [_typed(c) for c in table.relation.columns if _becomes_text(c)]:
        yield f"text in the lake: {first_of(texts)}"
    if moments := [c.name for c in table.relation.columns if _may_fail(c, table.identity)]:
        yield (
            f"a copy stops at a value of key column {', '.join(moments)} that the lake's type can't"
            " hold (infinity, NaN): name it under target.types.text if there are such"
        )
    if table.has_row_security:
        yield "row-level security: the role needs bypassrls where a policy hides rows from it"


def _why_keyless(table: FoundTable) -> str:
    if table.relation.primary_key and table.relation.identity_columns:
        return (
            "its partitions have another replica identity than the root, or a generated column is"
            " part of it, so only inserts and truncates are published: give all the same"
        )
    return (
        "no key: replica identity full is needed for updates and deletes, so only inserts and"
        f" truncates are published. Add a primary key, or: alter table {table.id} replica identity"
        " full"
    )


def _typed(column: TableColumn) -> str:
    return f"{column.name} ({column.type.name})"


def _becomes_text(column: TableColumn) -> bool:
    """Returns whether a column that isn't text becomes text in the lake, without a loss."""
    kind = target_type(column.type)
    return kind.is_text and not isinstance(kind, Characters)


def _may_fail(column: TableColumn, identity: tuple[str, ...]) -> bool:
    kind = target_type(column.type)
    return column.name in identity and kind.may_be_raw and not isinstance(kind, Array)

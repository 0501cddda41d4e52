"""One table's target: its columns with their types in the lake and on the source, its key, size and
location.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from waldelta.lake import READ_FAILURES, row_count
from waldelta.lake.ledger import ColumnState, Ledger, Quarantine, TableState
from waldelta.metadata_columns import PREFIX
from waldelta.monitoring.table_list import TargetContent, read_content
from waldelta.types.json import Variant

_DELTA_RS = """\
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

query = QueryBuilder().register("target", DeltaTable({}))
rows = pa.table(query.execute("select * from target"))"""


@dataclass(frozen=True, slots=True)
class ColumnLine:
    """A column of a target; ``source_type`` is None for a column that the source lacks."""

    name: str
    type: str
    source_type: str | None = None
    is_key: bool = False
    is_required: bool = False


@dataclass(frozen=True, slots=True)
class TableDetails:
    """A target as readers of the lake find it.

    ``rows``, ``bytes``, ``files`` and ``version`` are None where it can't be read.
    ``has_deleted_rows``: its files may contain deleted rows, which ``rows`` counts.
    """

    uri: str
    columns: tuple[ColumnLine, ...]
    content: TargetContent
    rows: int | None = None
    bytes: int | None = None
    files: int | None = None
    version: int | None = None
    has_deleted_rows: bool = False

    @property
    def recipes(self) -> dict[str, str]:
        """Returns, by reader, code that reads all rows of this target.

        delta-rs reads every feature that targets get, but only through QueryBuilder: its
        to_pyarrow_table() returns nulls where Delta maps column names. It returns variants as
        bytes, so it isn't there for a table that has some.
        """
        path, sql_path = json.dumps(self.uri, ensure_ascii=False), self.uri.replace("'", "''")
        recipes = {
            "Spark": f'spark.read.format("delta").load({path})',
            "DuckDB": f"install delta; load delta;\nselect * from delta_scan('{sql_path}');",
            "Python (delta-rs)": _DELTA_RS.format(path),
        }
        if any(Variant.spark in column.type for column in self.columns):
            del recipes["Python (delta-rs)"]
        return recipes

    @property
    def key(self) -> tuple[str, ...]:
        """Returns the key's columns."""
        return tuple(column.name for column in self.columns if column.is_key)


def read_table_details(
    ledger: Ledger, table_name: str, states: Sequence[TableState] | None = None
) -> TableDetails | None:
    """Returns a target by its latest state and its Delta log.

    ``states`` are the target's, oldest first, if they have been read already. Returns None for a
    table that the ledger doesn't know, or an invalid table name.
    """
    states = ledger.table_rows(table_name) if states is None else states
    try:
        target = ledger.lake.target(table_name)
    except ValueError:
        return None
    if not states:
        return None
    state = states[-1]
    counts = Quarantine(ledger.lake).missing_counts({state.table_name: state.generation})
    content = read_content(state, *(rows.get(state.table_name, 0) for rows in counts))
    try:
        table = target.open()
        types, files = table.spark_types, table.files
    except READ_FAILURES:
        # The target isn't copied yet, or is gone: the ledger's columns are shown.
        columns = (_line(column.name, column.spark_type, column, state) for column in state.columns)
        return TableDetails(target.uri, tuple(columns), content)
    size = pc.sum(files["size_bytes"]).as_py() or 0 if files.num_rows else 0
    known = {column.name: column for column in state.columns}
    lines = [_line(name, kind, known.get(name), state) for name, kind in types.items()]
    # The source's columns as the target has them, then waldelta's own.
    lines.sort(key=lambda line: line.source_type is None and line.name.startswith(PREFIX))
    return TableDetails(
        target.uri,
        tuple(lines),
        content,
        row_count(files),
        size,
        files.num_rows,
        table.version,
        table.has_deletion_vectors,
    )


def _line(name: str, type_name: str, column: ColumnState | None, state: TableState) -> ColumnLine:
    if column is None:
        return ColumnLine(name, type_name)
    return ColumnLine(name, type_name, column.type_name, name in state.key_columns, column.not_null)

"""The base class of all ledger rows; a row class's fields are the columns of its table.

Each table's Arrow schema, and the conversion of its stored values to rows, follow from the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import pyarrow as pa

from waldelta.arrow import UTC_TIME

_ARROW_TYPES: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    bytes: pa.binary(),
    datetime: UTC_TIME,
    float: pa.float64(),
    int: pa.int64(),
    str: pa.string(),
}


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A row of the ledger table ``table``; ``at`` is when the run ``run_id`` wrote it."""

    at: datetime
    run_id: str

    table: ClassVar[str]
    # A run's row may have megabytes of JSON. With small row groups it is found in a file of
    # thousands without reading the others.
    rows_per_group: ClassVar[int] = 500
    # A table with more files is compacted: a read opens every file that may have matching rows, at
    # about a millisecond each.
    most_files: ClassVar[int] = 8


R = TypeVar("R", bound=LedgerRow)
T = TypeVar("T")


@cache
def schema_of(kind: type[LedgerRow]) -> pa.Schema:
    """Return the schema of a kind's table: a nullable column for each field, in their order."""
    return pa.schema([(name, _arrow_type(of)) for name, of in _types_of(kind).items()])


def row_of(kind: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Return a row from a table's values; a null, or a column that is left out, is the default.

    The columns of a later version's table, and fields of its structs, are ignored. Raises TypeError
    when a column without a default is left out.
    """
    names, required, nested = _structure_of(kind)
    found = {
        name: value
        for name, value in values.items()
        if name in names and (value is not None or name in required)
    }
    for name, of in nested.items():
        if (value := found.get(name)) is not None:
            found[name] = (
                [row_of(of, item) for item in value]
                if isinstance(value, list)
                else row_of(of, value)
            )
    return kind(**found)


def rows_of(kind: Callable[..., T], rows: pa.Table) -> list[T]:
    """Return the rows of an Arrow table, as row_of() does."""
    return [row_of(kind, values) for values in rows.to_pylist()]


@cache
def _structure_of(kind: Any) -> tuple[frozenset[str], frozenset[str], dict[str, Any]]:
    """Return a class's fields, those of them without a default, and the classes of its structs."""
    types = _types_of(kind)
    required = (f.name for f in fields(kind) if f.default is f.default_factory is MISSING)
    structs = {name: _item_of(of) or of for name, of in types.items()}
    nested = {name: of for name, of in structs.items() if is_dataclass(of)}
    return frozenset(types), frozenset(required), nested


def _types_of(kind: Any) -> dict[str, Any]:
    """Return each field's type, without None: every column may have nulls."""
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in fields(kind)}
    return {n: get_args(of)[0] if isinstance(of, UnionType) else of for n, of in types.items()}


def _item_of(of: Any) -> Any:
    """Return the type of a list's items; None for other types."""
    return get_args(of)[0] if get_origin(of) is list else None


def _arrow_type(of: Any) -> pa.DataType:
    if (item := _item_of(of)) is not None:
        return pa.list_(_arrow_type(item))
    if is_dataclass(of):
        return pa.struct([(name, _arrow_type(inner)) for name, inner in _types_of(of).items()])
    return _ARROW_TYPES[of]

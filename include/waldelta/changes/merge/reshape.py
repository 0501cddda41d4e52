"""Rewrites a small target with other columns in the driver, as one commit, with Arrow.

The target has the rows and the columns that Spark would give it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import one_array
from waldelta.changes.stage.net_files import small_rows
from waldelta.errors import without_values
from waldelta.lake import READ_FAILURES, DeltaTarget, Overtaken, Tag, TargetVersion, replace_by_rows
from waldelta.lake.data_file import redefine
from waldelta.lake.delta_statements import needs_mapping
from waldelta.lake.layout import divides
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.pipeline.drift import Evolution, NewColumn
from waldelta.target_modes.target_mode import TargetMode
from waldelta.types import TargetType
from waldelta.types.json import Variant

log = logging.getLogger(__name__)

# The typed value of existing rows in a new column, and its raw text where the type can't hold it.
Fill = tuple[pa.Array, pa.Array | None]


def reshape_small(
    target: DeltaTarget,
    evolution: Evolution,
    types: Mapping[str, TargetType],
    tag: Tag,
    mode: TargetMode | None,
    foreign: Sequence[str],
) -> bool:
    """Commit a target's rows with the columns after an evolution; returns False where Spark must.

    ``mode`` is None for a target without metadata columns. External writers' ``foreign`` columns
    stay as they are. Spark must rewrite a target that isn't small, features of Delta that only
    Spark writes, and a mode that keeps parts of the key elsewhere.
    """
    names = [column.state.name for column in evolution.columns]
    further = [*((LSN, COMMIT_TS, RAW) if mode is not None else ()), *foreign]
    if mode is not None:
        key = {name: (name, types[name].spark) for name in evolution.key_columns}
        if mode.evolved_columns(key) != [*mode.own_columns]:
            return False
        further[3:3] = mode.own_columns
    varies = any(types[name].spark == Variant.spark for name in names)
    table = target.open()
    if (
        needs_mapping(names)
        or varies
        or not table.is_definable
        or table.committed(tag.app_id) >= tag.number
    ):
        return False
    fields = [*_fields(table.schema, evolution.columns, types), *map(table.schema.field, further)]
    table.list_features(pa.schema(fields))
    partition_by = partitions_after(table, evolution, types)
    redefinition = redefine(table, pa.schema(fields), partition_by, evolution.names)
    if redefinition is None:
        return False
    rows = _reshape_rows(table, evolution, types, further, redefinition.layout.schema)
    if rows is None:
        return False
    try:
        replace_by_rows(table, table.table_files, rows, tag, redefinition=redefinition)
    except Overtaken as err:  # After any other error, the commit may exist.
        log.info("Spark rewrites %s, since the driver can't: %s", target.uri, without_values(err))
        return False
    return True


def partitions_after(
    table: TargetVersion, evolution: Evolution, types: Mapping[str, TargetType]
) -> list[str]:
    """Returns the columns that divide a target after an evolution: renamed ones by their new names,
    without those that are gone or have a type that can't divide it.
    """
    followed = [evolution.names.get(name) for name in table.layout.partition_by]
    return [name for name in followed if name is not None and divides(types[name].arrow)]


def _reshape_rows(
    table: TargetVersion,
    evolution: Evolution,
    types: Mapping[str, TargetType],
    further: Collection[str],
    schema: pa.Schema,
) -> pa.Table | None:
    """Returns the rows with the new columns; None where Spark must read the table, or cast its
    values.
    """
    try:
        rows = small_rows(table)
        if rows is None:
            return None
        columns = {name: rows[name] for name in further}
        columns |= _columns(rows, evolution, types, has_raw=RAW in further)
        return pa.table([columns[f.name].cast(f.type) for f in schema], schema=schema)
    except READ_FAILURES as err:
        log.info("Spark rewrites %s: %s", table.place.uri, without_values(err))
        return None


def _fields(
    held: pa.Schema, columns: Iterable[NewColumn], types: Mapping[str, TargetType]
) -> Iterator[pa.Field]:
    for column in columns:
        name = column.state.name
        if column.source is None:
            yield pa.field(name, types[name].arrow)
        else:
            field = held.field(column.source)
            kind = field.type if column.same_type else types[name].arrow
            yield pa.field(name, kind, field.nullable)


def _columns(
    rows: pa.Table, evolution: Evolution, types: Mapping[str, TargetType], *, has_raw: bool
) -> dict[str, pa.Array | pa.ChunkedArray]:
    """Returns the columns of the source, and the raw values where the target has some."""
    fills: dict[str, Fill] = {
        column.state.name: types[column.state.name].from_text(pa.array([column.fill.encode()]))
        for column in evolution.columns
        if column.fill is not None
    }
    columns = {
        column.state.name: _values(rows, column, types, fills, has_raw=has_raw)
        for column in evolution.columns
    }
    if has_raw:
        raws = {name: raw[0].as_py() for name, (_, raw) in fills.items() if raw is not None}
        names = {
            column.source: column.state.name
            for column in evolution.columns
            if column.source is not None
            and (column.same_type or not types[column.state.name].is_text)
        }
        columns[RAW] = _raw(rows[RAW], names, raws)
    return columns


def _values(
    rows: pa.Table,
    column: NewColumn,
    types: Mapping[str, TargetType],
    fills: Mapping[str, Fill],
    *,
    has_raw: bool,
) -> pa.Array | pa.ChunkedArray:
    kind = types[column.state.name]
    if column.source is None:
        value, _ = fills.get(column.state.name, (pa.nulls(1, kind.arrow), None))
        return value.take(pa.array(np.zeros(len(rows), np.int64)))
    held = rows[column.source]
    if column.same_type or not kind.is_text:
        return held if column.same_type else held.cast(kind.arrow)
    # Arrow prints small numbers with an exponent, PostgreSQL and Spark all digits.
    digits = [None if number is None else f"{number:f}" for number in held.to_pylist()]
    texts = pa.array(digits, pa.string())
    # A value that the narrower type couldn't hold is in the raw column.
    return _of_key(rows[RAW], column.source, texts) if has_raw else texts


def _of_key(raws: pa.ChunkedArray, key: str, texts: pa.Array) -> pa.Array:
    values = one_array(pc.map_lookup(raws, pa.scalar(key), "first"))
    return pc.coalesce(values.cast(pa.string()), texts)


def _raw(
    raws: pa.ChunkedArray, names: Mapping[str, str], fills: Mapping[str, str]
) -> pa.Array | pa.ChunkedArray:
    """Returns the raw values of retained columns under the columns' new names, and those of new
    columns.
    """
    if raws.null_count == len(raws) and not fills:
        return raws
    entries = [
        [*((names[name], text) for name, text in row or () if name in names), *fills.items()]
        for row in raws.to_pylist()
    ]
    return pa.array([row or None for row in entries], raws.type)

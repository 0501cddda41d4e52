"""Source values: reads current values of source rows by key, one statement for many keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from waldelta.arrow import Bools
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.errors import (
    PrivilegeMissing,
    SourceError,
    SourceUnreachable,
    TableBusy,
    raised_as,
    without_values,
)
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import RELID_ATTNUM
from waldelta.pipeline import Job
from waldelta.postgres import (
    EXCLUSIVE_MODES,
    INT8,
    LOCK_TIMEOUT_S,
    MEMBERS,
    READ_THROUGH,
    Through,
    check_settings,
    describe,
    lacks_room,
    limited,
    lock_holders,
    read_types,
)
from waldelta.snapshot.exported_snapshot import wait_until_visible
from waldelta.snapshot.read_table import privilege_remedy
from waldelta.snapshot.source_columns import KeyAttribute, text_sql

Texts = list[str | None]

VISIBLE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class SourceValues:
    """Texts by row for each column that may lack values, and the rows the source can't complete.

    ``reasons`` has why a row can't be completed.
    """

    texts: dict[int, Texts]
    missing: Bools
    reasons: Texts


@dataclass(frozen=True, slots=True)
class _Lookup:
    """How rows of one table are found and read."""

    relation: sql.Composable
    key: tuple[KeyAttribute, ...]
    # The leaf partition's oid, where it is read through a table above it.
    leaf: int | None = None
    columns: dict[int, str] = field(default_factory=dict)


def read_values(
    job: Job, change_log: ChangeLog, plan: TargetPlan, rows: pa.Table, lacking: Bools
) -> SourceValues:
    """Read the columns marked as unchanged, for those ``rows`` (net changes) that are ``lacking``.

    Raises TransactionsStillOpen when a change isn't visible on the source after a minute, TableBusy
    while the table is locked, PrivilegeMissing, SourceUnreachable.
    """
    numbering, count = plan.decode.numbering, len(rows)
    flagged = {i: rows[f"u{i}"].to_numpy() & lacking for i in numbering.completable}
    values = SourceValues(
        {i: [None] * count for i in numbering.completable}, np.zeros(count, bool), [None] * count
    )
    if not lacking.any():
        return values
    publications = list(job.pipeline.source.publication_names)
    with (
        job.source.connect("reread") as connection,
        raised_as(lambda err: _lookup_error(err, job, plan.state, connection), psycopg.Error),
        limited(connection, "lock_timeout", LOCK_TIMEOUT_S),
    ):
        lookup = _lookup(connection, publications, plan, flagged, lacking, values)
        if lookup is None:
            return values
        keys = [
            plan.decode.types[i].pg_text(rows[f"c{i}"].combine_chunks()).to_pylist()
            for i in numbering.key
        ]
        absent = _read(connection, lookup, keys, values, lacking & ~values.missing)
        if absent.any():
            # A decoded transaction may not be visible yet.
            xids = change_log.xids(
                plan.decode.segments, plan.state.relation_ids, plan.decode.snapshot
            )
            wait_until_visible(connection, xids, VISIBLE_TIMEOUT_S)
            absent = _read(connection, lookup, keys, values, absent)
        check_settings(job.source.conninfo, connection)
        _give_up(values, absent, "the source has no row with this key any more")
    return values


def _lookup(
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    plan: TargetPlan,
    flagged: Mapping[int, Bools],
    lacking: Bools,
    values: SourceValues,
) -> _Lookup | None:
    """Returns the query for values of the table's rows; None without any that can be read.

    Rows that need a column which can't be read are marked as missing in ``values``. What no
    publication has is never read, even if the state, which is from the lake, names it.
    """
    state, names = plan.state, plan.decode.names
    # For merged partitions, the partitioned table returns each row's leaf partition too.
    relation_id = state.relation_ids[0] if state.root_id is None else state.root_id
    params = {"relation": relation_id, "publications": publications}
    row = connection.execute(_TABLE.encode(), params).fetchone()
    type_ids = {
        name: (oid, typmod) for name, oid, typmod in connection.execute(_COLUMNS.encode(), params)
    }
    leaf_columns = {c.name for c in state.columns if c.attnum == RELID_ATTNUM}
    type_ids |= dict.fromkeys(leaf_columns, (INT8, -1))
    sources = {c.name: c.name_on_source for c in state.columns}
    type_ids = {name: type_ids[source] for name, source in sources.items() if source in type_ids}
    usable = {c.name for c in state.columns if type_ids.get(c.name) == (c.type_oid, c.typmod)}
    if row is None or not usable.issuperset(state.key_columns):
        what = "the table isn't published any more" if row is None else "its key was changed"
        _give_up(values, lacking, f"{what} on the source")
        return None
    for i, rows in flagged.items():
        if names[i] not in usable:
            _give_up(values, rows, f"column {names[i]} was dropped or changed on the source")
    schema, table, is_root, above = row
    through = Through.of(above)
    # ONLY, because an inheritance parent is published without its children.
    only = sql.SQL("" if is_root or through is not None else "only ")
    relation = only + (sql.Identifier(schema, table) if through is None else through.id.identifier)
    columns = {
        i: sources[names[i]] for i, rows in flagged.items() if names[i] in usable and rows.any()
    }
    keys = [names[i] for i in plan.decode.numbering.key]
    types = read_types(connection, [type_ids[name] for name in keys])
    key = [KeyAttribute(n, types[type_ids[n]], n in leaf_columns, sources[n]) for n in keys]
    return _Lookup(relation, tuple(key), None if through is None else relation_id, columns)


def _read(
    connection: psycopg.Connection[Any],
    lookup: _Lookup,
    keys: Sequence[Texts],
    values: SourceValues,
    lacking: Bools,
) -> Bools:
    """Read the values of these rows; returns the rows that the source doesn't show."""
    absent = lacking.copy()
    places = np.flatnonzero(lacking)
    if not len(places):
        return absent
    query, arrays = _values_query(lookup), [[texts[n] for n in places] for texts in keys]
    for number, *texts in connection.execute(query, arrays):
        row = int(places[number - 1])
        absent[row] = False
        for i, text in zip(lookup.columns, texts, strict=True):
            values.texts[i][row] = text
    return absent


def _values_query(lookup: _Lookup) -> sql.Composed:
    """Returns a query with one row per key found: its number, from 1, and the columns as pgoutput
    sends them.
    """
    columns = [text_sql(name, relation="t.") for name in lookup.columns.values()]
    numbered = [sql.Identifier(f"k{n}") for n in range(len(lookup.key))]
    conditions = [
        sql.SQL("{} = {}").format(*column.compared(sql.SQL("k.{}").format(number), "t."))
        for number, column in zip(numbered, lookup.key, strict=True)
    ]
    if lookup.leaf is not None:
        conditions.append(sql.SQL("t.tableoid = {}::oid").format(sql.Literal(lookup.leaf)))
    return sql.SQL(
        "select {selected} from unnest({arrays}) with ordinality as k ({names}) join {relation} as"
        " t on {same}"
    ).format(
        selected=sql.SQL(", ").join([sql.SQL("k.n"), *columns]),
        arrays=sql.SQL(", ").join([sql.SQL("%s::text[]")] * len(numbered)),
        names=sql.SQL(", ").join([*numbered, sql.Identifier("n")]),
        relation=lookup.relation,
        same=sql.SQL(" and ").join(conditions),
    )


def _give_up(values: SourceValues, rows: Bools, reason: str) -> None:
    for n in np.flatnonzero(rows & ~values.missing):
        values.reasons[n] = reason
    values.missing |= rows


def _lookup_error(
    err: psycopg.Error, job: Job, state: TableState, connection: psycopg.Connection[Any]
) -> SourceError:
    reason = without_values(err)
    what = f"missing TOAST values of {state.table_name}"
    if isinstance(err, psycopg.errors.LockNotAvailable):
        return TableBusy(
            f"{what} can't be read, because another session keeps the table locked. Locks that"
            " stand in the"
            f" way:\n{lock_holders(connection, EXCLUSIVE_MODES, waiting=True)}\nwait until they"
            " end, and run again"
        )
    if isinstance(err, psycopg.errors.InsufficientPrivilege):
        remedy = privilege_remedy(job.source.conninfo, state.table_name)
        return PrivilegeMissing(f"{what} can't be read ({reason}): {remedy}")
    if (full := lacks_room(err)) is not None:
        return full
    if isinstance(err, psycopg.OperationalError):
        return SourceUnreachable(
            f"reading {what} from {describe(job.source.conninfo)} broke off ({reason}): run again"
        )
    return SourceError(f"{what} can't be read ({reason}): run again")


# The published tables that are this relation or, for merged partitions, leaves of it.
_PUBLISHED = f"""{MEMBERS},
published (publication, relid) as (
    select m.publication, m.relid
    from member m
    where m.relid = %(relation)s::oid
       or exists (select from pg_partition_ancestors(m.relid) a where a.relid = %(relation)s::oid)
)
"""  # noqa: S608 - no value in it

_TABLE = f"""{_PUBLISHED}
select n.nspname, c.relname, c.relkind = 'p', w.through
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
left join lateral ({READ_THROUGH}) w on true
where c.oid = %(relation)s::oid and exists (select from published)
"""  # noqa: S608 - no value in it

# A schema's entry publishes all columns, whatever list the table's own entry has.
_COLUMNS = f"""{_PUBLISHED}
select a.attname, a.atttypid::int8, a.atttypmod
from pg_attribute a
where a.attrelid = %(relation)s::oid
  and a.attnum > 0
  and not a.attisdropped
  and exists (
      select
      from published m
      join pg_class c on c.oid = m.relid
      join pg_attribute own on own.attrelid = m.relid and own.attname = a.attname
      left join pg_publication_rel r on r.prpubid = m.publication and r.prrelid = m.relid
      where r.prattrs is null
         or own.attnum = any(r.prattrs::int2[])
         or exists (
             select from pg_publication_namespace s
             where s.pnpubid = m.publication and s.pnnspid = c.relnamespace
         )
  )
"""  # noqa: S608 - no value in it

"""Publications: what the pipeline file wants, what the server has, and the SQL to get there.

``plan_publications`` is pure. ``try_publications`` has PostgreSQL check the wanted filters in
transactions that are rolled back. It returns their text as PostgreSQL prints it, so that an
unchanged pipeline file makes an empty plan.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from waldelta.config import Publication
from waldelta.postgres import Connection, TableColumn, TableId, allow_views, fetch
from waldelta.postgres.publication_checks import MatchedTable
from waldelta.row_filter import parse_row_filter, refused_filter

DDL_LOCK_TIMEOUT_MS = 5_000
OPERATIONS = ("insert", "update", "delete", "truncate")


@dataclass(frozen=True, slots=True, order=True)
class PublicationTable:
    """A table in a publication.

    ``columns`` are in attnum order once read from the server; None without a column list.
    """

    id: TableId
    columns: tuple[str, ...] | None = None
    row_filter: str | None = None

    @property
    def is_plain(self) -> bool:
        """Returns whether the table has neither filter nor column list."""
        return self.columns is None and self.row_filter is None


@dataclass(frozen=True, slots=True)
class PublicationState:
    """A publication, wanted or found; ``filter_columns`` are the columns each found filter depends
    on.
    """

    name: str
    tables: tuple[PublicationTable, ...] = ()
    schemas: tuple[str, ...] = ()
    all_tables: bool = False
    publish: frozenset[str] = frozenset(OPERATIONS)
    via_root: bool = False
    comment: str | None = None
    owned: bool = True
    owner: str = ""
    publishes_generated: bool = False
    filter_columns: Mapping[TableId, frozenset[str]] = field(default_factory=dict)
    # Tables whose filter text is the pipeline file's, and tables whose filter PostgreSQL rejects.
    as_written: frozenset[TableId] = field(default=frozenset(), compare=False)
    rejected: frozenset[TableId] = field(default=frozenset(), compare=False)

    def sends(self, column: TableColumn) -> bool:
        """Returns whether a column is sent without a column list."""
        return not column.generated or (self.publishes_generated and not column.virtual)

    @property
    def publishes_old_rows(self) -> bool:
        """Returns whether its UPDATEs or DELETEs need a replica identity."""
        return bool(self.publish & {"update", "delete"})


@dataclass(frozen=True, slots=True)
class Statement:
    """One SQL statement of a plan, and its reason."""

    sql: sql.Composed
    reason: str

    def text(self) -> str:
        """Returns the statement as a DBA would run it."""
        return self.sql.as_string(None)


@dataclass(frozen=True, slots=True)
class Mark:
    """A publication's comment: the pipeline that created it, its definition, and the slot that
    reads it.

    >>> Mark.parse("waldelta pipeline flights, definition 0123456789ab, slot flights_cdc").slot
    'flights_cdc'
    """

    pipeline: str
    definition: str
    # The slot's name is no part of a comparison of definitions.
    slot: str = ""

    def __str__(self) -> str:
        reader = f", slot {self.slot}" if self.slot else ""
        return f"waldelta pipeline {self.pipeline}, definition {self.definition}{reader}"

    @classmethod
    def parse(cls, comment: str | None) -> Mark | None:
        """Returns the mark in a comment, or None."""
        match = _MARK.fullmatch(comment or "")
        return cls(match["pipeline"], match["definition"], match["slot"] or "") if match else None

    @classmethod
    def of(cls, pipeline: str, entry: Publication, slot: str = "") -> Mark:
        """Returns the mark of the pipeline file's current definition."""
        # What becomes of new tables is no matter of setup.
        document = entry.model_dump(mode="json", exclude={"new_tables"})
        text = json.dumps(document, sort_keys=True)
        return cls(pipeline, hashlib.sha256(text.encode()).hexdigest()[:12], slot)


_MARK = re.compile(
    r"waldelta pipeline (?P<pipeline>\w+), definition (?P<definition>\w+)(, slot (?P<slot>\w+))?"
)


def wanted_publication(
    pipeline: str, entry: Publication, slot: str = "", matched: Iterable[MatchedTable] = ()
) -> PublicationState:
    """Returns the publication that an entry of the pipeline file wants, with filters as written.

    ``matched`` are the tables for which patterns stand; those of other publications don't count.
    """
    listed = [
        PublicationTable(TableId(*t.parts), t.columns, t.where)
        for t in entry.tables
        if not t.is_pattern
    ]
    listed += [
        PublicationTable(match.id, None, match.entry.where)
        for match in matched
        if match.publication.name == entry.name
    ]
    return PublicationState(
        name=entry.name,
        tables=tuple(sorted(listed)),
        schemas=tuple(sorted(set(entry.schemas))),
        all_tables=entry.all_tables,
        publish=frozenset(entry.publish),
        via_root=entry.publish_via_partition_root,
        publishes_generated=entry.publish_generated_columns == "stored",
        comment=str(Mark.of(pipeline, entry, slot)),
        as_written=frozenset(table.id for table in listed),
    )


def plan_publications(
    publications: Iterable[PublicationState], actual: Mapping[str, PublicationState]
) -> tuple[Statement, ...]:
    """Returns the statements that create the wanted state, for one transaction; empty if nothing
    differs.

    Filters are compared as text, so both sides must be as PostgreSQL prints them
    (``try_publications``).
    """
    return tuple(s for state in publications for s in _plan(state, actual.get(state.name)))


def plan_drop(name: str, reason: str) -> Statement:
    """Returns the statement that drops a publication."""
    return Statement(sql.SQL("drop publication {}").format(sql.Identifier(name)), reason)


def read_marked(conn: Connection) -> dict[str, PublicationState]:
    """Returns the database's publications with a mark by setup, without what they publish.

    Reading filters would take their tables' locks.
    """
    rows = fetch(conn, _PUBLICATIONS, {"names": [], "every": True, "marked": True})
    return {row.name: _state(row, []) for row in rows}


def read_publications(
    conn: Connection, names: Sequence[str] | None = None
) -> dict[str, PublicationState]:
    """Returns the publications of these names that exist, or all of the database's."""
    params = {"names": list(names or []), "every": names is None, "marked": False}
    rows, relations = fetch(conn, _PUBLICATIONS, params), fetch(conn, _RELATIONS, params)
    return {
        row.name: _state(row, [r for r in relations if r.publication == row.name]) for row in rows
    }


def try_publications(
    conn: Connection, publication: PublicationState, current: PublicationState | None = None
) -> tuple[PublicationState, list[str]]:
    """Have PostgreSQL check each filter and column list, in transactions that are rolled back.

    Returns the wanted state with filters and column lists as the server stores them, and what
    PostgreSQL rejected. A table can't be checked when the role doesn't own it or it is locked, for
    example by an autovacuum for hours. Then the text of ``current`` is used if it has this
    definition, else the filter as written and the columns it names. Raises
    psycopg.errors.LockNotAvailable when a table with a new definition stays locked.
    """
    timeout_ms = trial_timeout_ms(conn)
    earlier = (
        _stored_tables(current)
        if current is not None and current.comment == publication.comment
        else {}
    )
    trials = [
        _try_table(conn, publication, table, earlier.get(table.id), timeout_ms)
        for table in publication.tables
    ]
    state = replace(
        publication,
        tables=tuple(sorted(trial.table for trial in trials)),
        filter_columns={trial.table.id: trial.filter_columns for trial in trials},
        as_written=publication.as_written - {trial.table.id for trial in trials if trial.is_stored},
        rejected=frozenset(trial.table.id for trial in trials if trial.problem is not None),
    )
    return state, [trial.problem for trial in trials if trial.problem is not None]


@dataclass(frozen=True, slots=True)
class _Trial:
    """A table of a publication after its trial, and why PostgreSQL rejects its entry.

    ``is_stored``: filter and column list are as the server stores them, not as written.
    """

    table: PublicationTable
    filter_columns: frozenset[str] = frozenset()
    is_stored: bool = False
    problem: str | None = None


def _stored_tables(state: PublicationState) -> dict[TableId, _Trial]:
    return {
        table.id: _Trial(table, state.filter_columns.get(table.id, frozenset()), is_stored=True)
        for table in state.tables
    }


def _try_table(
    conn: Connection,
    publication: PublicationState,
    table: PublicationTable,
    earlier: _Trial | None,
    timeout_ms: int,
) -> _Trial:
    """Returns how the server stores a table's entry; ``earlier``, if any, when that can't be
    tried.
    """
    if table.is_plain:
        return _Trial(table)
    try:
        stored = _try_create(
            conn, replace(publication, tables=(table,), schemas=(), all_tables=False), timeout_ms
        )
    except psycopg.errors.LockNotAvailable:
        if earlier is None:
            raise
        return earlier
    except psycopg.errors.InsufficientPrivilege:
        # Whether privileges suffice is checked by preflight.
        return earlier or _judge_untried(conn, publication.name, table)
    except psycopg.Error as err:
        return _Trial(table, problem=_rejection(publication.name, table, err))
    return _stored_tables(stored)[table.id]


def _judge_untried(conn: Connection, publication: str, table: PublicationTable) -> _Trial:
    """Returns a table's entry as written.

    The owner of the table runs the SQL, so objections of PostgreSQL or the replica identity must be
    reported.
    """
    if table.row_filter is None:
        return _Trial(table)
    columns = frozenset(parse_row_filter(table.row_filter))
    refused = refused_filter(conn, table.id, table.row_filter)
    if refused is None:
        return _Trial(table, columns)
    return _Trial(
        table, columns, problem=f"publication {publication!r}, table {table.id}: {refused}"
    )


def trial_timeout_ms(conn: Connection) -> int:
    """Returns how long a trial waits for a lock: less than deadlock_timeout.

    A session that waits that long cancels the autovacuum that blocks it.
    """
    ((deadlock_timeout,),) = conn.execute(
        "select current_setting('deadlock_timeout')::interval"
    ).fetchall()
    return min(DDL_LOCK_TIMEOUT_MS, max(1, int(deadlock_timeout / timedelta(milliseconds=2))))


def _try_create(
    conn: Connection, publication: PublicationState, timeout_ms: int
) -> PublicationState:
    trial = replace(publication, name=f"waldelta_trial_{conn.info.backend_pid}")
    with conn.transaction(force_rollback=True):
        conn.execute(sql.SQL("set local lock_timeout = {}").format(timeout_ms))
        allow_views(conn)
        conn.execute(_create(trial))
        return read_publications(conn, [trial.name])[trial.name]


def _rejection(publication: str, table: PublicationTable, err: psycopg.Error) -> str:
    detail = ": ".join(part for part in (err.diag.message_primary, err.diag.message_detail) if part)
    what = f"filter {table.row_filter!r}" if table.row_filter is not None else "column list"
    hint = f" ({err.diag.message_hint})" if err.diag.message_hint else ""
    return (
        f"publication {publication!r}: PostgreSQL rejects the {what} of {table.id}: {detail}{hint};"
        " correct the table's entry in the pipeline file"
    )


def _plan(publication: PublicationState, actual: PublicationState | None) -> Iterable[Statement]:
    name = publication.name
    if actual is not None and actual.all_tables != publication.all_tables:
        # FOR ALL TABLES can't be altered; within one transaction the stream always sees the name.
        yield plan_drop(
            name,
            f"publication {name} changes between all tables and a list: it is dropped and"
            " created again",
        )
        actual = None
    if actual is None:
        yield Statement(_create(publication), f"publication {name} doesn't exist yet: creating it")
        yield _comment(publication)
        return
    settings, members = (
        _plan_settings(publication, actual),
        list(_plan_members(publication, actual)),
    )
    # Filters and lists on a partition root are allowed only while it publishes via root.
    yield from (settings + members) if publication.via_root else (members + settings)
    if actual.comment != publication.comment:
        yield _comment(publication)


def _plan_settings(publication: PublicationState, actual: PublicationState) -> list[Statement]:
    current = _options(actual)
    changed = {name: v for name, v in _options(publication).items() if v != current[name]}
    reason = f"{' and '.join(changed)} changed"
    return [_alter(publication, "set (", _settings(changed), ")", reason=reason)] if changed else []


def _plan_members(publication: PublicationState, actual: PublicationState) -> Iterable[Statement]:
    current, tables = {t.id: t for t in actual.tables}, {t.id: t for t in publication.tables}
    changed = sorted(i for i in current.keys() & tables.keys() if current[i] != tables[i])
    gone, new = sorted(current.keys() - tables.keys()), sorted(tables.keys() - current.keys())
    schemas_gone = sorted(set(actual.schemas) - set(publication.schemas))
    schemas_new = sorted(set(publication.schemas) - set(actual.schemas))
    in_both = [tables[i] for i in sorted(tables.keys() & current.keys())]
    schemas_in_both = sorted(set(publication.schemas) & set(actual.schemas))
    dropped = sql.SQL(", ").join([sql.SQL("only {}").format(i.identifier) for i in gone])
    for names, clause, members, reason in (
        (
            schemas_gone,
            "drop tables in schema ",
            _names(schemas_gone),
            "no longer published: schema",
        ),
        (changed, "set ", _members(in_both, schemas_in_both), "filter or column list changed:"),
        ([] if changed else gone, "drop table ", dropped, "no longer published:"),
        (new, "add ", _members([tables[i] for i in new], []), "newly published:"),
        (schemas_new, "add ", _members([], schemas_new), "newly published: schema"),
    ):
        removed = f"; removed: {_list(gone)}" if clause == "set " and gone else ""
        if names:
            yield _alter(publication, clause, members, reason=f"{reason} {_list(names)}{removed}")


def _list(names: Iterable[TableId | str]) -> str:
    return ", ".join(map(str, names))


def _names(names: Iterable[str]) -> sql.Composable:
    return sql.SQL(", ").join([sql.Identifier(n) for n in names])


def _alter(publication: PublicationState, *parts: sql.Composable | str, reason: str) -> Statement:
    composed = sql.SQL("").join([sql.SQL(p) if isinstance(p, str) else p for p in parts])
    statement = sql.SQL("alter publication {} {}").format(
        sql.Identifier(publication.name), composed
    )
    return Statement(statement, f"publication {publication.name}: {reason}")


def _create(publication: PublicationState) -> sql.Composed:
    members: sql.Composable = sql.SQL("")
    if publication.all_tables:
        members = sql.SQL(" for all tables")
    elif publication.tables or publication.schemas:
        members = sql.SQL(" for {}").format(_members(publication.tables, publication.schemas))
    options = _options(publication)
    if not publication.publishes_generated:
        del options["publish_generated_columns"]  # Before 18 there is no such option.
    return sql.SQL("create publication {}{} with ({})").format(
        sql.Identifier(publication.name), members, _settings(options)
    )


def _members(tables: Sequence[PublicationTable], schemas: Sequence[str]) -> sql.Composable:
    # ONLY: inheritance children are published only when they are listed, as the copy reads them.
    parts = [sql.SQL("table only {}").format(_member(t)) for t in tables]
    if schemas:
        parts.append(sql.SQL("tables in schema {}").format(_names(schemas)))
    return sql.SQL(", ").join(parts)


def _member(table: PublicationTable) -> sql.Composed:
    columns = (
        sql.SQL(" ({})").format(_names(table.columns)) if table.columns is not None else sql.SQL("")
    )
    # The filter is an expression, not a value; row_filter.parse_row_filter has parsed it. The line
    # break ends a comment in it.
    where = (
        sql.SQL(" where ({}\n)")
        if table.row_filter and "--" in table.row_filter
        else sql.SQL(" where ({})")
    )
    text = where.format(sql.SQL(table.row_filter)) if table.row_filter is not None else sql.SQL("")
    return sql.SQL("{}{}{}").format(table.id.identifier, columns, text)


def _options(state: PublicationState) -> dict[str, sql.Composable]:
    """Returns the value of each option that setup sets."""
    return {
        "publish": sql.Literal(", ".join(o for o in OPERATIONS if o in state.publish)),
        "publish_via_partition_root": sql.SQL("true" if state.via_root else "false"),
        "publish_generated_columns": sql.SQL("stored" if state.publishes_generated else "none"),
    }


def _settings(options: Mapping[str, sql.Composable]) -> sql.Composable:
    return sql.SQL(", ").join(
        [sql.SQL("{} = {}").format(sql.SQL(name), value) for name, value in options.items()]
    )


def _comment(publication: PublicationState) -> Statement:
    statement = sql.SQL("comment on publication {} is {}").format(
        sql.Identifier(publication.name), sql.Literal(publication.comment)
    )
    return Statement(statement, f"publication {publication.name}: mark it as this pipeline's")


def _state(row: Any, relations: list[Any]) -> PublicationState:
    tables = [
        PublicationTable(
            TableId(r.schema, r.name),
            tuple(r.columns) if r.columns is not None else None,
            r.row_filter,
        )
        for r in relations
    ]
    return PublicationState(
        name=row.name,
        tables=tuple(sorted(tables)),
        schemas=tuple(sorted(row.schemas)),
        all_tables=row.all_tables,
        publish=frozenset(row.publish),
        via_root=row.via_root,
        comment=row.comment,
        owned=row.owned,
        owner=row.owner,
        publishes_generated=(row.everything.get("pubgencols") or "n") != "n",
        filter_columns={TableId(r.schema, r.name): frozenset(r.filter_columns) for r in relations},
    )


_PUBLICATIONS = """
select p.pubname as name,
       p.puballtables as all_tables,
       p.pubviaroot as via_root,
       array_remove(array[
           case when p.pubinsert then 'insert' end,
           case when p.pubupdate then 'update' end,
           case when p.pubdelete then 'delete' end,
           case when p.pubtruncate then 'truncate' end
       ], null) as publish,
       array(
           select n.nspname::text
           from pg_publication_namespace pn
           join pg_namespace n on n.oid = pn.pnnspid
           where pn.pnpubid = p.oid
       ) as schemas,
       obj_description(p.oid, 'pg_publication') as comment,
       pg_has_role(p.pubowner, 'usage') as owned,
       pg_get_userbyid(p.pubowner)::text as owner,
       to_jsonb(p) as everything
from pg_publication p
where (%(every)s or p.pubname = any(%(names)s::name[]))
  and (not %(marked)s or obj_description(p.oid, 'pg_publication') like 'waldelta pipeline %%')
order by p.pubname
"""

# A column has one dependency for the filter and one for the column list, so a dependency not
# explained by the list is the filter's.
_RELATIONS = """
select p.pubname as publication,
       n.nspname as schema,
       c.relname as name,
       pg_get_expr(r.prqual, r.prrelid) as row_filter,
       case when r.prattrs is not null then array(
           select a.attname::text
           from pg_attribute a
           where a.attrelid = r.prrelid and a.attnum = any(r.prattrs::int2[])
           order by a.attnum
       ) end as columns,
       array(
           select a.attname::text
           from pg_depend d
           join pg_attribute a on a.attrelid = r.prrelid and a.attnum = d.refobjsubid
           where d.classid = 'pg_publication_rel'::regclass
             and d.objid = r.oid
             and d.refclassid = 'pg_class'::regclass
             and d.refobjid = r.prrelid
             and d.refobjsubid > 0
           group by a.attname, a.attnum
           having count(*) > (coalesce(a.attnum = any(r.prattrs::int2[]), false))::int
       ) as filter_columns
from pg_publication_rel r
join pg_publication p on p.oid = r.prpubid
join pg_class c on c.oid = r.prrelid
join pg_namespace n on n.oid = c.relnamespace
where %(every)s or p.pubname = any(%(names)s::name[])
order by p.pubname, n.nspname, c.relname
"""

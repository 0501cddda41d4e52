"""Reads what preflight needs about the source: server, role, and every table that the publications
name or cover; and how a slot that reads several publications gets each leaf partition.

pgoutput (get_rel_sync_entry): a publication via root publishes a leaf as the topmost member above
it, and only that member's filter and column list apply; any other publication publishes it as
itself. Of a slot's publications only those apply that publish the leaf as the topmost of all.

PostgreSQL calls the functions of indexes, statistics and constraints while a SELECT is planned, as
the role that runs it. A domain's constraint is called by each cast to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from waldelta.config import PipelineFile
from waldelta.postgres import (
    PARTS_OF_TYPE,
    CatalogRelation,
    Connection,
    Leaf,
    TableId,
    fetch,
    read_leaves,
    read_relations,
    read_table_oids,
)
from waldelta.postgres.publication_checks import MatchedTable, matched_tables
from waldelta.row_filter.runtime_errors import Pattern
from waldelta.slot.slot import WAL_PER_HOUR, SlotState
from waldelta.stages.setup.facts.publications import PublicationState, PublicationTable

TIMEOUTS = {
    "idle_in_transaction_session_timeout": (
        "copies set it to 0 for the session that keeps their snapshot"
    ),
    "idle_session_timeout": "runs set it to 0 for the sessions that hold their locks",
    "idle_replication_slot_timeout": (
        "PostgreSQL invalidates a slot that no run reads for this long: run the pipeline more"
        " often, or a resync has to compare all tables"
    ),
}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server reports about itself and the role."""

    version: int
    in_recovery: bool
    settings: Mapping[str, str]
    role: str
    database: str
    superuser: bool
    bypass_rls: bool
    can_replicate: bool
    can_create: bool
    can_make_slots: bool
    # Whether the role may have the server log its running transactions; None before PostgreSQL 16,
    # which can't.
    can_log_snapshots: bool | None
    used_slots: int
    retained_bytes: int
    wal_bytes_per_hour: int | None
    behind_pooler: bool

    def number(self, setting: str) -> int:
        """Returns a setting in its own unit; 0 where this version doesn't have it."""
        return int(self.settings.get(setting) or 0)


@dataclass(frozen=True, slots=True)
class TableFacts:
    """A table that the pipeline file names: its relation and leaf partitions, and the ``readable``
    columns. ``hidden_rows``: row security hides rows from the role.
    """

    relation: CatalogRelation
    leaves: tuple[Leaf, ...]
    readable: frozenset[str]
    # Whether the role may use the table's schema, without which it can't read any column.
    has_usage: bool
    hidden_rows: bool
    has_children: bool
    # Which of its objects use which functions of other roles.
    foreign_functions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks of preflight use."""

    server: ServerFacts
    # Facts of the server that has, or will have, the slot: the primary or a standby.
    slot_server: ServerFacts
    slot: SlotState | None
    actual: Mapping[str, PublicationState]
    tables: Mapping[TableId, TableFacts]
    # The tables that a publication covers without naming them, and whether it can publish each.
    covered: Mapping[str, Mapping[TableId, bool]] = field(default_factory=dict)
    # The schemas that exist of those that publications and patterns name.
    schemas: frozenset[str] = frozenset()
    refused_patterns: frozenset[Pattern] = frozenset()
    # The tables for which the pipeline file's patterns stand.
    matched: tuple[MatchedTable, ...] = ()


def read_facts(
    conn: Connection,
    pipeline: PipelineFile,
    actual: Mapping[str, PublicationState],
    slot: SlotState | None,
    slot_conn: Connection,
) -> Facts:
    """Query the server about itself and about every table that the publications name or cover.

    ``slot_conn`` connects to the server that has the slot, and is ``conn`` if that is the primary.
    """
    covered = _read_scopes(conn, pipeline, actual)
    matched = matched_tables(conn, pipeline.source)
    table_ids = _table_ids(pipeline, actual).union(table.id for table in matched)
    publishable = {
        table
        for tables_of_publication in covered.values()
        for table, is_publishable in tables_of_publication.items()
        if is_publishable
    }
    tables = _read_tables(conn, table_ids | publishable)
    schemas = _read_schemas(conn, pipeline, actual)
    server = read_server(conn)
    return Facts(
        server=server,
        slot_server=server if slot_conn is conn else read_server(slot_conn),
        slot=slot,
        actual=actual,
        tables=tables,
        covered=covered,
        schemas=schemas,
        matched=tuple(matched),
    )


def read_table_facts(
    conn: Connection, actual: Mapping[str, PublicationState], tables: Iterable[TableId]
) -> Facts:
    """Query the server about itself and these tables only, of publications that exist.

    Sizes aren't read, so this waits for no session that locks a table.
    """
    server = read_server(conn)
    return Facts(server, server, None, actual, _read_tables(conn, tables, sizes=False))


def _read_scopes(
    conn: Connection, pipeline: PipelineFile, actual: Mapping[str, PublicationState]
) -> dict[str, dict[TableId, bool]]:
    covered = {}
    for entry in pipeline.source.publications:
        state = actual.get(entry.name) if not entry.manage else None
        all_tables = state.all_tables if state else entry.all_tables
        schemas = list(state.schemas if state else entry.schemas)
        if all_tables or schemas:
            params = {"every": all_tables, "schemas": schemas}
            rows = conn.execute(_SCOPE.encode(), params).fetchall()
            covered[entry.name] = {TableId(s, n): publishable for s, n, publishable in rows}
    return covered


def _table_ids(pipeline: PipelineFile, actual: Mapping[str, PublicationState]) -> set[TableId]:
    """Returns the tables that the pipeline file's entries or their existing publications name."""
    table_ids: set[TableId] = set()
    for entry in pipeline.source.publications:
        table_ids |= {TableId(*table.parts) for table in entry.tables if not table.is_pattern}
        if not entry.manage and entry.name in actual:
            table_ids |= {table.id for table in actual[entry.name].tables}
    return table_ids


def _read_schemas(
    conn: Connection, pipeline: PipelineFile, actual: Mapping[str, PublicationState]
) -> frozenset[str]:
    """Returns the schemas that exist of those that publications name."""
    publications = pipeline.source.publications
    of_file = {schema for entry in publications for schema in entry.schemas}
    of_patterns = {pattern.parts[0] for entry in publications for pattern in entry.patterns}
    names = sorted(of_file.union(of_patterns, *(state.schemas for state in actual.values())))
    rows = conn.execute(
        "select nspname from pg_namespace where nspname = any(%s::name[])", (names,)
    ).fetchall()
    return frozenset(name for (name,) in rows)


def read_server(conn: Connection) -> ServerFacts:
    """Query a server about itself and the connection's role."""
    (row,) = fetch(conn, _SERVER, {"settings": list(_SETTINGS), "pid": conn.info.backend_pid})
    return ServerFacts(**row._asdict())


def _read_tables(
    conn: Connection, table_ids: Iterable[TableId], *, sizes: bool = True
) -> dict[TableId, TableFacts]:
    oids = read_table_oids(conn, table_ids)
    relations = read_relations(conn, list(oids.values()))
    leaves = read_leaves(conn, [r.oid for r in relations], sizes=sizes)
    access = {
        row[0]: row[1:] for row in conn.execute(_ACCESS.encode(), {"oids": list(oids.values())})
    }
    functions = read_foreign_functions(conn, oids.values())
    facts: dict[TableId, TableFacts] = {}
    for relation in relations:
        readable, has_usage, hidden_rows, has_children = access[relation.oid]
        facts[relation.id] = TableFacts(
            relation,
            leaves[relation.oid],
            frozenset(readable),
            has_usage,
            hidden_rows,
            has_children,
            functions[relation.oid],
        )
    return facts


def members(state: PublicationState, facts: Facts) -> list[PublicationTable]:
    """Returns the tables that a publication names or covers.

    Of partition trees that it covers, only the topmost table is returned.
    """
    listed = {table.id for table in state.tables}
    return [
        *state.tables,
        *(
            PublicationTable(table_id)
            for table_id, is_publishable in facts.covered.get(state.name, {}).items()
            if is_publishable and table_id not in listed
        ),
    ]


def is_overruled(state: PublicationState, table: TableFacts, facts: Facts) -> bool:
    """Returns whether the publication publishes the table's rows as another table's.

    The table's own filter and column list then have no effect.
    """
    if not state.via_root:
        return False
    oids = {
        facts.tables[member.id].relation.oid
        for member in members(state, facts)
        if member.id in facts.tables
    }
    return not oids.isdisjoint(table.relation.ancestors)


def own_leaves(state: PublicationState, table: TableFacts) -> list[Leaf]:
    """Returns the leaves published by this table's entry, not by effective entries of their own."""
    listed = (
        set() if state.via_root else {member.id for member in state.tables} - {table.relation.id}
    )
    return [leaf for leaf in table.leaves if leaf.id not in listed]


_SETTINGS: Sequence[str] = (
    "server_version",
    "server_encoding",
    "wal_level",
    "max_replication_slots",
    "max_slot_wal_keep_size",
    "temp_file_limit",
    "search_path",
    "synchronized_standby_slots",
    "hot_standby_feedback",
    "primary_slot_name",
    *TIMEOUTS,
)

# A column for each field of ServerFacts. A pooler invents the backend's pid.
_SERVER = f"""
select (select jsonb_object_agg(name, setting) from pg_settings where name = any(%(settings)s))
  as settings,
       current_setting('server_version_num')::int as version,
       pg_is_in_recovery() as in_recovery,
       pg_backend_pid() <> %(pid)s as behind_pooler,
       current_user::text as role,
       current_database()::text as database,
       r.rolsuper as superuser,
       r.rolsuper or r.rolbypassrls as bypass_rls,
       r.rolsuper or r.rolreplication or exists (
           select from pg_roles m where m.rolname = 'rds_replication' and pg_has_role(current_user,
             m.oid, 'usage')
       ) as can_replicate,
       has_database_privilege(current_database(), 'create') as can_create,
       (
           select bool_and(has_function_privilege(oid, 'execute'))
           from pg_proc
           where pronamespace = 'pg_catalog'::regnamespace
             and proname in ('pg_create_logical_replication_slot', 'pg_drop_replication_slot')
       ) as can_make_slots,
       (
           select has_function_privilege(oid, 'execute')
           from pg_proc
           where pronamespace = 'pg_catalog'::regnamespace and proname = 'pg_log_standby_snapshot'
       ) as can_log_snapshots,
       (select count(*) from pg_replication_slots) as used_slots,
       (
           select coalesce(max(pg_wal_lsn_diff(
               case when pg_is_in_recovery() then pg_last_wal_replay_lsn()
                 else pg_current_wal_lsn() end, restart_lsn
           )), 0)::bigint
           from pg_replication_slots
       ) as retained_bytes,
       ({WAL_PER_HOUR}) as wal_bytes_per_hour
from pg_roles r
where r.rolname = current_user
"""  # noqa: S608 - no value in it

_ACCESS = """
select c.oid,
       array(
           select a.attname::text
           from pg_attribute a
           where a.attrelid = c.oid
             and a.attnum > 0
             and not a.attisdropped
             and has_column_privilege(c.oid, a.attnum, 'select')
       ),
       has_schema_privilege(c.relnamespace, 'usage'),
       row_security_active(c.oid),
       c.relkind = 'r' and exists (select from pg_inherits i where i.inhparent = c.oid)
from pg_class c
where c.oid = any(%(oids)s::oid[])
"""

# The tables covered by FOR ALL TABLES or TABLES IN SCHEMA; oids below 16384 belong to the system.
_SCOPE = """
select n.nspname, c.relname, c.relkind in ('r', 'p') and c.relpersistence = 'p'
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where c.oid >= 16384
  and c.relkind in ('r', 'p', 'f')
  and not exists (
      select from pg_partition_ancestors(c.oid) a
      join pg_class above on above.oid = a.relid
      where above.oid <> c.oid and (%(every)s or above.relnamespace in (select oid
        from pg_namespace where nspname = any(%(schemas)s::name[])))
  )
  and n.nspname !~ '^pg_(toast|temp)'
  and (%(every)s or n.nspname = any(%(schemas)s::name[]))
order by n.nspname, c.relname
"""


def read_foreign_functions(conn: Connection, oids: Collection[int]) -> dict[int, tuple[str, ...]]:
    """Returns by table its objects that use functions of neither the current role nor a superuser.

    Those of a table's partitions count as its own. This reads catalogs only, and no definition, so
    it plans nothing of these tables.
    """
    uses: dict[int, list[str]] = {oid: [] for oid in oids}
    for row in fetch(conn, _FUNCTIONS, {"oids": list(oids)}):
        uses[row.root].append(f"{row.used_by} uses {row.name} of role {row.owner}")
    return {oid: tuple(texts) for oid, texts in uses.items()}


# A function that PostgreSQL's own code or operators call has no entry in pg_depend.
_FUNCTIONS = f"""
with recursive tree (root, oid) as (
    select t, t from unnest(%(oids)s::oid[]) as t
    union
    select t.root, i.inhrelid from tree t join pg_inherits i on i.inhparent = t.oid
),
types (root, oid) as (
    select t.root, a.atttypid
    from tree t
    join pg_attribute a on a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped
    union
    select y.root, v.oid
    from types y
    join pg_type t on t.oid = y.oid
    cross join lateral (
        {PARTS_OF_TYPE}
    ) as v (oid)
    where v.oid <> 0
),
used (root, class, oid, used_by) as (
    select t.root, 'pg_class'::regclass, i.indexrelid, 'index ' || i.indexrelid::regclass
    from tree t
    join pg_index i on i.indrelid = t.oid
    union all
    select t.root, 'pg_statistic_ext'::regclass, s.oid,
           format('statistics %%I.%%I', s.stxnamespace::regnamespace, s.stxname)
    from tree t
    join pg_statistic_ext s on s.stxrelid = t.oid
    union all
    select t.root, 'pg_class'::regclass, p.partrelid, 'partition key of ' || t.oid::regclass
    from tree t
    join pg_partitioned_table p on p.partrelid = t.oid
    union all
    select t.root, 'pg_constraint'::regclass, c.oid, format('constraint %%I', c.conname)
    from tree t
    join pg_constraint c on c.conrelid = t.oid and c.contype = 'c'
    union all
    select y.root, 'pg_constraint'::regclass, c.oid, 'domain ' || format_type(c.contypid, null)
    from types y
    join pg_constraint c on c.contypid = y.oid
    union all
    select t.root, 'pg_attrdef'::regclass, d.oid, format('generated column %%I', a.attname)
    from tree t
    join pg_attrdef d on d.adrelid = t.oid
    join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum and a.attgenerated <> ''
    union all
    select t.root, 'pg_policy'::regclass, p.oid, format('policy %%I', p.polname)
    from tree t
    join pg_policy p on p.polrelid = t.oid
)
select distinct u.root::bigint as root, u.used_by, f.oid::regprocedure::text as name,
       r.rolname::text as owner
from used u
join pg_depend d on d.classid = u.class and d.objid = u.oid
left join pg_operator o on d.refclassid = 'pg_operator'::regclass and o.oid = d.refobjid
join pg_proc f on f.oid = o.oprcode
               or (d.refclassid = 'pg_proc'::regclass and f.oid = d.refobjid)
join pg_roles r on r.oid = f.proowner
where not r.rolsuper and r.rolname <> current_user
order by 1, 2, 3
"""  # noqa: S608 - no value in it

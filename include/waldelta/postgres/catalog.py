"""Reads the published tables from the source's catalogs: columns, types, keys, filters, leaves.

Every other stage takes these frozen descriptions; no other module reads ``pg_class``,
``pg_attribute`` or ``pg_type``. The connection must come from ``connection.connect``, because names
of types and filters depend on its search_path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from psycopg import sql

from waldelta.config import split_table_name
from waldelta.findings import PLAIN_NAME
from waldelta.postgres.connection import Connection
from waldelta.postgres.publication_membership import Membership
from waldelta.postgres.type_catalog import PgType, fetch, read_types

ReplicaIdentity = Literal["d", "i", "f", "n"]
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True, order=True)
class TableId:
    """A table's schema and name.

    >>> str(TableId("public", "odd.name"))
    'public."odd.name"'
    >>> TableId.parse('public."odd.name"').name
    'odd.name'
    """

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TableId:
        """Read ``schema.name``, quoted where SQL needs it; raises ValueError on anything else."""
        return cls(*split_table_name(text))

    def __str__(self) -> str:
        return f"{_quote_name(self.schema)}.{_quote_name(self.name)}"

    @property
    def identifier(self) -> sql.Identifier:
        """The name for SQL texts."""
        return sql.Identifier(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column; ``generated`` ones are published only by PostgreSQL 18 and later, ``virtual`` ones
    never.

    ``source_name`` is its name on the source, where ``name`` is another one in the lake.
    """

    name: str
    attnum: int
    type: PgType
    not_null: bool
    generated: bool = False
    virtual: bool = False
    source_name: str | None = None

    @property
    def name_on_source(self) -> str:
        """The column's name on the source."""
        return self.source_name or self.name


@dataclass(frozen=True, slots=True)
class Through:
    """A partitioned table above a leaf, through which a role reads that leaf.

    SELECT on it covers its partitions.
    """

    id: TableId
    oid: int

    @classmethod
    def of(cls, row: Sequence[str] | None) -> Through | None:
        """Create it from oid, schema and name as READ_THROUGH returns them."""
        return cls(TableId(row[1], row[2]), int(row[0])) if row else None


@dataclass(frozen=True, slots=True)
class Leaf:
    """A table with rows of its own: a plain table, or a leaf of a partition tree.

    ``above`` are the tables between it and the root. ``through`` is the table by which the role
    reads it, where the role may not read it directly. ``readable`` is whether the role may read it
    at all, ``has_ctid`` whether it may read block ranges: a grant on columns doesn't include ctid.
    """

    id: TableId
    oid: int
    relfilenode: int
    blocks: int
    size_bytes: int
    relkind: str = "r"
    persistence: str = "p"
    replica_identity: ReplicaIdentity = "d"
    identity_columns: tuple[str, ...] = ()
    above: tuple[int, ...] = ()
    owner: str = ""
    through: Through | None = None
    readable: bool = True
    has_ctid: bool = True

    @property
    def read_as(self) -> TableId:
        """The relation through which the role reads it."""
        return self.id if self.through is None else self.through.id

    def is_of(self, partition: int) -> bool:
        """Whether it is this partition, by oid, or below it."""
        return self.oid == partition or partition in self.above


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as all of the slot's publications together publish it.

    ``columns`` are the published ones in attnum order. ``key_columns`` identifies a row in the
    stream: with REPLICA IDENTITY USING INDEX that index, otherwise the primary key, in either case
    only when it is completely published. It is empty for a table that has neither. ``row_filter``
    is the filter of the copy: the publications' filters ORed, whatever they publish; None when one
    of them has none. ``entries`` has the membership in each publication, of the table or of each
    merged leaf. It differs once the table was removed and added again, or other rules were in force
    for a while. ``unread``: a filter wasn't read, since another session keeps the table locked.
    """

    id: TableId
    oid: int
    relkind: str
    replica_identity: ReplicaIdentity
    columns: tuple[TableColumn, ...]
    key_columns: tuple[str, ...]
    primary_key: tuple[str, ...]
    identity_columns: tuple[str, ...]
    row_filter: str | None
    leaves: tuple[Leaf, ...]
    relation_ids: tuple[int, ...]
    publishes: frozenset[str]
    publications: tuple[str, ...] = ()
    ancestors: tuple[int, ...] = ()
    entries: frozenset[Membership] = frozenset()
    unread: bool = False

    @property
    def read_as(self) -> TableId:
        """The relation that statements name to read the rows: the table itself, or one above it
        where the role may read only that one.
        """
        return next((leaf.read_as for leaf in self.leaves if leaf.oid == self.oid), self.id)

    @property
    def size_bytes(self) -> int:
        """Bytes of the table's main storage, all leaves together."""
        return sum(leaf.size_bytes for leaf in self.leaves)

    @property
    def stored_leaves(self) -> list[Leaf]:
        """The leaves whose rows this server stores, which are no foreign tables."""
        return [leaf for leaf in self.leaves if leaf.relkind == "r"]


@dataclass(frozen=True, slots=True)
class PublishedRelation:
    """A published table by its oid, and the oids of the partitioned tables above it.

    ``is_late``: a partition that wasn't necessarily published since its creation.
    """

    id: TableId
    oid: int
    relkind: str = "r"
    ancestors: tuple[int, ...] = ()
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Partition:
    """A relation that may be a partition.

    ``ancestors`` are the oids of the tables above it. ``constraint`` is what every row of it meets
    (None: nothing). ``unread``: the constraint wasn't read, since another session keeps one of
    these tables locked.
    """

    oid: int
    ancestors: tuple[int, ...] = ()
    constraint: str | None = None
    unread: bool = False


@dataclass(frozen=True, slots=True)
class CatalogRelation:
    """A relation as the catalogs describe it, published or not, for preflight to judge."""

    id: TableId
    oid: int
    relkind: str
    persistence: str
    replica_identity: ReplicaIdentity
    owned: bool
    extension_owned: bool
    columns: tuple[TableColumn, ...]
    primary_key: tuple[str, ...]
    identity_columns: tuple[str, ...]
    ancestors: tuple[int, ...]
    owner: str = ""
    has_deferrable_key: bool = False

    @property
    def why_unidentified(self) -> str:
        """Why nothing identifies the old rows of a relation without identity columns."""
        match self.replica_identity:
            case "n":
                return "its replica identity is nothing"
            case "i":
                return "the index of its replica identity was dropped"
        if self.has_deferrable_key:
            return "its primary key is deferrable, which doesn't identify rows"
        return "it has no primary key"

    def to_be_identified(self, table_id: TableId) -> str:
        """Returns how old rows of this relation, or of a leaf with this name, get identified."""
        alter = f"alter table {table_id} replica identity"
        if self.replica_identity == "n" and self.primary_key:
            return f"{alter} default"
        keyless = self.replica_identity == "d" and not (self.primary_key or self.has_deferrable_key)
        first = "add a primary key, or " if keyless else ""
        return f"{first}{alter} using index … (or full, where there is none)"

    @property
    def column_names(self) -> tuple[str, ...]:
        """All columns, in attnum order."""
        return tuple(c.name for c in self.columns)


def read_partitions(
    conn: Connection, tables: Iterable[TableId], locked: Collection[int] = ()
) -> dict[TableId, Partition]:
    """Returns those of these relations that exist, as partitions of the tables above them.

    A partition's constraint is read under a lock on the partition and the tables above it.
    Relations that are ``locked`` (oids) are left out.
    """
    table_ids = list(tables)
    names = {"schemas": [t.schema for t in table_ids], "names": [t.name for t in table_ids]}
    return {
        TableId(r.schema, r.name): Partition(
            r.oid, tuple(r.ancestors), r.partition_constraint, r.is_unread
        )
        for r in fetch(conn, _PARTITIONS, names | {"locked": list(locked)})
    }


def read_relations(conn: Connection, oids: Sequence[int]) -> list[CatalogRelation]:
    """Returns the relations with these oids; those that don't exist any more are left out."""
    rows = fetch(conn, _RELATIONS, {"oids": list(oids)})
    columns = _read_columns(conn, oids)
    return [
        CatalogRelation(
            id=TableId(row.schema, row.name),
            oid=row.oid,
            relkind=row.relkind,
            persistence=row.persistence,
            replica_identity=row.replica_identity,
            owned=row.owned,
            extension_owned=row.extension_owned,
            columns=tuple(columns.get(row.oid, ())),
            primary_key=tuple(row.primary_key),
            identity_columns=tuple(row.identity_columns),
            ancestors=tuple(row.ancestors),
            owner=row.owner,
            has_deferrable_key=row.has_deferrable_key,
        )
        for row in rows
    ]


def read_table_oids(conn: Connection, tables: Iterable[TableId]) -> dict[TableId, int]:
    """Returns the oids of those of these tables, views and so on that exist."""
    table_ids = list(tables)
    rows = fetch(
        conn,
        _OIDS,
        {"schemas": [t.schema for t in table_ids], "names": [t.name for t in table_ids]},
    )
    return {TableId(row.schema, row.name): row.oid for row in rows}


def read_bytes(conn: Connection, tables: Mapping[_Key, Collection[int]]) -> dict[_Key, int]:
    """Returns the size of each group of tables (oids) with TOAST; waits where one is locked."""
    oids = [oid for group in tables.values() for oid in group]
    sizes = {row.oid: row.bytes for row in fetch(conn, _BYTES, {"oids": oids})}
    return {key: sum(sizes[oid] for oid in group) for key, group in tables.items()}


def read_leaves(
    conn: Connection, oids: Sequence[int], *, sizes: bool = True, locked: Collection[int] = ()
) -> dict[int, tuple[Leaf, ...]]:
    """Returns the tables that have the rows of each of these tables: itself, or a partition root's
    leaves.

    Without ``sizes``, or where they are ``locked`` (by oid), they count as empty, and this waits
    for no session that keeps a leaf locked.
    """
    rows = fetch(conn, _LEAVES, {"oids": list(oids), "sizes": sizes, "locked": list(locked)})
    leaves: dict[int, list[Leaf]] = {oid: [] for oid in oids}
    for row in rows:
        leaf = Leaf(
            id=TableId(row.schema, row.name),
            oid=row.oid,
            relfilenode=row.relfilenode or 0,
            blocks=row.size_bytes // row.block_size,
            size_bytes=row.size_bytes,
            relkind=row.relkind,
            persistence=row.persistence,
            replica_identity=row.replica_identity,
            identity_columns=tuple(row.identity_columns),
            above=tuple(row.above),
            owner=row.owner,
            through=Through.of(row.through),
            readable=row.readable,
            has_ctid=row.has_ctid,
        )
        leaves[row.root].append(leaf)
    return {oid: tuple(parts) for oid, parts in leaves.items()}


def _quote_name(name: str) -> str:
    return name if PLAIN_NAME.match(name) else '"' + name.replace('"', '""') + '"'


def _read_columns(conn: Connection, oids: Sequence[int]) -> dict[int, list[TableColumn]]:
    rows = fetch(conn, _COLUMNS, {"oids": list(oids)})
    types = read_types(conn, {(row.type_oid, row.typmod) for row in rows})
    columns: dict[int, list[TableColumn]] = {}
    for row in rows:
        pg_type = types[row.type_oid, row.typmod]
        columns.setdefault(row.relation_oid, []).append(
            TableColumn(row.name, row.attnum, pg_type, row.not_null, row.generated, row.virtual)
        )
    return columns


# The key columns of the indexes of a relation c that meet a condition. A deferrable primary key
# isn't a replica identity (RelationGetIndexList). It doesn't identify rows either: within a
# transaction several rows can have the same key.
_INDEX_COLUMNS = """array(
           select a.attname::text
           from pg_index i
           cross join unnest(i.indkey::int2[]) with ordinality as k (attnum, position)
           join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
           where i.indrelid = c.oid and i.indisvalid and i.indimmediate
             and k.position <= i.indnkeyatts and {condition}
           order by k.position
       )"""
# The columns by which the stream identifies old rows of a relation c.
_IDENTITY_COLUMNS = f"""case c.relreplident
           when 'd' then {_INDEX_COLUMNS.format(condition="i.indisprimary")}
           when 'i' then {_INDEX_COLUMNS.format(condition="i.indisreplident")}
           when 'f' then array(
               select a.attname::text
               from pg_attribute a
               where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
               order by a.attnum
           )
           else '{{}}'
       end as identity_columns"""  # noqa: S608 - no value in it

_RELATIONS = f"""
select c.oid,
       n.nspname as schema,
       c.relname as name,
       c.relkind::text,
       c.relpersistence::text as persistence,
       c.relreplident::text as replica_identity,
       pg_has_role(c.relowner, 'usage') as owned,
       exists (
           select from pg_depend d
           where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype = 'e'
       ) as extension_owned,
       pg_get_userbyid(c.relowner)::text as owner,
       array(select relid::oid from pg_partition_ancestors(c.oid) where relid <> c.oid)
         as ancestors,
       exists (
           select from pg_index i
           where i.indrelid = c.oid and i.indisprimary and not i.indimmediate
       ) as has_deferrable_key,
       {_INDEX_COLUMNS.format(condition="i.indisprimary")} as primary_key,
       {_IDENTITY_COLUMNS}
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where c.oid = any(%(oids)s::oid[])
order by n.nspname, c.relname
"""  # noqa: S608 - no value in it

_BYTES = """
select l.oid, coalesce(pg_table_size(l.oid), 0)::bigint as bytes
from unnest(%(oids)s::oid[]) as l (oid)
"""

_OIDS = """
select c.oid, n.nspname as schema, c.relname as name
from unnest(%(schemas)s::text[], %(names)s::text[]) as w (schema, name)
join pg_namespace n on n.nspname = w.schema
join pg_class c on c.relnamespace = n.oid and c.relname = w.name
where c.relkind not in ('i', 'I', 't')
"""

_PARTITIONS = """
select c.oid, n.nspname as schema, c.relname as name,
       l.above as ancestors,
       case when not l.is_locked then pg_get_partition_constraintdef(c.oid) end
         as partition_constraint,
       c.relispartition and l.is_locked as is_unread
from unnest(%(schemas)s::text[], %(names)s::text[]) as w (schema, name)
join pg_namespace n on n.nspname = w.schema
join pg_class c on c.relnamespace = n.oid and c.relname = w.name
cross join lateral (
    select a.above, (c.oid || a.above) && %(locked)s::oid[] as is_locked
    from (
        select array(select a.relid::oid from pg_partition_ancestors(c.oid) a
          where a.relid <> c.oid) as above
    ) a
) l
where c.relkind not in ('i', 'I', 't')
"""

# How the querying role may read a relation c: directly, else through the nearest partitioned table
# above it, whose SELECT covers its partitions. Reading through that table selects rows by tableoid,
# which a grant on columns doesn't include.
READ_THROUGH = """
    select case when a.place > 1 then array[r.oid::text, s.nspname, r.relname] end as through,
           true as readable,
           has_table_privilege(r.oid, 'select') or has_column_privilege(r.oid, 'ctid', 'select')
             as has_ctid
    from (
        select c.oid as relid, 1 as place
        union all
        select above.relid, above.place
        from pg_partition_ancestors(c.oid) with ordinality as above (relid, place)
        where above.relid <> c.oid
    ) a
    join pg_class r on r.oid = a.relid
    join pg_namespace s on s.oid = r.relnamespace
    where has_schema_privilege(s.oid, 'usage')
      and case
              when a.place = 1 then has_any_column_privilege(r.oid, 'select')
              else has_table_privilege(r.oid, 'select') or (
                  has_any_column_privilege(r.oid, 'select') and has_column_privilege(r.oid,
                    'tableoid', 'select')
              )
          end
    order by a.place
    limit 1
"""

# pg_partition_tree() would lock each partition, and wait for sessions that lock one.
_LEAVES = f"""
with recursive tree (root, oid, above) as (
    select w.oid, w.oid, '{{}}'::oid[] from unnest(%(oids)s::oid[]) as w (oid)
    union all
    select t.root, i.inhrelid, case when t.oid = t.root then t.above else t.oid || t.above end
    from tree t
    join pg_class p on p.oid = t.oid and p.relkind = 'p'
    join pg_inherits i on i.inhparent = t.oid and not i.inhdetachpending
)
select t.root,
       c.oid,
       n.nspname as schema,
       c.relname as name,
       c.relkind::text,
       c.relpersistence::text as persistence,
       c.relreplident::text as replica_identity,
       pg_relation_filenode(c.oid) as relfilenode,
       case when %(sizes)s and c.oid <> all(%(locked)s::oid[])
         then coalesce(pg_relation_size(c.oid), 0) else 0 end as size_bytes,
       current_setting('block_size')::int as block_size,
       t.above,
       {_IDENTITY_COLUMNS},
       pg_get_userbyid(c.relowner)::text as owner,
       w.through,
       w.readable is true as readable,
       w.has_ctid is true as has_ctid
from tree t
join pg_class c on c.oid = t.oid
join pg_namespace n on n.oid = c.relnamespace
left join lateral ({READ_THROUGH}) w on true
where c.relkind <> 'p'
order by t.root, n.nspname, c.relname
"""  # noqa: S608 - no value in it

_COLUMNS = """
select a.attrelid as relation_oid,
       a.attname as name,
       a.attnum,
       a.atttypid as type_oid,
       a.atttypmod as typmod,
       a.attnotnull as not_null,
       a.attgenerated <> '' as generated,
       a.attgenerated = 'v' as virtual
from pg_attribute a
where a.attrelid = any(%(oids)s::oid[])
  and a.attnum > 0
  and not a.attisdropped
order by a.attrelid, a.attnum
"""


# --- how many rows meet conditions, by the planner's estimate, which reads none


def rows_where(relation: sql.Composable, conditions: Sequence[sql.Composable]) -> sql.Composable:
    """Returns a relation's rows that meet all conditions, as SQL to write after FROM."""
    if not conditions:
        return relation
    return sql.SQL("{} where {}").format(relation, sql.SQL(" and ").join(conditions))


def is_superuser(conn: Connection) -> bool:
    """Returns whether the session may do anything, so that it must plan no query for an estimate.

    While PostgreSQL plans a query, it calls functions of the table's owner: those in predicates
    and expressions of indexes, in extended statistics, in constraints.
    """
    return conn.info.parameter_status("is_superuser") == "on"


def planned_rows(conn: Connection, statement: sql.Composable) -> int:
    """Returns the planner's estimate of the rows that a SELECT returns.

    The planner takes a table's present size, even if the table was never analyzed. It needs SELECT
    on the table. A superuser must not have it: see is_superuser().
    """
    query = sql.SQL("explain (format json) {}").format(statement)
    ((plans,),) = conn.execute(query).fetchall()
    return int(plans[0]["Plan"]["Plan Rows"])

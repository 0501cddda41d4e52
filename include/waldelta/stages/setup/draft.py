"""Draft: a pipeline file for some tables of a database, as text with comments, and the SQL that a
superuser, or the tables' owner, runs for it: the role that reads, its grants, the publications.

The inventory is read in one read-only transaction: which tables a database has, with rows, size,
key and partitions, and what a pipeline can't replicate.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from psycopg import sql

from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.errors import ConfigError, NotPrimary
from waldelta.findings import Grant, Need, RoleAttribute, on_one_line, sql_name, statements
from waldelta.postgres import (
    NAME_BYTES,
    CatalogRelation,
    Connection,
    Leaf,
    TableId,
    describe,
    fetch,
    is_superuser,
    limited,
    planned_rows,
    read_around,
    read_leaves,
    read_relations,
)
from waldelta.postgres.publication_checks import needs_of
from waldelta.quantities import counted, first_of, size
from waldelta.stages.setup.facts.publications import (
    PublicationState,
    plan_publications,
    wanted_publication,
)
from waldelta.stages.setup.facts.source_facts import ServerFacts, read_server
from waldelta.stages.setup.setup import STOP_ON_ERROR, SetupPlan
from waldelta.target_modes.column_names import clashes
from waldelta.types.array import Array
from waldelta.types.text import Characters
from waldelta.types.type_map import target_type

DEFAULT_SCHEDULE = "*/5 * * * *"
_PLAIN = re.compile(r"\A[a-z_][a-z0-9_.]*\Z")
_MOST_EXCLUDED = 20
_IDENTITIES = {"d": "default", "i": "using index", "f": "full", "n": "nothing"}
# The first words of a file that `waldelta init` wrote; a later init recognizes the file by them.
HEADER = "-- Written by `waldelta init`"
# A session that keeps a table locked must not stop the survey: such a table counts as empty.
_LOCK_TIMEOUT_S = 2.0
_STATEMENT_TIMEOUT_S = 60.0
# Columns whose values are that wide on average are worth a remark.
_WIDE_BYTES = 1000
# A TOAST table with this share of a table's bytes has most of its big values.
_TOASTED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table that can be replicated: a plain table, or a partition root with its leaves.

    ``rows`` are an estimate, None before the table's first ANALYZE. ``toast_bytes`` are stored out
    of line, in addition to ``size_bytes``. ``wide`` are the columns with big values.
    """

    relation: CatalogRelation
    leaves: tuple[Leaf, ...]
    rows: int | None
    toast_bytes: int
    wide: tuple[str, ...]
    has_row_security: bool

    @property
    def id(self) -> TableId:
        """Returns the table's name."""
        return self.relation.id

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of all leaves, without TOAST."""
        return sum(leaf.size_bytes for leaf in self.leaves)

    @property
    def is_root(self) -> bool:
        """Returns whether the table is partitioned."""
        return self.relation.relkind == "p"

    @property
    def is_full(self) -> bool:
        """Returns whether the table has REPLICA IDENTITY FULL."""
        return self.relation.replica_identity == "f"

    @property
    def identity(self) -> tuple[str, ...]:
        """Returns the columns by which the stream identifies old rows of all leaves.

        Without any, PostgreSQL would refuse the table's own UPDATEs and DELETEs once these are
        published.
        """
        columns = self.relation.identity_columns
        stored = [leaf for leaf in self.leaves if leaf.relkind == "r" and leaf.persistence == "p"]
        is_uniform = all(
            set(leaf.identity_columns) == set(columns)
            and (leaf.replica_identity == "f") == (self.relation.replica_identity == "f")
            for leaf in stored
        )
        return columns if is_uniform and not self.is_identity_generated else ()

    @property
    def is_identity_generated(self) -> bool:
        """Returns whether a generated column is part of its replica identity."""
        columns = self.relation.identity_columns
        return any(c.generated and c.name in columns for c in self.relation.columns)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The tables of a database, the server and the role that read them, and what names are taken.

    ``excluded`` says why a pipeline can't replicate a table. ``publications`` are those of the
    database, ``slots`` and ``roles`` those of the server.
    """

    server: ServerFacts
    tables: tuple[FoundTable, ...]
    excluded: Mapping[TableId, str]
    publications: frozenset[str] = frozenset()
    slots: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()

    @property
    def schemas(self) -> tuple[str, ...]:
        """Returns the schemas that have tables to replicate."""
        return tuple(sorted({table.id.schema for table in self.tables}))


def pipeline_name(text: str) -> str:
    """Returns a name for a pipeline, made from a database's name.

    >>> pipeline_name("Shop-2 (test)"), pipeline_name("1")
    ('shop_2_test', 'p_1')
    """
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "pipeline"
    name = name if name[0].isalpha() else f"p_{name}"
    return name[: NAME_BYTES - len("_inserts_pub")]


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed pipeline over some tables of an inventory."""

    inventory: Inventory
    tables: tuple[FoundTable, ...]
    conn_id: str
    pipeline: str
    root: str
    schedule: str = DEFAULT_SCHEDULE
    # The row filter of the only table.
    where: str | None = None

    @property
    def slot(self) -> str:
        """Returns the slot's name."""
        return f"{self.pipeline}_cdc"

    @property
    def reader(self) -> str:
        """Returns the role that the SQL grants to."""
        return reader_of(self.inventory, self.tables, self.pipeline)

    @property
    def taken(self) -> list[str]:
        """Returns which of the names of its slot and publications the server has already."""
        publications = {f"{self.pipeline}_{suffix}" for suffix in ("pub", "inserts_pub")}
        return [
            *(["slot " + self.slot] if self.slot in self.inventory.slots else []),
            *(f"publication {name}" for name in sorted(publications & self.inventory.publications)),
        ]

    def with_free_names(self) -> Draft:
        """Returns the draft under the first name, by a number behind it, that isn't taken."""
        numbered = (replace(self, pipeline=f"{self.pipeline}_{n}") for n in count(2))
        return next(draft for draft in chain([self], numbered) if not draft.taken)

    def as_yaml(self) -> str:
        """Returns the pipeline file's text."""
        lines = [
            '# Written by `waldelta init`. All keys: "Pipeline file" in the documentation',
            f"pipeline: {_scalar(self.pipeline)}",
            "source:",
            f"  conn_id: {_scalar(self.conn_id)}",
            f"  slot: {self.slot}",
            "  publications:",
            *self._publications(),
            *self._exclusion_lines(),
            "target:",
            f"  root: {_scalar(self.root)}",
            f"schedule: {_scalar(self.schedule)}  # of the DAG, in UTC",
        ]
        return "\n".join([*lines, ""])

    def load(self) -> PipelineFile:
        """Returns the file as the product reads it; raises ConfigError for what it refuses, and for
        names that the server has already.
        """
        if self.taken:
            raise ConfigError(
                f"the server has {' and '.join(self.taken)} already, which pipeline"
                f" {self.pipeline!r} would create: choose another pipeline name (--pipeline); or,"
                " if nothing needs them, drop them"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.pipeline}.yml"
            path.write_text(self.as_yaml(), encoding="utf-8")
            return load_pipeline_file(path)

    def as_sql(self) -> str:
        """Returns the SQL for the tables' owner, or a superuser: role, grants, publications."""
        return owners_sql(self.load(), self.inventory, self.tables, {})

    def _publications(self) -> Iterator[str]:
        keyed = [table for table in self.tables if table.identity]
        keyless = [table for table in self.tables if not table.identity]
        if keyed:
            yield from self._publication("pub", keyed)
        if keyless:
            yield from self._publication("inserts_pub", keyless, publish="[insert, truncate]")

    def _publication(
        self, suffix: str, tables: Iterable[FoundTable], publish: str | None = None
    ) -> Iterator[str]:
        tables = list(tables)
        yield f"    - name: {self.pipeline}_{suffix}"
        if publish is not None:
            yield f"      publish: {publish}  # updates and deletes need a key"
        if any(table.is_root for table in tables):
            yield "      publish_via_partition_root: true  # a partitioned table is one target"
        yield "      tables:"
        for number, table in enumerate(tables):
            yield f"        # {on_one_line(facts_of(table))}"
            for note in notes_of(table):
                yield f"        # {on_one_line(note)}"
            yield f"        - name: {_scalar(str(table.id))}"
            if self.where is not None:
                yield f"          where: {_scalar(self.where)}"
            elif number == 0:
                over = " over columns of the key" if table.identity and not table.is_full else ""
                yield f"          # where: <row filter in SQL{over}>"
            if number == 0:
                yield "          # columns: [<columns to replicate; by default all>]"

    def _exclusion_lines(self) -> list[str]:
        reasons = [f"{table}: {reason}" for table, reason in self.inventory.excluded.items()]
        lines = ["Left out:", *map(on_one_line, reasons[:_MOST_EXCLUDED])] if reasons else []
        surplus = len(reasons) - _MOST_EXCLUDED
        return [f"    # {line}" for line in lines + [f"and {surplus} more"] * (surplus > 0)]


def _scalar(text: str) -> str:
    """Returns a text as YAML writes it on one line.

    >>> _scalar("public.orders"), _scalar('public."Odd: name"')
    ('public.orders', '"public.\\\\"Odd: name\\\\""')
    """
    if _PLAIN.match(text) and yaml.safe_load(text) == text:
        return text
    return yaml.safe_dump(text, default_style='"', width=1 << 30, allow_unicode=True).strip()


def facts_of(table: FoundTable) -> str:
    """Returns rows, size, key and replica identity in one line."""
    relation, whole = table.relation, table.size_bytes + table.toast_bytes
    rows = "not analyzed yet" if table.rows is None else f"≈ {counted(table.rows, 'row')}"
    identity = _IDENTITIES[relation.replica_identity]
    return f"{rows}, {size(whole)}, {_key_of(relation)}, replica identity {identity}"


def _key_of(relation: CatalogRelation) -> str:
    """Returns the columns that identify rows; with replica identity full, all of them do."""
    if relation.primary_key:
        return f"key ({', '.join(relation.primary_key)})"
    if relation.replica_identity == "i" and relation.identity_columns:
        return f"key of an index ({', '.join(relation.identity_columns)})"
    return "key of all columns" if relation.replica_identity == "f" else "no key"


def notes_of(table: FoundTable) -> Iterator[str]:
    """Yields a line for each thing to know before the table is replicated."""
    if not table.identity:
        is_uneven = table.relation.identity_columns and not table.is_identity_generated
        remedy = "give all the same" if is_uneven else table.relation.to_be_identified(table.id)
        yield (
            f"{why_keyless(table)}, so only inserts and truncates are published: {remedy}; then"
            " move it to the first publication"
        )
    elif table.is_full:
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
    stored = [(column, target_type(column.type)) for column in table.relation.columns]
    if texts := [
        f"{column.name} ({column.type.name})"
        for column, kind in stored
        if kind.is_text and not isinstance(kind, Characters)
    ]:
        yield f"text in the lake: {first_of(texts)}"
    if moments := [
        column.name
        for column, kind in stored
        if column.name in table.identity and kind.may_be_raw and not isinstance(kind, Array)
    ]:
        yield (
            f"a copy stops at a value of key column {', '.join(moments)} that the lake's type can't"
            " hold (infinity, NaN): name it under target.types.text if there are such"
        )
    if table.has_row_security:
        yield "row-level security: the role needs bypassrls where a policy hides rows from it"


def why_keyless(table: FoundTable) -> str:
    """Returns why nothing identifies a table's old rows."""
    if not table.relation.identity_columns:
        return table.relation.why_unidentified
    if table.is_identity_generated:
        return "a generated column is part of its replica identity"
    return "its partitions have another replica identity than the root"


def reader_of(inventory: Inventory, tables: Sequence[FoundTable], pipeline: str) -> str:
    """Returns the role that a pipeline reads with: the connection's own, or another one, which the
    SQL creates, where the own may do too much.
    """
    may_do_much = inventory.server.superuser or any(table.relation.owned for table in tables)
    return f"{pipeline}_reader" if may_do_much else inventory.server.role


def owners_sql(
    file: PipelineFile,
    inventory: Inventory,
    tables: Sequence[FoundTable],
    actual: Mapping[str, PublicationState],
) -> str:
    """Returns the script for a pipeline file with these tables.

    ``actual`` are its publications that exist. The slot isn't part of the script: the role creates
    it by ``setup``, once a run will read it.
    """
    reader = reader_of(inventory, tables, file.pipeline)
    role = sql_name(reader)
    database = on_one_line(inventory.server.database)
    again = on_one_line(f"waldelta init {file.source.conn_id} --sql FILE")
    lines = [
        f"{HEADER}; after a change of the pipeline file, `{again}` writes it again.",
        f"-- Run it by psql -f in database {database}.",
        # The script of the publications begins with this line, too; grants must stop at the first
        # error as well.
        STOP_ON_ERROR,
        "-- By a superuser: the role that reads, and its grants.",
    ]
    if reader not in inventory.roles:
        lines.append(f"create role {role} login;  -- then set its password: \\password {role}")
    lines += statements(role, _needs(inventory, tables))
    lines.append("-- By the tables' owner, or a superuser: the publications.")
    lines += _publications(file, actual)
    return "\n".join([*lines, *_identities(file, tables), ""])


def _needs(inventory: Inventory, tables: Sequence[FoundTable]) -> Iterator[Need]:
    on_rds = "on Amazon RDS instead: grant rds_replication"
    yield RoleAttribute("replication", f"for the slot; {on_rds}")
    if any(table.has_row_security for table in tables):
        yield RoleAttribute("bypassrls", "row-level security would hide rows from copies")
    yield Grant("connect on database", sql_name(inventory.server.database))
    for schema in sorted({table.id.schema for table in tables}):
        yield Grant("usage on schema", sql_name(schema))
    for table in tables:
        name = sql_name(table.id.schema, table.id.name)
        yield Grant("select on", name, "for copies, repairs, and missing values")
    for table in tables:
        if table.is_root:
            yield from needs_of(table.leaves)


def _publications(file: PipelineFile, actual: Mapping[str, PublicationState]) -> Iterator[str]:
    publications = [
        wanted_publication(file.pipeline, entry, file.source.slot)
        for entry in file.source.publications
        if entry.manage
    ]
    planned = plan_publications(publications, actual)
    if not planned:
        yield "-- They are as the pipeline file says."
        return
    script = SetupPlan((), planned, create_slot=False, source=file.source).as_sql()
    yield script.removeprefix(f"{STOP_ON_ERROR}\n")


def _identities(file: PipelineFile, tables: Sequence[FoundTable]) -> Iterator[str]:
    keyless = [
        table
        for table in tables
        if not table.identity
        and not any(
            {"update", "delete"} & set(entry.publish)
            for entry in file.source.publications
            if entry.entries_of((table.id.schema, table.id.name))
        )
    ]
    if keyless:
        yield "-- To replicate updates and deletes of the other tables too:"
    for table in keyless:
        for relation in dict.fromkeys([table.id, *(leaf.id for leaf in table.leaves)]):
            name = sql_name(relation.schema, relation.name)
            yield f"-- {on_one_line(f'alter table {name} replica identity full;')}"


# --- the inventory


def read_inventory(conn: Connection, conninfo: str) -> Inventory:
    """Query the database about its tables; changes nothing, and waits for no locked table.

    Raises NotPrimary on a standby.
    """
    conn.read_only = True
    with limited(conn, "statement_timeout", _STATEMENT_TIMEOUT_S):
        return read_around(conn, _LOCK_TIMEOUT_S, partial(_read, conn, conninfo))[0]


def _read(conn: Connection, conninfo: str, locked: frozenset[int]) -> Inventory:
    with conn.transaction():
        server = read_server(conn)
        if server.in_recovery:
            raise NotPrimary(f"{describe(conninfo)} is a standby: name the primary's connection")
        facts = {row.oid: row for row in fetch(conn, _TABLES, {"locked": list(locked)})}
        relations = {relation.id: relation for relation in read_relations(conn, list(facts))}
        reasons = {table_id: _reasons(relation) for table_id, relation in relations.items()}
        fit = [relations[table_id] for table_id, grounds in reasons.items() if not grounds]
        leaves = read_leaves(conn, [relation.oid for relation in fit], locked=locked)
        tables = [
            _table(conn, relation, leaves[relation.oid], facts[relation.oid], locked)
            for relation in fit
        ]
        return Inventory(
            server,
            tuple(sorted(tables, key=attrgetter("id"))),
            {table_id: grounds[0] for table_id, grounds in sorted(reasons.items()) if grounds},
            *map(frozenset, conn.execute(_TAKEN).fetchall()[0]),
        )


def _table(
    conn: Connection,
    relation: CatalogRelation,
    leaves: tuple[Leaf, ...],
    facts: Any,
    locked: frozenset[int],
) -> FoundTable:
    oids = {relation.oid, *(leaf.oid for leaf in leaves)}
    rows = None if facts.rows < 0 else facts.rows
    main = sum(leaf.size_bytes for leaf in leaves)
    # The planner would wait for a table's lock, and may query the server of a foreign partition. It
    # calls functions of the table's owner, which must not run as a superuser.
    is_local = all(leaf.relkind == "r" for leaf in leaves)
    if is_local and not main and locked.isdisjoint(oids):
        # The planner assumes that rows are being added to an empty table, so its estimate is not
        # used.
        rows = 0
    elif (
        rows is not None
        and facts.readable
        and is_local
        and locked.isdisjoint(oids)
        and not is_superuser(conn)
    ):
        only = sql.SQL("select from only {}" if relation.relkind == "r" else "select from {}")
        rows = planned_rows(conn, only.format(relation.id.identifier))
    wide = facts.wide if facts.is_analyzed else ()
    if not wide and facts.toast_bytes > _TOASTED_SHARE * (main + facts.toast_bytes):
        wide = facts.toastable
    return FoundTable(
        relation, leaves, rows, facts.toast_bytes, tuple(wide), facts.has_row_security
    )


def _reasons(relation: CatalogRelation) -> list[str]:
    publishes_nothing = all(column.generated for column in relation.columns)
    judged = {
        "a foreign table, whose changes aren't in this server's WAL": relation.relkind == "f",
        "a materialized view, which can't be published: replicate its tables": (
            relation.relkind == "m"
        ),
        "unlogged, so its changes aren't in the WAL: alter table … set logged": (
            relation.persistence == "u"
        ),
        "it belongs to an extension": relation.extension_owned,
        "it publishes no column, and a Delta table needs one": publishes_nothing,
    }
    names = clashes(relation.column_names, metadata_columns=True)
    return [*(reason for reason, applies in judged.items() if applies), *names]


_TAKEN = b"""
select array(select pubname::text from pg_publication),
       array(select slot_name::text from pg_replication_slots),
       array(select rolname::text from pg_roles)
"""

# Oids below 16384 belong to the system. A partition is listed as its root, unless that is foreign
# to publications. pg_stats shows only what the role may read.
_TABLES = f"""
with recursive tree (root, oid) as (
    select c.oid, c.oid
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace
    where c.oid >= 16384
      and c.relkind in ('r', 'p', 'f', 'm')
      and c.relpersistence <> 't'
      and not c.relispartition
      and n.nspname !~ '^pg_'
      and n.nspname <> 'information_schema'
    union all
    select t.root, i.inhrelid
    from tree t
    join pg_class p on p.oid = t.oid and p.relkind = 'p'
    join pg_inherits i on i.inhparent = t.oid and not i.inhdetachpending
)
select c.oid,
       c.relrowsecurity as has_row_security,
       has_schema_privilege(c.relnamespace, 'usage') and has_table_privilege(c.oid, 'select')
         and not row_security_active(c.oid) as readable,
       s.rows::bigint as rows,
       s.toast_bytes::bigint as toast_bytes,
       exists (select from pg_stats p where p.schemaname = n.nspname and p.tablename = c.relname)
         as is_analyzed,
       array(
           select distinct p.attname::text
           from pg_stats p
           where p.schemaname = n.nspname and p.tablename = c.relname
             and p.avg_width >= {_WIDE_BYTES}
       ) as wide,
       array(
           select a.attname::text
           from pg_attribute a
           where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
             and a.attstorage in ('x', 'e')
           order by a.attnum
       ) as toastable
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
cross join lateral (
    select case when bool_or(l.reltuples < 0) then -1 else coalesce(sum(l.reltuples), 0) end
             as rows,
           coalesce(sum(pg_relation_size(x.oid)), 0) as toast_bytes
    from tree t
    join pg_class l on l.oid = t.oid and l.relkind <> 'p'
    left join pg_class x on x.oid = l.reltoastrelid and x.oid <> all(%(locked)s::oid[])
    where t.root = c.oid
) s
where c.oid in (select root from tree)
order by n.nspname, c.relname
"""  # noqa: S608 - no value in it

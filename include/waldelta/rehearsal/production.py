"""What a rehearsal takes from production: the schema, and how large its tables are.

Everything is read in one snapshot, in transactions that PostgreSQL itself keeps read-only.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from waldelta.errors import ConfigError
from waldelta.postgres import Connection, TableId, connect, named_loss
from waldelta.quantities import size
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres, local_versions
from waldelta.rehearsal.generated_rows import WritableTable
from waldelta.rehearsal.migration import SqlCommand, read_sql, statements
from waldelta.rehearsal.scratch_server import role_comment
from waldelta.stages.setup.facts.source_facts import read_server

_READ_ONLY = "-c default_transaction_read_only=on"
_DUMPED_BY = re.compile(r"^-- Dumped from database version (\d+)", re.MULTILINE)
# Commands by which pg_dump's output talks to psql alone.
_OF_PSQL = re.compile(r"^\\(restrict|unrestrict|connect)\b.*$", re.MULTILINE)
_NAME = r'(?:"(?:[^"]|"")+"|[\w$]+)'
# Roles stand after these words of a statement that begins so; the first one that fits counts.
_ROLES = tuple(
    (
        re.compile(rf"(?:{begin})\b", re.IGNORECASE),
        re.compile(rf"\b(?:{words})\s+({_NAME}(?:\s*,\s*{_NAME})*)", re.IGNORECASE),
    )
    for begin, words in (
        (r"grant|revoke|alter\s+default", r"to|from|for\s+role"),
        (r"(?:create|alter)\s+policy", "to"),
        (r"alter|create\s+schema", r"owner\s+to|authorization"),
    )
)
_NO_ROLES = {"public", "session_user", "current_user", "current_role", "none"}
# What the dump of a whole server has, and what would connect to another one.
_SKIPPED = (("create", "database"), ("alter", "database"), ("create", "subscription"))


@dataclass(frozen=True, slots=True)
class TableSize:
    """A table at the source, its partitions included."""

    rows: int
    bytes: int


# What copies read in a second, where no copy of the pipeline is known.
COPIED_PER_SECOND = 50 << 20
# A copy of fewer rows says nothing about the time of a large one.
_TELLING_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Production:
    """The schema as SQL, and, where a connection gave it, the sizes of tables by name.

    ``version`` is the server's major version, ``source`` what the schema was read from, ``copies``
    the rows and seconds of each target's last copy, and ``rows`` are samples of tables as COPY
    writes them, by table and column list. ``reads_hidden_rows`` is whether the pipeline's role is
    known to read the rows that policies hide from others.
    """

    schema: str = field(repr=False)
    source: str
    version: int | None
    sizes: Mapping[str, TableSize] = field(default_factory=dict)
    copies: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    wal_bytes_per_hour: int | None = None
    rows: Mapping[TableId, tuple[Sequence[str], bytes]] = field(default_factory=dict, repr=False)
    reads_hidden_rows: bool = False

    def copy_time(self, name: str) -> tuple[float, str]:
        """Returns the seconds that a copy of a table with a known size takes, and at which speed.

        That is the speed of its last copy, else of all tables' copies, else an assumption.
        """
        at = self.sizes[name]
        measured = {
            table: (copied, seconds)
            for table, (copied, seconds) in self.copies.items()
            if copied >= _TELLING_ROWS and seconds > 0 and table in self.sizes
        }
        if name in measured:
            copied, seconds = measured[name]
            return at.rows * seconds / copied, "at the speed of its last copy"
        read = sum(
            self.sizes[table].bytes * copied / max(copied, self.sizes[table].rows)
            for table, (copied, _) in measured.items()
        )
        if read:
            seconds = sum(seconds for _, seconds in measured.values())
            return at.bytes * seconds / read, "at the speed of this pipeline's copies"
        return (
            at.bytes / COPIED_PER_SECOND,
            f"at an assumed {size(COPIED_PER_SECOND)} in a second",
        )


def read_schema_file(path: Path) -> Production:
    """Returns the schema in a file of ``pg_dump --schema-only``, or in any file of SQL.

    Raises ConfigError as read_sql() does.
    """
    text = read_sql(path)
    match = _DUMPED_BY.search(text)
    return Production(text, str(path), int(match[1]) if match else None)


def read_production(conninfo: str, sample: int = 0, tables: Sequence[TableId] = ()) -> Production:
    """Returns the schema of a database by pg_dump, the sizes of its tables, and samples of rows.

    Raises SourceUnreachable and other errors of the connection, and ConfigError where this machine
    has no pg_dump that is as new as the server, or where pg_dump fails.
    """
    with named_loss(conninfo), connect(conninfo, "waldelta rehearse") as connection:
        connection.execute("set default_transaction_read_only = on")
        with _snapshot(connection) as snapshot:
            server = read_server(connection)
            version = server.version // 10_000
            at = f"the connection to {connection.info.host or 'the socket'}"
            schema = _dump(conninfo, version, snapshot)
            sizes = {
                str(TableId(schema, name)): TableSize(int(rows), int(bytes_))
                for schema, name, rows, bytes_ in connection.execute(_SIZES).fetchall()
            }
            rows = {
                table: _sample(connection, table, columns, sample)
                for table in tables
                if sample and (columns := _readable_columns(connection, table))
            }
    return Production(
        schema, at, version, sizes, {}, server.wal_bytes_per_hour, rows, server.bypass_rls
    )


@contextmanager
def _snapshot(connection: Connection) -> Iterator[str]:
    connection.execute("begin isolation level repeatable read, read only")
    try:
        ((snapshot,),) = connection.execute("select pg_export_snapshot()").fetchall()
        yield str(snapshot)
    finally:
        if not connection.closed:
            connection.execute("rollback")


def _dump(conninfo: str, version: int, snapshot: str) -> str:
    newer = [one for one in local_versions() if one >= version]
    if not newer:
        raise ConfigError(
            f"the source is PostgreSQL {version}, and this machine has no pg_dump of that version:"
            f" run `pg_dump --schema-only` elsewhere and pass its output with --schema"
        )
    program = EmbeddedPostgres(Path(), newer[0]).bin / "pg_dump"
    # Other users see the arguments of a process, and neither its environment nor this file. It has
    # no name, so it is gone with the process.
    with tempfile.TemporaryFile("w") as service:
        fields = conninfo_to_dict(conninfo)
        service.write("[source]\n" + "".join(f"{name}={value}\n" for name, value in fields.items()))
        service.seek(0)
        process = subprocess.run(
            [program, "--schema-only", f"--snapshot={snapshot}", "--dbname=service=source"],
            capture_output=True,
            check=False,
            pass_fds=[service.fileno()],
            env={
                **os.environ,
                "PGSERVICEFILE": f"/dev/fd/{service.fileno()}",
                "PGOPTIONS": _READ_ONLY,
                "PGCLIENTENCODING": "UTF8",
            },
        )
    if process.returncode:
        text = process.stderr.decode(errors="replace").strip()
        raise ConfigError(
            f"pg_dump of the source's schema failed: {text}: let another role run `pg_dump"
            " --schema-only`, and pass its output with --schema"
        )
    return process.stdout.decode()


def _readable_columns(connection: Connection, table: TableId) -> list[str]:
    """Returns the stored columns of a table, none where the role can't read all of them."""
    rows = connection.execute(_STORED_COLUMNS, [table.schema, table.name]).fetchall()
    return [name for name, _ in rows] if all(readable for _, readable in rows) else []


def _sample(
    connection: Connection, table: TableId, columns: Sequence[str], rows: int
) -> tuple[Sequence[str], bytes]:
    query = sql.SQL("copy (select {} from {} limit {}) to stdout").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)), table.identifier, rows
    )
    with connection.cursor().copy(query) as copy:
        return columns, b"".join(bytes(part) for part in copy)


def load_schema(connection: Connection, production: Production) -> None:
    """Make the schema's objects, and the roles that it names.

    In a dump without privileges, owners of tables get those on their schemas. Raises ConfigError
    with the line of a statement that the scratch server refuses.
    """
    text, has_grants = _OF_PSQL.sub("", production.schema), False
    for statement in statements(text, production.source):
        words = statement.text.lower().split(maxsplit=3)
        if tuple(words[:2]) in _SKIPPED:
            continue
        make_roles(connection, statement)
        has_grants |= words[0] == "grant"
        try:
            connection.execute(statement.text)
        except psycopg.errors.DuplicateSchema:
            continue
        except psycopg.Error as err:
            # A setting of a newer server than this one.
            if words[0] == "set" and isinstance(err, psycopg.errors.UndefinedObject):
                continue
            raise _refusal(statement, words, err) from None
    connection.execute("reset all")
    if not has_grants:
        for owner, schema in connection.execute(_OWNERS).fetchall():
            grant = sql.SQL("grant usage, create on schema {} to {}")
            connection.execute(grant.format(sql.Identifier(schema), sql.Identifier(owner)))


def _refusal(statement: SqlCommand, words: Sequence[str], err: psycopg.Error) -> ConfigError:
    remedy = "correct the schema"
    if words[:2] == ["create", "extension"]:
        remedy = (
            "pass --scratch with the connection of a server that has the extension, or a --schema"
            " without it"
        )
    return ConfigError(
        f"{statement.place}: the scratch server refuses the schema ({err.diag.message_primary}):"
        f" {remedy}"
    )


def make_roles(connection: Connection, statement: SqlCommand) -> None:
    """Make the roles that a statement names and that aren't there: no dump of a schema has them."""
    for role in named_roles(statement.text):
        if not connection.execute("select from pg_roles where rolname = %s", [role]).fetchall():
            make = sql.SQL("create role {0} login; comment on role {0} is {1}")
            mark = role_comment(connection.info.dbname)
            connection.execute(make.format(sql.Identifier(role), mark))


def named_roles(text: str) -> list[str]:
    """Returns the roles that get, lose or own something by a statement.

    >>> named_roles('alter table t owner to "the app"'), named_roles("alter table t rename to u")
    (['the app'], [])
    """
    pattern = next((words for begin, words in _ROLES if begin.match(text)), None)
    roles = [
        name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()
        for listed in (() if pattern is None else pattern.findall(text))
        for name in re.findall(_NAME, listed)
    ]
    return [role for role in roles if role not in _NO_ROLES and not role.startswith("pg_")]


def load_rows(
    connection: Connection, tables: Sequence[WritableTable], production: Production
) -> list[WritableTable]:
    """Write the samples of rows; returns the tables that got none."""
    empty = []
    connection.execute("set session_replication_role = replica")
    for table in tables:
        if (sample := production.rows.get(table.id)) is None:
            empty.append(table)
            continue
        columns = sql.SQL(", ").join(map(sql.Identifier, sample[0]))
        query = sql.SQL("copy {} ({}) from stdin").format(table.id.identifier, columns)
        try:
            with connection.cursor().copy(query) as copy:
                copy.write(sample[1])
        except psycopg.Error:
            empty.append(table)
    connection.execute("reset session_replication_role")
    return empty


# pg_partition_tree() has no row for a table that is neither partitioned nor a partition.
_SIZES = """
select n.nspname, c.relname,
       sum(greatest(coalesce(p.reltuples, c.reltuples), 0)),
       sum(pg_total_relation_size(coalesce(p.oid, c.oid)))
from pg_class c join pg_namespace n on n.oid = c.relnamespace
left join lateral pg_partition_tree(c.oid) t on t.isleaf
left join pg_class p on p.oid = t.relid
where c.relkind in ('r', 'p') and n.nspname <> 'information_schema' and n.nspname !~ '^pg_'
group by n.nspname, c.relname
"""
_OWNERS = """
select distinct pg_get_userbyid(c.relowner), n.nspname
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and n.nspname <> 'information_schema' and n.nspname !~ '^pg_'
"""
_STORED_COLUMNS = """
select a.attname, has_column_privilege(c.oid, a.attnum, 'select')
from pg_attribute a join pg_class c on c.oid = a.attrelid
join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %s and c.relname = %s and a.attnum > 0 and not a.attisdropped
  and a.attgenerated = ''
order by a.attnum
"""

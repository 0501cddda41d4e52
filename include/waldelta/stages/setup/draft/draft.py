"""Draft: a pipeline file for some tables of a database, as text with comments, and the SQL that its
reading role and its publications need.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.grants import Attribute, Grant, Need, on_one_line, sql_name, statements
from waldelta.postgres.connection import NAME_BYTES
from waldelta.stages.setup import SetupPlan
from waldelta.stages.setup.draft.inventory import FoundTable, Inventory
from waldelta.stages.setup.draft.notes import facts_of, notes_of
from waldelta.stages.setup.facts.publications import plan_publications, wanted_publication
from waldelta.stages.setup.setup import STOP_ON_ERROR

DEFAULT_SCHEDULE = "*/5 * * * *"
_PLAIN = re.compile(r"\A[a-z_][a-z0-9_.]*\Z")
_MOST_EXCLUDED = 20


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

    @property
    def slot(self) -> str:
        """Returns the slot's name."""
        return f"{self.pipeline}_cdc"

    @property
    def reader(self) -> str:
        """Returns the role that the SQL grants to: the connection's own, unless that owns all."""
        return f"{self.pipeline}_reader" if self.makes_role else self.inventory.role

    @property
    def makes_role(self) -> bool:
        """Returns whether the SQL creates a role, because the connection's may do too much."""
        owns = any(table.relation.owned for table in self.tables)
        return self.inventory.is_superuser or owns

    def as_yaml(self) -> str:
        """Returns the pipeline file's text."""
        return "\n".join([*self._head(), *self._publications(), *self._tail(), ""])

    def load(self) -> PipelineFile:
        """Returns the file as the product reads it; raises ConfigError for what it refuses."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.pipeline}.yml"
            path.write_text(self.as_yaml(), encoding="utf-8")
            return load_pipeline_file(path)

    def as_sql(self) -> str:
        """Returns the SQL for the owner of the tables, or a superuser: role, grants, publications.

        The slot isn't part of it: the role creates it by ``setup``, once a run will read it.
        """
        role = sql_name(self.reader)
        database = on_one_line(self.inventory.database)
        lines = [f"-- Run it by psql -f in database {database}."]
        # The publications' script begins with it; grants must stop at the first error too.
        lines.append(STOP_ON_ERROR)
        lines.append("-- By a superuser: the role that reads, and its grants.")
        if self.makes_role:
            lines.append(f"create role {role} login;  -- then set its password: \\password {role}")
        lines += statements(role, self._needs())
        lines.append("-- By the tables' owner, or a superuser: the publications.")
        lines.append(self._publications_as_sql().removeprefix(f"{STOP_ON_ERROR}\n"))
        return "\n".join([*lines, *self._identities_as_sql(), ""])

    def _needs(self) -> Iterator[Need]:
        tables = self.tables
        on_rds = "on Amazon RDS instead: grant rds_replication"
        yield Attribute("replication", f"for the slot; {on_rds}")
        if any(table.has_row_security for table in tables):
            yield Attribute("bypassrls", "row-level security would hide rows from copies")
        yield Grant("connect on database", sql_name(self.inventory.database))
        for schema in sorted({table.id.schema for table in tables}):
            yield Grant("usage on schema", sql_name(schema))
        for table in tables:
            name = sql_name(table.id.schema, table.id.name)
            yield Grant("select on", name, "for copies, repairs, and missing values")

    def _publications_as_sql(self) -> str:
        file = self.load()
        wanted = [
            wanted_publication(file.pipeline, entry, file.source.slot)
            for entry in file.source.publications
        ]
        planned = plan_publications(wanted, {})
        return SetupPlan((), planned, create_slot=False, slot=file.source.slot).as_sql()

    def _identities_as_sql(self) -> Iterator[str]:
        keyless = [table for table in self.tables if not table.identity]
        if keyless:
            yield "-- To replicate updates and deletes of tables without a key too:"
        for table in keyless:
            for relation in dict.fromkeys([table.id, *(leaf.id for leaf in table.leaves)]):
                name = sql_name(relation.schema, relation.name)
                yield f"-- {on_one_line(f'alter table {name} replica identity full;')}"

    def _head(self) -> Iterator[str]:
        yield "# Written by `waldelta init`. All keys: docs/reference/pipeline-file.md"
        yield f"pipeline: {_scalar(self.pipeline)}"
        yield "source:"
        yield f"  conn_id: {_scalar(self.conn_id)}"
        yield f"  slot: {self.slot}"
        yield "  publications:"

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
            if number == 0:
                yield "          # where: <row filter in SQL, over columns of the key>"
                yield "          # columns: [<columns to replicate; by default all>]"

    def _tail(self) -> Iterator[str]:
        excluded = self.inventory.excluded
        if excluded:
            yield "    # Left out:"
            for table in excluded[:_MOST_EXCLUDED]:
                yield f"    # {on_one_line(f'{table.id}: {table.reason}')}"
        if len(excluded) > _MOST_EXCLUDED:
            yield f"    # and {len(excluded) - _MOST_EXCLUDED} more"
        yield "target:"
        yield f"  root: {_scalar(self.root)}"
        yield f"schedule: {_scalar(self.schedule)}  # of the DAG, in UTC"


def _scalar(text: str) -> str:
    """Returns a text as YAML writes it on one line.

    >>> _scalar("public.orders"), _scalar('public."Odd: name"')
    ('public.orders', '"public.\\\\"Odd: name\\\\""')
    """
    if _PLAIN.match(text) and yaml.safe_load(text) == text:
        return text
    return yaml.safe_dump(text, default_style='"', width=1 << 30, allow_unicode=True).strip()

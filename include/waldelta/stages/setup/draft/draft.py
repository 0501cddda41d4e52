"""Draft: a pipeline file for some tables of a database, as text with comments, and the SQL that its
reading role and its publications need.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import yaml

from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.errors import ConfigError
from waldelta.grants import on_one_line
from waldelta.postgres.connection import NAME_BYTES
from waldelta.stages.setup.draft.inventory import FoundTable, Inventory
from waldelta.stages.setup.draft.notes import facts_of, notes_of
from waldelta.stages.setup.draft.owners_sql import ReaderRole, owners_sql, reader_of

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
    # The row filter of the only table.
    where: str | None = None

    @property
    def slot(self) -> str:
        """Returns the slot's name."""
        return f"{self.pipeline}_cdc"

    @property
    def reader(self) -> ReaderRole:
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
        return "\n".join([*self._head(), *self._publications(), *self._tail(), ""])

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
            if self.where is not None:
                yield f"          where: {_scalar(self.where)}"
            elif number == 0:
                yield "          # where: <row filter in SQL, over columns of the key>"
            if number == 0:
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

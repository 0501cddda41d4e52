"""Adoption: adds a new table to its publication during a run, as setup would.

Preflight judges each table, so that no adopted table refuses its own UPDATEs and DELETEs. Each
table has its own transaction: what speaks against one doesn't delay the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg

from waldelta.config import Publication
from waldelta.pipeline import Job
from waldelta.postgres import Connection
from waldelta.postgres.table_patterns import MatchedTable
from waldelta.stages.setup.facts import Facts, PublicationState
from waldelta.stages.setup.facts.publications import (
    Mark,
    PublicationTable,
    Statement,
    plan_publications,
    read_marked,
    trial_timeout_ms,
    try_publications,
)
from waldelta.stages.setup.facts.source_facts import read_table_facts
from waldelta.stages.setup.preflight.source import judge_filters, judge_members, privileges_needed

log = logging.getLogger(__name__)

_TO_SET_UP = "run setup, then the initial sync"


def adopt(conn: Connection, job: Job, tables: Sequence[MatchedTable]) -> dict[MatchedTable, str]:
    """Add these tables to their publications; returns why others weren't added, and the remedy."""
    actual = read_marked(conn)
    facts = read_table_facts(conn, actual, [table.id for table in tables])
    refused = {}
    for table in tables:
        state = actual.get(table.publication.name)
        why = (
            _Adoption(conn, job, table, state, facts).carry_out()
            if state is not None and _is_set_up(job, table.publication, state)
            else f"the publication isn't what the pipeline file says now: {_TO_SET_UP}"
        )
        if why is not None:
            refused[table] = why
    return refused


def _is_set_up(job: Job, entry: Publication, state: PublicationState) -> bool:
    """Returns whether setup has run since the publication's entry was written.

    A pattern that was just written may match a whole schema, which is for setup to publish.
    """
    mark = Mark.parse(state.comment)
    return mark is not None and replace(mark, slot="") == Mark.of(job.pipeline.pipeline, entry)


@dataclass(frozen=True, slots=True)
class _Adoption:
    """A new table and the publication that it enters; ``facts`` has the table."""

    conn: Connection
    job: Job
    table: MatchedTable
    publication: PublicationState
    facts: Facts

    def carry_out(self) -> str | None:
        """Add the table to the publication, or return why not, and what to do."""
        if self.table.problem is not None:
            return self.table.problem
        try:
            why = self._refusal() or self._lacks()
            if why is None:
                self._run()
            return why
        except psycopg.errors.LockNotAvailable:
            return "another session locks it: the next run tries again"
        except psycopg.errors.DuplicateObject:  # Somebody else has just added it.
            return None
        except psycopg.Error as err:
            if self.conn.broken:
                raise
            return f"PostgreSQL refused: {err.diag.message_primary}: {_TO_SET_UP}"

    def _refusal(self) -> str | None:
        """Returns what would make setup refuse the table."""
        state, objections = self._wanted(), list[str]()
        unreadable = judge_filters(self.table.publication)
        if not unreadable:  # Only filters that were parsed are sent to the server.
            state, objections = try_publications(self.conn, state)
        judged = [*unreadable, *judge_members(self.job.pipeline, state, self.facts)]
        found = [*objections, *(f.text for f in judged if f.severity == "problem")]
        return f"setup would refuse it: {'; '.join(found)}" if found else None

    def _lacks(self) -> str | None:
        """Returns what the role lacks to add the table, with the SQL for a role that has it."""
        found = privileges_needed(self._wanted(), self.publication, self.facts, changes=True)
        if not (reasons := [finding.text for finding in found]):
            return None
        return f"{'; '.join(reasons)}: let a role that owns both run: {self._statement().text()};"

    def _run(self) -> None:
        limit = str(trial_timeout_ms(self.conn))
        statement = self._statement()
        with self.conn.transaction():
            self.conn.execute("select set_config('lock_timeout', %s, true)", (limit,))
            self.conn.execute(statement.sql)
        log.info("%s", statement.reason)

    def _wanted(self) -> PublicationState:
        wanted = PublicationTable(self.table.id, None, self.table.entry.where)
        return replace(self.publication, tables=(wanted,))

    def _statement(self) -> Statement:
        before = {self.publication.name: self.publication}
        (statement,) = plan_publications([self._wanted()], before)
        return statement

"""Adoption: adds a new table to its publication during a run, as setup would.

Preflight judges each table, so that no adopted table refuses its own UPDATEs and DELETEs. Each
table has its own transaction: what speaks against one doesn't delay the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import psycopg

from waldelta.config import PipelineFile, Publication
from waldelta.config.pipeline_file import TargetTable
from waldelta.errors import SourceError
from waldelta.findings import Finding, merge_privileges, problem, sql_name
from waldelta.lake.ledger import TableState
from waldelta.pipeline import Job
from waldelta.pipeline.targets.target_sources import sources
from waldelta.postgres import (
    Connection,
    allow_views,
    limited,
    read_locked_tables,
    read_published_tables,
)
from waldelta.postgres.publication_checks import MatchedTable
from waldelta.postgres.publication_membership import from_texts
from waldelta.stages.setup.facts.publications import (
    Mark,
    PublicationState,
    PublicationTable,
    Statement,
    plan_publications,
    read_marked,
    trial_timeout_ms,
    try_publications,
)
from waldelta.stages.setup.facts.source_facts import Facts, read_table_facts
from waldelta.stages.setup.preflight.source import (
    judge_filters,
    judge_members,
    judge_privileges,
)
from waldelta.stages.setup.preflight.targets import judge_wheres, plan_targets

log = logging.getLogger(__name__)

# Other tables' changes wait in the slot during adoptions; later runs continue after this time.
ADOPTION_BUDGET_S = 30.0

_TO_SET_UP = "run setup, then the initial sync"


def adopt(conn: Connection, job: Job, tables: Sequence[MatchedTable]) -> dict[MatchedTable, str]:
    """Add these tables to their publications; returns why others weren't added, and the remedy."""
    deadline = time.monotonic() + ADOPTION_BUDGET_S
    actual = read_marked(conn)
    facts = read_table_facts(conn, actual, [table.id for table in tables])
    copied = {oid: state for state in job.read_all_states() for oid in state.relation_ids}
    refused: dict[MatchedTable, str] = {}
    for table in tables:
        state, there = actual.get(table.publication.name), facts.tables.get(table.id)
        former = copied.get(there.relation.oid) if there is not None else None
        why: str | None
        if state is None or not _is_set_up(job, table.publication, state):
            why = f"the publication isn't what the pipeline file says now: {_TO_SET_UP}"
        elif former is not None and there is not None:
            # A DBA may have removed the table because its changes filled the slot.
            how = _removal_of(former, there.relation.oid)
            why = f"it was published before, and was {how}: {_TO_SET_UP}, or exclude it"
        elif time.monotonic() > deadline:
            why = f"{ADOPTION_BUDGET_S:g} s were spent on other new tables: the next run continues"
        else:
            why = _Adoption(conn, job, table, state, facts).carry_out()
        if why is not None:
            refused[table] = why
    return refused


def _removal_of(state: TableState, oid: int) -> str:
    """Returns what took a copied table out of its publication, by the entries that published it."""
    entries = [m.entries for m in from_texts(state.entries) if m.relation == oid]
    # The entry of a table above also names the rows of pg_inherits through which it applied.
    was_partition = any(
        entry.startswith("table ") and len(entry.split()) > 2
        for entry in frozenset().union(*entries)
    )
    return "detached from a published table" if was_partition else "removed from the publication"


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
            with limited(self.conn, "lock_timeout", trial_timeout_ms(self.conn) / 1000):
                why = self._refusal()
                if why is None:
                    self._run()
            return why
        except psycopg.errors.LockNotAvailable:
            return "another session locks it: the next run tries again"
        except psycopg.errors.DuplicateObject:  # Another session has just added the table.
            return None
        except psycopg.Error as err:
            if self.conn.closed:
                raise
            return f"PostgreSQL refused: {err.diag.message_primary}: {_TO_SET_UP}"
        except SourceError as err:
            return f"it isn't adopted: {err}"

    def _refusal(self) -> str | None:
        """Returns why setup would refuse the table, or what the role lacks; None if nothing."""
        problems = [finding for finding in self._judge() if finding.severity == "problem"]
        texts = [
            f.text
            for f in merge_privileges(problems, sql_name(self.facts.server.role), for_dba=True)
        ]
        owners = "; ".join(finding.text for finding in problems if finding.lacks == "ownership")
        # A DBA could run the statement although the application's own statements would then fail.
        if owners and all(finding.lacks is not None for finding in problems):
            sql = self._statement().text()
            texts.append(f"{owners}: let a role that owns table and publication run: {sql};")
        return f"it isn't adopted: {'; '.join(texts)}" if texts else None

    def _judge(self) -> Iterator[Finding]:
        trial = self._trial_publication()
        yield from judge_privileges(trial, self.facts)
        unreadable = judge_filters(self.table.publication)
        yield from unreadable
        if not unreadable:  # Only filters that were parsed are sent to the server.
            trial, objections = try_publications(self.conn, trial)
            yield from map(problem, objections)
        yield from judge_members(self.job.pipeline, trial, self.facts)
        yield from self._judge_targets(trial)

    def _judge_targets(self, trial: PublicationState) -> Iterator[Finding]:
        """Yields what preflight finds about the targets of the table, or of its partitions."""
        entries, in_force = self.job.pipeline.target.tables, {trial.name: trial}
        planned = plan_targets(self.conn, self._with_targets({}), in_force, self.facts)
        names = planned.published.keys()
        if conflicts := sorted(names & sources(entries).keys()):
            yield problem(
                f"target.tables.{conflicts[0]}.from: target {conflicts[0]} has rows of another"
                f" table: give it another name, or exclude {self.table.id}"
            )
            return
        pipeline = self._with_targets(
            {n: entries[n] for n in entries if n in names or n == str(self.table.id)}
        )
        planned = plan_targets(self.conn, pipeline, in_force, self.facts)
        yield from planned.findings
        yield from judge_wheres(self.conn, pipeline, planned)

    def _with_targets(self, entries: Mapping[str, TargetTable]) -> PipelineFile:
        target = self.job.pipeline.target.model_copy(update={"tables": entries})
        return self.job.pipeline.model_copy(update={"target": target})

    def _run(self) -> None:
        statement = self._statement()
        with self.conn.transaction():
            allow_views(self.conn)
            self.conn.execute(statement.sql)
            # Another publication may have the table with other columns, which would stop the slot:
            # then nothing is committed.
            if len(names := self.job.pipeline.source.publication_names) > 1:
                read_published_tables(
                    self.conn, names, sizes=False, locked=read_locked_tables(self.conn).relations
                )
        log.info("%s", statement.reason)

    def _trial_publication(self) -> PublicationState:
        member = PublicationTable(self.table.id, None, self.table.entry.where)
        return replace(self.publication, tables=(member,))

    def _statement(self) -> Statement:
        (statement,) = plan_publications([self._trial_publication()], self.facts.actual)
        return statement

"""Setup and teardown: first publications, then the slot, by the difference to what exists.

``plan_setup`` changes nothing. ``apply_setup`` refuses before it changes anything, alters all
publications in one transaction, and creates the slot afterwards: peek and get fail permanently when
a named publication didn't exist at the WAL position they decode. Each step can be interrupted and
repeated.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import psycopg
import tenacity

from waldelta.catalogs.register import check_rights, judge_catalog
from waldelta.config import Publication, Source
from waldelta.errors import PreflightFailed, PrivilegeMissing, SlotMissing, SourceError, TableBusy
from waldelta.failpoints import fault_point
from waldelta.findings import Finding, merge_privileges, on_one_line, problem, sql_name, warning
from waldelta.lake import check_writable
from waldelta.permissions import private_files
from waldelta.pipeline import AdvisoryLock, Job, slot_lock
from waldelta.pipeline.targets import read_lifecycles, read_published, record_removed
from waldelta.postgres import EXCLUSIVE_MODES, Connection, allow_views, limited, lock_holders
from waldelta.postgres.walsender import alter_failover, alter_failover_command
from waldelta.row_filter.runtime_errors import refused_patterns
from waldelta.slot.read.peek import end_old_backends
from waldelta.slot.slot import PLUGIN, read_slot
from waldelta.slot.standby import remaining_on_primary
from waldelta.stages.setup._slot_setup import (
    beyond,
    check_same_server,
    copy_that_stays,
    end_life,
    ensure_slot,
    entries_kept,
    failover_to_set,
    incarnation_events,
    judge_history,
    judge_newer,
    judge_waits,
    read_newer,
    slot_that_stays,
)
from waldelta.stages.setup.estimate import CopyEstimate, estimate_copies
from waldelta.stages.setup.facts.publications import (
    DDL_LOCK_TIMEOUT_MS,
    Mark,
    PublicationState,
    Statement,
    plan_drop,
    plan_publications,
    read_marked,
    read_publications,
    trial_timeout_ms,
    try_publications,
    wanted_publication,
)
from waldelta.stages.setup.facts.source_facts import Facts, ServerFacts, read_facts
from waldelta.stages.setup.preflight.lake import judge_layouts
from waldelta.stages.setup.preflight.source import (
    MIN_VERSION,
    judge,
    judge_filters,
    judge_privileges,
    judge_standby,
)
from waldelta.stages.setup.preflight.targets import (
    JudgeSuite,
    PlannedTargets,
    judge_names,
    judge_replaced,
    judge_suites,
    judge_wheres,
    plan_targets,
    read_only,
)

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")

LOCK_ATTEMPTS = 4
STOP_ON_ERROR = "\\set ON_ERROR_STOP on"


@dataclass(frozen=True, slots=True)
class SetupPlan:
    """Preflight's findings, and the SQL that turns what exists into what is wanted."""

    findings: tuple[Finding, ...]
    statements: tuple[Statement, ...]
    create_slot: bool
    source: Source
    # Whether standbys keep an existing slot from now on; None: unchanged.
    alter_failover: bool | None = None
    # Whether the DBA's script created the existing slot for this pipeline.
    scripted: bool = False
    # The requesting role, as SQL writes it.
    role: str = ""
    # The targets, the slot's server, and what the copies of new targets will cost.
    targets: PlannedTargets = field(default=PlannedTargets({}, {}), repr=False)
    server: ServerFacts | None = field(default=None, repr=False)
    estimate: CopyEstimate | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Returns why setup would be refused."""
        return tuple(f.text for f in self.reported() if f.severity == "problem")

    @property
    def problems_for_dba(self) -> tuple[str, ...]:
        """Returns the problems that no privilege solves."""
        return tuple(f.text for f in self.findings if f.severity == "problem" and f.lacks is None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Returns matters of policy."""
        return tuple(f.text for f in self.findings if f.severity == "warning")

    def reported(self, *, for_dba: bool = False) -> list[Finding]:
        """Returns the findings, with one for all missing privileges.

        ``for_dba``: without findings that the plan's SQL resolves.
        """
        return merge_privileges(self.findings, self.role, for_dba=for_dba)

    @property
    def is_empty(self) -> bool:
        """Returns whether everything is as wanted."""
        return not self.statements and not self.create_slot and self.alter_failover is None

    @property
    def digest(self) -> str:
        """The plan's digest: equal for plans with the same statements, and the same slot to create.

        ``rehearse`` prints it, and ``setup --expect`` requires it.
        """
        parts = [*(one.text() for one in self.statements), self.create_slot, self.alter_failover]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    def as_sql(self) -> str:
        """Returns the plan as a script for psql -f, which stops at the first error; empty without
        changes.

        Use it only for plans whose only problems are missing privileges (``require_for_dba``): a
        DBA may do anything, also what makes the application's statements fail.
        """
        lines = self._publications_as_sql()
        if self.create_slot:
            lines += self._slot_as_sql()
        if self.alter_failover is not None:
            command = alter_failover_command(
                self.source.slot, failover=self.alter_failover
            ).as_string()
            lines.append(
                f"-- in a psql with 'replication=database' in its connection string: {command}"
            )
        # By default psql continues after an error: the slot would be created without its
        # publications, and keep WAL without a reader.
        return "\n".join([STOP_ON_ERROR, *lines]) if lines else ""

    def _publications_as_sql(self) -> list[str]:
        if not self.statements:
            return []
        # A filter's text was checked with standard_conforming_strings on, where backslashes
        # escape nothing.
        standard = "set local standard_conforming_strings = on;"
        lines = ["begin;", f"set local lock_timeout = '{DDL_LOCK_TIMEOUT_MS}ms';", standard]
        for statement in self.statements:
            lines += [f"-- {on_one_line(statement.reason)}", statement.text() + ";"]
        lines.append("commit;")
        if self.create_slot and self.source.read_from is not None:
            # The same file is for the standby too, which can't write what the primary has.
            on_primary = "select not pg_is_in_recovery() as on_primary \\gset"
            return [on_primary, "\\if :on_primary", *lines, "\\endif"]
        return lines

    def _slot_as_sql(self) -> list[str]:
        source = self.source
        flags = f"{source.options.two_phase}" + (", true" if source.failover else "")
        create = (
            f"select pg_create_logical_replication_slot('{source.slot}', '{PLUGIN}', false,"
            f" {flags.lower()})"
        )
        if source.read_from is None:
            return ["-- after the publications, never in their transaction", f"{create};"]
        where = on_one_line(repr(source.read_from))
        return [
            (
                "-- after the publications, once the standby has replayed them: run this"
                f" on the standby of connection {where}; it waits"
            ),
            (
                "-- until the primary has run this (if need be, again): select"
                " pg_log_standby_snapshot()"
            ),
            # A slot created on a primary by mistake would never be read, and keep its WAL.
            f"{create} where pg_is_in_recovery();",
        ]

    def describe(self) -> str:
        """Returns findings and plan as readable text."""
        findings = [f"  - {finding}".replace("\n", "\n    ") for finding in self.reported()]
        script = self.as_sql() or "nothing to do: publications and slot match the pipeline file"
        targets = [f"  - {line}" for line in self.targets.describe()]
        lines = [] if self.estimate is None else self.estimate.describe()
        return "\n".join(
            [
                *(["preflight:", *findings] if findings else ["preflight: no findings"]),
                *(["targets:", *targets] if targets else []),
                "plan:",
                script,
                *(
                    ["initial copy, estimated:", *(f"  - {line}" for line in lines)]
                    if lines
                    else []
                ),
            ]
        )

    def with_estimate(self, job: Job) -> SetupPlan:
        """Returns the plan with an estimate of the initial copy, for which tables are sampled."""
        # A filter that PostgreSQL refuses can't be sampled either.
        if self.server is None or self.problems_for_dba:
            return self
        estimate = estimate_copies(job, self.targets, self.server)
        warnings = () if estimate is None else estimate.findings
        return replace(self, estimate=estimate, findings=(*self.findings, *warnings))

    def require(self, digest: str | None = None) -> None:
        """Raise PreflightFailed with every problem, or when the plan isn't the one that was
        rehearsed, which has this digest.
        """
        if self.problems:
            raise PreflightFailed(self.problems)
        if digest not in (None, self.digest):
            why = (
                f"the plan's digest is {self.digest}, and --expect names {digest}: what setup would"
                " do isn't what was rehearsed; rehearse the pipeline file again"
            )
            raise PreflightFailed([why])

    def require_for_dba(self) -> None:
        """Raise PreflightFailed with the problems that no privilege solves."""
        if self.problems_for_dba:
            raise PreflightFailed(self.problems_for_dba)


def plan_setup(
    conn: Connection, job: Job, judge_suite: JudgeSuite = read_only, *, renew: bool = False
) -> SetupPlan:
    """Plan what setup would do; changes nothing.

    Raises when the server can't be queried, and TableBusy when a table of the publications stays
    locked against readers. ``judge_suite`` says whether own expectations can be evaluated.
    ``renew``: the existing slot will be replaced.
    """
    with (
        job.source.connect_slot("check", conn) as slot_conn,
        limited(conn, "lock_timeout", DDL_LOCK_TIMEOUT_MS / 1000),
    ):
        # Sizes and filters are read under their tables' locks. A caller that carries the plan out
        # also has the slot's lock, so no run lands during that.
        return _with_lock_retry(
            conn,
            partial(_plan_setup, conn, slot_conn, job, judge_suite, renew=renew),
            partial(lock_holders, conn, EXCLUSIVE_MODES, waiting=True),
        )


def _plan_setup(
    conn: Connection, slot_conn: Connection, job: Job, judge_suite: JudgeSuite, *, renew: bool
) -> SetupPlan:
    source, target = job.pipeline.source, job.pipeline.target
    facts = _read_facts(conn, slot_conn, job, renew=renew)
    in_force, objections = _publications_in_force(conn, job, facts)
    managed = [in_force[entry.name] for entry in source.publications if entry.manage]
    filters = [t.row_filter for p in in_force.values() for t in p.tables if t.row_filter]
    facts = replace(facts, refused_patterns=refused_patterns(conn, filters))
    findings = [
        *judge(job.pipeline, facts, in_force),
        *objections,
        *(finding for state in managed for finding in judge_privileges(state, facts)),
        *judge_newer(conn, slot_conn, job, managed, facts),
        *judge_standby(conn, slot_conn, job, facts),
        *(judge_waits(conn) if facts.slot is None else ()),
    ]
    targets, states = PlannedTargets({}, {}), {}
    with suppress(SlotMissing):  # Before the first setup there are no targets.
        states = job.read_states()
    if _can_be_queried(facts):
        targets = plan_targets(conn, job.pipeline, in_force, facts)
        findings += [*targets.findings, *judge_wheres(conn, job.pipeline, targets)]
        findings += judge_layouts(conn, job.pipeline, targets)
        findings += judge_names(job, targets, states)
        if not renew:  # A lost slot is recreated whatever expectations and catalog are.
            findings += judge_suites(job.pipeline, targets, states, judge_suite)
            findings += judge_catalog(
                job, {n: [c.name for c in targets.columns_of(n, target)] for n in targets.sources}
            )
    findings += [*_forgotten(job, facts.actual), *judge_replaced(conn, states.values(), facts)]
    scripted = _is_scripted(slot_conn, job, facts)
    if not renew and not scripted:
        findings += judge_history(job, facts.slot)
    return SetupPlan(
        findings=tuple(dict.fromkeys(findings)),
        statements=plan_publications(managed, facts.actual),
        create_slot=facts.slot is None,
        source=source,
        alter_failover=failover_to_set(source, facts.slot),
        scripted=scripted,
        role=sql_name(facts.server.role),
        targets=targets,
        server=facts.slot_server,
    )


def _read_facts(conn: Connection, slot_conn: Connection, job: Job, *, renew: bool) -> Facts:
    """Returns the source's facts; with ``renew`` as they are once the existing slot is dropped."""
    source = job.pipeline.source
    actual = read_marked(conn) | read_publications(conn, source.publication_names)
    existing = read_slot(slot_conn, source.slot)
    if not renew or existing is None:
        return read_facts(conn, job.pipeline, actual, existing, slot_conn)
    facts = read_facts(conn, job.pipeline, actual, None, slot_conn)
    used_slots = facts.slot_server.used_slots - 1
    return replace(facts, slot_server=replace(facts.slot_server, used_slots=used_slots))


def _can_be_queried(facts: Facts) -> bool:
    """Returns whether the server is a primary of a version that has the catalogs and statements."""
    return not facts.server.in_recovery and facts.server.version >= MIN_VERSION


@private_files()
def apply_setup(
    conn: Connection,
    job: Job,
    judge_suite: JudgeSuite = read_only,
    *,
    expected: str | None = None,
) -> SetupPlan:
    """Bring publications and slot into the wanted state; returns the plan that was carried out.

    Raises PreflightFailed before anything is changed, also when the plan's digest isn't the
    ``expected`` one. Holds the slot's lock during the setup.
    """
    check_writable(job.pipeline.target.root)
    with slot_lock(job) as lock:
        return carry_out(conn, job, lock, judge_suite, expected=expected)


def carry_out(
    conn: Connection,
    job: Job,
    lock: AdvisoryLock,
    judge_suite: JudgeSuite = read_only,
    *,
    renew: bool = False,
    expected: str | None = None,
) -> SetupPlan:
    """Plan and carry out under the slot's lock, which the caller has; ``renew`` recreates the
    slot.
    """
    # A run that lost the lock may still wait for the slot it creates, which has no position until
    # then.
    with job.source.connect_slot("fence", conn) as connection:
        end_old_backends(connection, job.pipeline.source.slot)
    plan = plan_setup(conn, job, judge_suite, renew=renew)
    plan.require(expected)
    if renew:
        with job.source.connect_slot("setup", conn) as slot_conn:
            lock.verify()
            end_life(slot_conn, job)
    else:
        check_rights(job, plan.targets.sources)
    # Recorded before the transaction commits: if setup dies in between, it has recorded too much at
    # most.
    with entries_kept(conn, job) if plan.statements else nullcontext():
        run_statements(conn, plan.statements, before_commit=lambda: _record_removed(conn, job))
    _record_removed(conn, job)  # Record what a DBA changed manually.
    fault_point("setup.publications")
    with job.source.connect_slot("setup", conn) as slot_conn:
        lock.verify()
        ensure_slot(conn, slot_conn, job, scripted=plan.scripted)
    if plan.alter_failover is not None:
        lock.verify()
        alter_failover(job.source.conninfo, plan.source.slot, failover=plan.alter_failover)
        log.info("slot=%s failover=%s", plan.source.slot, plan.alter_failover)
    return plan


@private_files()
def teardown(conn: Connection, job: Job) -> list[str]:
    """Drop the slot and the publications that this pipeline created; returns what was dropped.

    A slot that existed before, publications without this pipeline's mark, and the lake stay. A slot
    that stays keeps WAL, so the last line explains why it stays and how to drop it. Raises
    SourceChanged on another server than the slot's.
    """
    slot = job.pipeline.source.slot
    dropped: list[str] = []
    with slot_lock(job), job.source.connect_slot("teardown", conn) as slot_conn:
        moves = incarnation_events(job)
        check_same_server(slot_conn, moves)
        ours = [p for p in read_marked(conn).values() if _is_ours(job, p)]
        if not_owned := [p.name for p in ours if not p.owned]:
            raise PrivilegeMissing(
                f"publication {', '.join(not_owned)} belongs to another role, nothing was dropped:"
                " let its owner run drop publication, then run teardown again"
            )
        # The slot is dropped first: nothing could read it any more without its publications.
        if end_life(slot_conn, job):
            dropped.append(f"slot {slot}")
        run_statements(
            conn,
            [
                plan_drop(p.name, f"publication {p.name} was made by this pipeline: dropping it")
                for p in ours
            ],
        )
        dropped += [f"publication {p.name}" for p in ours]
        state = read_slot(slot_conn, slot)
        furthest = beyond(job, state) if state is not None else None
        stays = slot_that_stays(state, moves, furthest) + copy_that_stays(slot_conn, slot)
        return dropped + stays + remaining_on_primary(conn, slot_conn, slot)


def run_statements(
    conn: Connection,
    statements: Sequence[Statement],
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Run a plan's statements in one transaction; raises TableBusy when a table stays locked."""
    if not statements:
        return

    def run() -> None:
        # The limit is set outside the transaction: it couldn't be reset in one that has failed.
        with limited(conn, "lock_timeout", DDL_LOCK_TIMEOUT_MS / 1000), conn.transaction():
            allow_views(conn)
            for statement in statements:
                log.info("%s", statement.reason)
                conn.execute(statement.sql)
            before_commit()

    try:
        _with_lock_retry(conn, run)
    except psycopg.errors.InsufficientPrivilege as err:
        raise PrivilegeMissing(
            f"PostgreSQL refused: {err.diag.message_primary}; nothing was changed: let the"
            " owner, or a DBA, run the SQL that setup --sql prints"
        ) from err
    except psycopg.Error as err:
        raise SourceError(
            f"PostgreSQL refused: {err}; no publication was changed: correct the pipeline file"
        ) from err


# --- publications
# ------------------------------------------------------------------------------------------------


def _publications_in_force(
    conn: Connection, job: Job, facts: Facts
) -> tuple[dict[str, PublicationState], list[Finding]]:
    """Returns the publications in force after setup, and PostgreSQL's objections to them."""
    by_name: dict[str, PublicationState] = {}
    objections: list[Finding] = []
    for entry in job.pipeline.source.publications:
        if entry.manage:
            by_name[entry.name], problems = _publication_in_force(conn, job, entry, facts)
            objections += problems
        elif entry.name in facts.actual:
            by_name[entry.name] = facts.actual[entry.name]
    return by_name, objections


def _publication_in_force(
    conn: Connection, job: Job, entry: Publication, facts: Facts
) -> tuple[PublicationState, list[Finding]]:
    """Returns the wanted publication as PostgreSQL prints it, and PostgreSQL's objections."""
    publication = wanted_publication(
        job.pipeline.pipeline, entry, job.pipeline.source.slot, facts.matched
    )
    if unreadable := judge_filters(entry):
        # Only filters that were parsed are sent to the server; the rest of the entry is judged
        # without them.
        return (
            replace(
                publication, tables=tuple(replace(t, row_filter=None) for t in publication.tables)
            ),
            unreadable,
        )
    if not _can_be_queried(facts):
        return publication, []
    current = facts.actual.get(entry.name)
    tried = replace(
        publication, tables=tuple(t for t in publication.tables if t.id in facts.tables)
    )
    state, problems = _with_lock_retry(
        conn, partial(try_publications, conn, tried, current), timeout_ms=trial_timeout_ms(conn)
    )
    absent = [t for t in publication.tables if t.id not in facts.tables]
    return replace(state, tables=tuple(sorted([*state.tables, *absent]))), [
        problem(text) for text in problems
    ]


def _with_lock_retry(
    conn: Connection,
    action: Callable[[], _Found],
    read_holders: Callable[[], str] | None = None,
    timeout_ms: int | None = None,
) -> _Found:
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(psycopg.errors.LockNotAvailable),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=10),
        stop=tenacity.stop_after_attempt(LOCK_ATTEMPTS),
        reraise=True,
    )
    try:
        return attempts(action)
    except psycopg.errors.LockNotAvailable as err:
        holders = read_holders() if read_holders is not None else lock_holders(conn, _IN_THE_WAY)
        raise TableBusy(
            f"a table of the publications stayed locked through {LOCK_ATTEMPTS} attempts of"
            f" {timeout_ms or DDL_LOCK_TIMEOUT_MS} ms; nothing was changed. Locks that stand in the"
            f" way:\n{holders}\nwait until they end, and run setup again"
        ) from err


def _record_removed(conn: Connection, job: Job) -> None:
    with suppress(SlotMissing):  # A slot that doesn't exist yet has no copies to lose.
        record_removed(job, read_lifecycles(job, read_published(conn, job)), recopied=True)


def _is_ours(job: Job, publication: PublicationState) -> bool:
    mark = Mark.parse(publication.comment)
    return mark is not None and mark.pipeline == job.pipeline.pipeline


def _is_scripted(conn: Connection, job: Job, facts: Facts) -> bool:
    """Returns whether the DBA's script created an unread slot for this pipeline.

    The script creates the publications first, whose comments name the slot. A slot older than the
    publications belongs to another program. A slot that follows an earlier setup of this pipeline
    does too: that setup created the publications, and has a ledger row for the slot.
    """
    slot, actual = facts.slot, facts.actual
    if slot is None or job.ledger.slot_events(slot.name):
        return False
    names = [entry.name for entry in job.pipeline.source.publications if entry.manage]
    marks = [Mark.parse(actual[name].comment) if name in actual else None for name in names]
    is_named = all(
        m is not None and (m.pipeline, m.slot) == (job.pipeline.pipeline, slot.name) for m in marks
    )
    is_unread = slot.plugin == PLUGIN and slot.in_this_database and not slot.decoded
    return bool(names) and is_named and is_unread and not read_newer(conn, slot.name, names)


def _forgotten(job: Job, actual: Mapping[str, PublicationState]) -> Iterable[Finding]:
    listed = {e.name for e in job.pipeline.source.publications}
    for name in sorted(
        p.name for p in actual.values() if _is_ours(job, p) and p.name not in listed
    ):
        yield warning(
            f"publication {name!r} was made by this pipeline and is no longer in its file: it"
            " stays; once the slot has been read past this change, drop it by hand"
        )


# CREATE and ALTER PUBLICATION take ShareUpdateExclusive on their tables; these modes conflict with
# it.
_IN_THE_WAY = (
    "ShareUpdateExclusiveLock",
    "ShareLock",
    "ShareRowExclusiveLock",
    "ExclusiveLock",
    "AccessExclusiveLock",
)

"""Source rules: what the source guarantees for the rows of targets, read before the check stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import islice

import psycopg

from waldelta.errors import SourceError, StateError, WaldeltaError
from waldelta.lake.ledger import SYNCED, BatchCut, Decisions, Run, TableState, now
from waldelta.pipeline import Job, RunResult
from waldelta.pipeline.lag import Lag
from waldelta.pipeline.targets import Watermarks
from waldelta.postgres import LOCK_TIMEOUT_S, Connection, read_around
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.slot.health import oldest_unapplied, oldest_unread
from waldelta.slot.standby import slot_position
from waldelta.stages.check.constraints.constraints import (
    ForeignKey,
    read_check_constraints,
    read_declared_types,
    read_enums,
    read_foreign_keys,
)
from waldelta.stages.check.measure.references import (
    ChangedTarget,
    ReferenceFacts,
    plan_references,
    restrict_to_changes,
)
from waldelta.stages.check.suite.expectation import SourceRules

# The most runs whose results are searched for the position of landed transactions: results of an
# older version don't have it.
_MOST_RUNS = 20
_NOT_LANDED = (
    "CHECK constraint {name}: not checked, since changes from before it was created may not have"
    " landed; the next run that lands checks it"
)
# The verbs that check targets while other runs may land changes.
_CONCURRENT_JOBS = ("validate", "maintain", "decide")


def read_rules(
    job: Job, result: RunResult, tables: Sequence[str], merged: Collection[str] = ()
) -> dict[str, SourceRules]:
    """Returns by target the constraints that the source guarantees; empty, with a warning, when the
    source can't be queried.

    ``merged`` are targets that the run merged changes into: their foreign keys are judged only on
    changed rows.
    """
    if not tables:
        return {}
    try:
        states = {name: s for name, s in job.read_states().items() if s.status == SYNCED}
        synced_states = [states[name] for name in tables if name in states]
        landed_as_of = result.landed.landed_as_of or _landed_as_of(job)
        with job.source.connect("check") as connection:
            read = partial(read_check_constraints, connection, synced_states, landed_as_of)
            checks, locked = read_around(connection, LOCK_TIMEOUT_S, read)
            enums = read_enums(connection, synced_states)
            declared = read_declared_types(connection, synced_states, landed_as_of)
            related = {oid for s in synced_states for oid in (*s.relation_ids, s.root_id) if oid}
            keys = read_foreign_keys(connection, related, landed_as_of)
            lag = _lag(job, result, connection, synced_states)
    except (SourceError, psycopg.Error) as err:
        result.warnings.append(
            "constraints, enum labels, declared types and foreign keys weren't checked, since the"
            f" source couldn't be read: {err}"
        )
        return {}
    unread = [n for n, of in checks.items() if any(c.has_landed and not c.expression for c in of)]
    if unread:
        result.warnings.append(
            f"CHECK constraints of {', '.join(sorted(unread))} weren't checked, since other"
            " sessions keep their source tables locked; the next run that changes them checks"
            f" them. Sessions that hold the locks:\n{locked.holders}"
        )
    rules = {}
    for name in (state.table_name for state in synced_states):
        constraints = checks.get(name, [])
        omitted = [_NOT_LANDED.format(name=c.name) for c in constraints if not c.has_landed]
        constraints = [check for check in constraints if check.has_landed and check.expression]
        of = SourceRules(constraints, enums.get(name, {}), declared.get(name, ()), omitted=omitted)
        rules[name] = _with_freshness(job, result, name, of, lag)
    return _with_references(job, result, rules, keys, states, merged) if keys else rules


@dataclass(frozen=True, slots=True)
class _Lag:
    """The lag common to all targets, the seconds of targets that lag more, and why seconds are
    unknown.
    """

    common: Lag
    seconds: Mapping[str, float] = field(default_factory=dict)
    unknown: str | None = None


def _lag(
    job: Job, result: RunResult, connection: Connection, states: Sequence[TableState]
) -> _Lag | None:
    """Measure the lag of the targets.

    A run that lands uses the time of its read, which only it knows. A check that runs concurrently
    uses the oldest commit that the targets lack.
    """
    freshness = job.pipeline.quality.freshness
    looks = result.verb in _CONCURRENT_JOBS
    if result.verb != "consume" and not looks:
        return None
    at = now()
    by_time, by_size = freshness.limits("seconds"), freshness.limits("mb")
    as_of = result.landed.as_of
    lag = Lag.since(None if as_of is None else datetime.fromisoformat(as_of), at)
    lacking, unknown = {}, None
    try:
        if by_size or (looks and by_time):
            with job.source.connect_slot("check", connection) as slot_connection:
                position = slot_position(slot_connection, job, connection)
                if by_size:
                    read = confirmed_lsn(slot_connection, job.pipeline.source.slot)
                    lag = replace(lag, bytes=position.lag_of(result.landed.read_upto(read)))
                if looks and by_time:
                    lacking = oldest_unapplied(job, states)
                    unread = oldest_unread(slot_connection, job, position.flush_lsn)
                    lag = Lag.since(unread or at, at, lag.bytes)
    except (WaldeltaError, psycopg.Error) as err:  # The rest can be judged anyway.
        unknown = str(err)
    of_targets = {name: Lag.since(then, at).seconds or 0.0 for name, then in lacking.items()}
    return _Lag(lag, of_targets, unknown)


def _with_freshness(
    job: Job, result: RunResult, name: str, rules: SourceRules, lag: _Lag | None
) -> SourceRules:
    if lag is None:
        return rules
    notes = (
        [f"freshness: not judged as a whole, since {lag.unknown}"]
        if lag.unknown is not None
        else []
    )
    target_lag = lag.common
    if name in lag.seconds:
        target_lag = replace(target_lag, seconds=max(target_lag.seconds or 0.0, lag.seconds[name]))
    limits = tuple(target_lag.limits(job.pipeline.quality.freshness))
    # The target may lag by more than the commits it is known to lack.
    if lag.common.seconds is None:
        limits = tuple(limit for limit in limits if limit.unit != "seconds" or not limit.is_met)
    if limits and name in result.targets.not_applied:
        limits, notes = (
            (),
            ["freshness: not judged, since this run didn't apply all changes of the target"],
        )
    return replace(rules, freshness=limits, omitted=(*rules.omitted, *notes))


def _landed_as_of(job: Job) -> int:
    """Returns the xid8 below which all transactions are in the newest cut of the slot incarnation.

    Returns 0 when unknown.
    """
    # A run that hasn't applied everything has landed more than its cuts contain.
    complete = (RunResult.from_json(run.result) for run, _ in _runs(job) if run.applied)
    landed = (result.landed.landed_as_of for result in islice(complete, _MOST_RUNS))
    return next((xid for xid in landed if xid), 0)


def _runs(job: Job) -> Iterator[tuple[Run, int]]:
    """Yields the recorded runs that made cuts of the slot incarnation, newest first, and where the
    newest cut of each ends. Maintenance makes cuts too, and applies nothing.
    """
    ends: dict[str, int] = {}
    for run_id, end in job.ledger.cut_ends(job.read_identity().floor):
        ends.setdefault(run_id, end)
    for run_id, end in ends.items():
        run = job.ledger.run_result(run_id)
        if run is not None and run.applied is not None:
            yield run, end


def _with_references(
    job: Job,
    result: RunResult,
    rules: dict[str, SourceRules],
    keys: Sequence[ForeignKey],
    states: dict[str, TableState],
    merged: Collection[str],
) -> dict[str, SourceRules]:
    targets = {name: job.lake.target(name) for name in states}
    quarantine = Decisions(job.lake)
    oids = {oid for key in keys for oid in (key.table_id, key.referenced_id, *key.leaves)}
    related = [state for state in states.values() if oids & {*state.relation_ids, state.root_id}]
    lacking = [
        state.table_name
        for state in related
        if quarantine.lacking(state.table_name, state.generation)
    ]
    completed = [name for name, table in result.tables.items() if table.completed]
    cut = job.ledger.last_cut()
    # A run that applies changes knows its own targets' versions.
    ahead = _beyond_cut(job, related, cut) if result.verb in _CONCURRENT_JOBS else ()
    facts = ReferenceFacts(states, targets, cut, _changed(result, rules), lacking, completed, ahead)
    if job.pipeline.source.options.origin == "none":
        hidden = "changes that reached the source by replication aren't read (options.origin)"
        keys = [replace(key, obstacle=key.obstacle or hidden) for key in keys]
    planned = [*plan_references(keys, facts)]
    # All changes that this run reports and checks come after the newest cut of an earlier run with
    # a recorded result, also those of unreported commits.
    since = (
        next((end for run, end in _runs(job) if run.run_id != job.run_id), None)
        if merged and job.pipeline.target.metadata_columns
        else None
    )
    complete_rules = {}
    for name, of in rules.items():
        of_table = [each for table, each in planned if table == name]
        omitted = [each for each in of_table if isinstance(each, str)]
        begin = since if name in merged else None
        references = [
            restrict_to_changes(r, begin, facts) for r in of_table if not isinstance(r, str)
        ]
        complete_rules[name] = replace(of, references=references, omitted=(*of.omitted, *omitted))
    return complete_rules


def _beyond_cut(job: Job, states: Sequence[TableState], cut: BatchCut | None) -> list[str]:
    """Returns the targets that contain batches after the cut, which other targets still lack.

    A target that can't be read is reported by its own check.
    """
    watermarks, names = Watermarks(job, job.read_identity()), []
    for state in states if cut is not None else ():
        with suppress(StateError):
            if cut is not None and watermarks.of(state) > cut.batch:
                names.append(state.table_name)
    return names


def _changed(result: RunResult, rules: Collection[str]) -> dict[str, ChangedTarget]:
    """Returns, for each checked target, the version that the run committed and whether rows were
    removed.

    A target that the run only checks has no version, and lost no rows.
    """
    return {
        name: ChangedTarget(None, lost_rows=False)
        if (table := result.tables.get(name)) is None
        else ChangedTarget(
            table.version, bool(table.deleted or table.truncated or table.rows is not None)
        )
        for name in rules
    }

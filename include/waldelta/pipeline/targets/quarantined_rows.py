"""Lists quarantined rows with the change they came from, the reason and the decisions; discards
them; and records which gates hold nothing back any more. Releases the changes of a table that a
gate stops.

A failed gate's result is shown on the pages while it stops its table or excludes rows. The table's
next check replaces it. If the failing rows are gone, there may be nothing left to check, for
example when a row was deleted before the merge or left quarantine. Then this module records the
result as met.

A release is by position: everything that has landed by then passes, and later changes are judged
again. Who released it, when and why is recorded.
"""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc

from waldelta.decision_kinds import TABLE
from waldelta.errors import ConfigError, StateError, WaldeltaError
from waldelta.lake import READ_FAILURES
from waldelta.lake.ledger import (
    ACCEPTED,
    ALL_VALUES_KNOWN,
    DISCARDED,
    RELEASED,
    RESOLVED,
    Decision,
    Decisions,
    ExpectationResult,
    Ledger,
    TableState,
    now,
    of_tables,
)
from waldelta.lake.ledger.check_records import VALUES_KNOWN, describe_unknown, read_last_unknown
from waldelta.metadata_columns import LSN
from waldelta.pipeline.advisory_locks import HeldLocks, target_lock
from waldelta.pipeline.job import Job, SlotIdentity
from waldelta.pipeline.targets.lifecycle import target_generations, unknown_tables
from waldelta.pipeline.targets.unreadable_messages import decided, messages_to_acknowledge
from waldelta.pipeline.targets.watermarks import Watermarks, check_same_copy

log = logging.getLogger(__name__)

# The meaning of a gate's result begins with one of these prefixes.
STOP, QUARANTINE = "gate stop: ", "gate quarantine: "


def record_passed(job: Job, tables: Collection[str], *, are_empty: bool = False) -> None:
    """Record the results that excluded rows from these tables as met when no such row is
    quarantined.

    A result that stops a table stays, including one of ``gate: quarantine`` (too many rows, or the
    expectation can't be evaluated), unless the changes ``are_empty``: they left the gate nothing to
    judge.
    """
    with record_or_warn("the end of a gate's stop", tables):
        over, met = [], "no changes wait at this gate any more"
        unmet = _unmet(job, tables)
        generations = target_generations(job.ledger) if unmet else {}
        reasons = Decisions(job.lake).gate_reasons(tables, generations) if unmet else []
        for row in unmet:
            # The gate writes reasons in this form: "fails <what it is called> (<its place>); …".
            called = f" {row.meaning.removeprefix(QUARANTINE)} ("
            aside = [
                (quarantined.run_id == row.run_id, is_open)
                for quarantined, is_open in reasons
                if quarantined.table_name == row.table_name and called in (quarantined.reason or "")
            ]
            excluded = any(is_of_run for is_of_run, _ in aside)
            if (are_empty or excluded) and not any(is_open for _, is_open in aside):
                over.append(
                    replace(
                        row, at=now(), run_id=job.run_id, success=True, observed=met,
                        unexpected_count=0,
                    )
                )  # fmt: skip
        job.ledger.append_all(over)


def judged_by_gates(tables: Collection[str]) -> pc.Expression:
    """Returns the filter for gate results of these tables: they have no version of a target."""
    return of_tables(tables) & pc.field("version").is_null()


def _unmet(job: Job, tables: Collection[str]) -> list[ExpectationResult]:
    """Returns the latest gate results of these tables that are not met or couldn't be evaluated."""
    last = {
        (row.table_name, row.meaning): row
        for row in job.ledger.table(ExpectationResult).read(judged_by_gates(tables))
        if row.meaning.startswith((STOP, QUARANTINE))
    }
    return [row for row in last.values() if not row.success]


@contextmanager
def record_or_warn(what: str, tables: Collection[str]) -> Iterator[None]:
    """Log a warning when recording fails: the work itself is done, and the next check records
    it.
    """
    try:
        yield
    except (WaldeltaError, *READ_FAILURES) as err:
        log.warning(
            "%s can't be recorded for %s before the next check: %s",
            what,
            ", ".join(sorted(tables)),
            err,
        )


def list_quarantined(job: Job, tables: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Returns each quarantined row of all targets, or of these, ready for JSON.

    Raises ConfigError for a table that isn't a target, because an empty list would look like
    success.
    """
    return [row.as_listed() for row in _open_rows(job, chosen_states(job, tables))]


def discard_quarantined(
    job: Job,
    rows: Collection[str] = (),
    tables: Collection[str] | None = None,
    *,
    by: str | None,
    reason: str | None = None,
) -> list[Decision]:
    """Discard quarantined rows: these (by ``id`` of the list), or all of these tables.

    Their targets keep lacking them, and later changes of such a row count as changes of a row that
    the target doesn't have. Discarding a skipped message (by ``id``) marks it as resolved, so that
    no run reports it again. All are discarded, or none. Returns what was recorded. Raises
    ConfigError for rows that aren't open; LockHeld while a run works on a target; StateError while
    a run has not committed what it quarantined.
    """
    messages = messages_to_acknowledge(job, rows)
    settled = decided(job, messages, RESOLVED, by, reason)
    rows_left = set(rows) - {message.row.id for message in messages}
    states = chosen_states(job, tables)
    # When only messages are named, no target's rows are discarded.
    tables_of_rows = _tables_of(_open_rows(job, states), rows_left) if rows_left or not rows else []
    states_of_rows = {name: states[name] for name in tables_of_rows}
    with _lock_targets(job, states_of_rows) as fence:
        open_rows = _open_rows(job, states_of_rows)
        # Raises for a row that a run resolved before the locks were taken.
        _tables_of(open_rows, rows_left)
        rows_to_discard = [row for row in open_rows if not rows or row.id in rows_left]
        _check_committed(job, states_of_rows, rows_to_discard)
        at = now()
        discarded = [row.decided(DISCARDED, job.run_id, at, by, reason) for row in rows_to_discard]
        if settled or discarded:
            Decisions(job.lake).add([*settled, *discarded], fence)
        if discarded:
            record_current(job, {row.table_name for row in discarded})
    return [*settled, *discarded]


@contextmanager
def _lock_targets(job: Job, states: Mapping[str, TableState]) -> Iterator[HeldLocks]:
    """Hold the locks of these targets within the block."""
    with ExitStack() as locks:
        lock_list = [locks.enter_context(target_lock(job, name)) for name in sorted(states)]
        for state in states.values():
            check_same_copy(job, state)
        yield HeldLocks(lock_list)


def rows_to_accept(
    job: Job, rows: Collection[str], tables: Collection[str] | None
) -> list[Decision]:
    """Returns the open rows of these ids, without those that an earlier attempt of this run
    accepted.

    Raises ConfigError for any other id.
    """
    quarantine, states = (
        Decisions(job.lake),
        chosen_states(job, tables),
    )
    accepted_ids = quarantine.ids_decided(job.run_id, ACCEPTED)
    open_rows = _open_rows(job, states)
    _tables_of(open_rows, set(rows) - accepted_ids)
    return [row for row in open_rows if row.id in rows]


def record_current(job: Job, tables: Collection[str]) -> None:
    """Record the current results for quarantined rows of tables, since no other run may do so soon.

    Records how many rows lack values, where an earlier check reported it, and which gates exclude
    no rows any more. The work itself is done by then: if recording fails, the log has a warning,
    and the tables' next check records the result.
    """
    with record_or_warn("the quarantine's current rows", tables):
        record_unknown(job.ledger, job.run_id, read_last_unknown(job.ledger, tables))
    record_passed(job, tables)


def record_unknown(ledger: Ledger, run_id: str, recorded: Mapping[str, str | None]) -> None:
    """Record how many rows of these tables lack values, where it differs from ``recorded``.

    Counts again after each entry, because another process may have recorded a newer count between
    this count and its entry.
    """
    recorded = dict(recorded)
    quarantine = Decisions(ledger.lake)
    while recorded:
        generations = target_generations(ledger)
        counts = quarantine.unknown_counts(
            {name: generations[name] for name in recorded if name in generations}
        )
        new_counts = {
            name: counts.get(name, 0)
            for name in sorted(recorded)
            if recorded[name] != describe_unknown(counts.get(name, 0))
        }
        if not new_counts:
            break
        at = now()
        results = [
            ExpectationResult(
                at,
                run_id,
                name,
                ALL_VALUES_KNOWN,
                VALUES_KNOWN,
                "warning",
                "pipeline",
                not rows,
                describe_unknown(rows),
                None,
                None,
            )
            for name, rows in new_counts.items()
        ]
        ledger.append_all(results)
        recorded |= {name: describe_unknown(rows) for name, rows in new_counts.items()}


def current_user() -> str:
    """Returns the name of this process's user, by LOGNAME or USER if they are set; ``uid <n>`` for
    a user without a name.
    """
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container's user may have no name.
        return f"uid {os.getuid()}"


def chosen_states(job: Job, tables: Collection[str] | None) -> dict[str, TableState]:
    """Returns the states of these targets (None: of all); raises ConfigError for unknown ones."""
    states = job.read_states()
    if unknown := sorted(set(tables or ()) - states.keys()):
        raise unknown_tables(unknown, states)
    return {name: state for name, state in states.items() if tables is None or name in tables}


def _open_rows(job: Job, tables: Collection[str]) -> list[Decision]:
    generations = {
        name: generation
        for name, generation in target_generations(job.ledger).items()
        if name in tables
    }
    return Decisions(job.lake).open_rows(generations)


def _tables_of(decisions: Iterable[Decision], rows: Collection[str]) -> list[str]:
    """Returns the tables of the rows with these ids, or of all rows where no id is given."""
    tables = {row.id: row.table_name for row in decisions}
    if unknown := sorted(set(rows) - tables.keys()):
        raise ConfigError(
            f"not in quarantine: {', '.join(unknown)}: waldelta decide FILE list has the rows that"
            " are"
        )
    return sorted({tables[row] for row in rows or tables})


def _check_committed(job: Job, tables: Iterable[str], rows: Iterable[Decision]) -> None:
    """Raise StateError for rows of a batch that isn't applied: its repetition quarantines them
    again.
    """
    watermarks, generations = Watermarks(job, job.read_identity()), target_generations(job.ledger)
    applied = {
        name: watermarks.of(
            next(
                s
                for s in reversed(job.ledger.table_rows(name))
                if s.generation == generations[name]
            )
        )
        for name in tables
    }
    if early := sorted({row.table_name for row in rows if row.batch > applied[row.table_name]}):
        raise StateError(
            f"{', '.join(early)}: the run that quarantined these rows did not finish: let another"
            " run finish first"
        )


def release_tables(
    job: Job, tables: Collection[str], *, by: str | None, reason: str | None = None
) -> list[Decision]:
    """Let all that has landed for these tables pass their stop gates; the next run merges it.

    Returns what was recorded, for all tables or none. Raises ConfigError for a table that isn't a
    target, StateError when nothing has landed.
    """
    states = chosen_states(job, tables)
    identity = job.read_identity()
    upto = landed_upto(job, identity)
    if not upto:
        raise StateError("no changes have landed, so there is nothing to release")
    at, watermarks = now(), Watermarks(job, identity)
    rows = [
        Decision(
            at,
            job.run_id,
            RELEASED,
            name,
            states[name].generation,
            batch=0,
            key="",
            by=by,
            kind=TABLE,
            why=reason,
            decided_at=at,
            incarnation=identity.incarnation,
            timeline=identity.timeline,
            after_lsn=_applied_upto(watermarks, states[name]),
            upto_lsn=upto,
        )
        for name in sorted(set(tables))
    ]
    Decisions(job.lake).add(rows)
    return rows


def _applied_upto(watermarks: Watermarks, state: TableState) -> int:
    """Returns the position up to which a target has all changes, and its copy's rows."""
    copied = state.snapshot_lsn + 1
    try:
        applied = watermarks.of(state)
    except StateError:  # The target is gone: its next copy has all rows.
        return copied
    ends = watermarks.change_log.reach(watermarks.identity.floor).ends
    return max([copied, *(end for batch, end in ends.items() if batch <= applied)])


def landed_upto(job: Job, identity: SlotIdentity) -> int:
    """Returns where the last landed transaction of this slot incarnation ends; 0 when none has."""
    return job.change_log(identity).end_after(identity.floor)


def valid_releases(job: Job) -> dict[tuple[str, int], Decision]:
    """Returns the latest release of each table and copy generation, of the slot's incarnation and
    timeline: positions of others can't be compared with this one's.
    """
    identity = job.read_identity()
    valid = (identity.incarnation, identity.timeline)
    return {
        (row.table_name, row.generation): row
        for row in sorted(Decisions(job.lake).releases(), key=lambda row: row.upto_lsn)
        if (row.incarnation, row.timeline) == valid
    }


# From the first position, up to and without the second.
PositionRange = tuple[int, int]


def read_decided(ledger: Ledger, states: Iterable[TableState]) -> dict[str, list[PositionRange]]:
    """Returns by table the ranges of LSNs that operators accepted or released in its current copy.

    An accepted row is a range of one LSN. Tables without any are left out.
    """
    copies = {(state.table_name, state.generation) for state in states}
    of_copies = of_tables({name for name, _ in copies})
    rows = ledger.table(Decision).scan(
        ("table_name", "generation", "status", "lsn", "after_lsn", "upto_lsn"),
        None,
        of_copies & pc.field("status").isin([ACCEPTED, RELEASED]),
    )
    decided: dict[str, set[PositionRange]] = {}
    for row in rows.to_pylist():
        if (row["table_name"], row["generation"]) not in copies:
            continue
        if row["status"] == RELEASED:
            decided.setdefault(row["table_name"], set()).add((row["after_lsn"], row["upto_lsn"]))
        elif (lsn := row["lsn"]) is not None:
            decided.setdefault(row["table_name"], set()).add((lsn, lsn + 1))
    return {name: sorted(positions) for name, positions in decided.items()}


def decision_on(positions: Collection[PositionRange]) -> str:
    """Returns what operators did with quarantined rows: "accepted" for a range of one position,
    which is a row's own, and "released" for a longer one, which is a table's.

    >>> decision_on([(1, 2)]), decision_on([(1, 2), (5, 9)])
    ('accepted', 'accepted or released')
    """
    kinds = {"accepted" if upto == after + 1 else "released" for after, upto in positions}
    return " or ".join(sorted(kinds))


def undecided(positions: Collection[PositionRange]) -> str:
    """Returns the condition in Spark SQL that no operator let a row of the target in.

    >>> undecided([(1, 2), (5, 9)])
    'not coalesce(_wd_lsn in (1) or (_wd_lsn >= 5 and _wd_lsn < 9), false)'
    """
    single = [str(after) for after, upto in positions if upto == after + 1]
    inside = [f"{LSN} in ({', '.join(single)})"] if single else []
    inside += [
        f"({LSN} >= {after} and {LSN} < {upto})" for after, upto in positions if upto != after + 1
    ]
    return f"not coalesce({' or '.join(inside)}, false)"

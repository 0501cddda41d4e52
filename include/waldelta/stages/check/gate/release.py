"""Release: an operator lets changes pass that a stop gate holds back; who, when and why is
recorded.

A release is by position: everything that has landed by then passes, and later changes are judged
again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pyarrow.compute as pc

from waldelta.errors import StateError
from waldelta.lake.ledger import (
    ACCEPTED,
    RELEASED,
    Decision,
    Decisions,
    Ledger,
    TableState,
    now,
    of_tables,
)
from waldelta.lake.ledger.decisions import TABLE
from waldelta.metadata_columns import LSN
from waldelta.pipeline import Job, SlotIdentity
from waldelta.pipeline.targets import Watermarks
from waldelta.stages.check.gate.quarantined_rows import chosen_states, current_user


def release_tables(
    job: Job, tables: Collection[str], *, by: str | None = None, reason: str | None = None
) -> list[Decision]:
    """Let all that has landed for these tables pass their stop gates; the next run merges it.

    Returns what was recorded, for all tables or none. ``by`` defaults to the user of this process.
    Raises ConfigError for a table that isn't a target, StateError when nothing has landed.
    """
    states = chosen_states(job, tables)
    identity = job.read_identity()
    upto, by = landed_upto(job, identity), by or current_user()
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
    """Returns by table the positions of rows that operators let into its current copy; tables
    without any are left out.
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
    """Returns what operators decided on the rows at these positions.

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

"""Estimates the initial copy by a sample: rows, bytes, minutes, the WAL kept until it ends, and its
cost for the source.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from waldelta.config.pipeline_file import Target
from waldelta.errors import WaldeltaError, without_values
from waldelta.findings import Finding, warning
from waldelta.pipeline import Job
from waldelta.postgres import Connection
from waldelta.postgres.catalog import read_bytes
from waldelta.postgres.lock_waits import limited, read_around, read_locked_tables
from waldelta.postgres.planner_estimate import planned_rows, rows_where
from waldelta.quantities import counted, duration, first_of, size
from waldelta.snapshot import SnapshotHolder, plan_copy
from waldelta.snapshot.chunks import COPIED_AT_ONCE, bytes_per_task
from waldelta.snapshot.read_table import filter_conditions
from waldelta.stages.setup.estimate._sample import Sample, readers, sample_copy
from waldelta.stages.setup.estimate.planned_copies import PlannedCopy, plan_copies
from waldelta.stages.setup.facts.source_facts import ServerFacts
from waldelta.stages.setup.preflight.targets import PlannedTargets

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 3.0
_MOST_SAMPLED = 4
# A table with a smaller share of all bytes isn't sampled.
_LEAST_SHARE = 0.05
_LOCK_TIMEOUT_S = 1.0
# A shorter time says nothing about the WAL rate; then the server's statistics do.
_LEAST_WAL_SECONDS = 1.0
# What a sync takes besides rows: once, until Spark's Python workers run; and for each table its
# snapshot, plan, commit and ledger rows.
_SECONDS_TO_START = 4.0
_SECONDS_PER_TABLE = 0.4
# Connections of one copy besides its readers: the snapshot, the target's lock, checks.
_CONNECTIONS_PER_COPY = 3


@dataclass(frozen=True, slots=True)
class CopyEstimate:
    """What the initial copy will read, write and cost; ``unknown`` says why there is no estimate.

    ``unread`` are tables that the role can't read, or that couldn't be read now.
    """

    tables: int
    rows: int = 0
    source_bytes: int = 0
    lake_bytes: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0
    sampled: Mapping[str, float] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    wal_bytes_per_minute: float | None = None
    wal_limit_mb: int = -1
    unknown: str | None = None

    @property
    def wal_bytes(self) -> int | None:
        """Returns the WAL that the server will write, and the slot keep, until the copy ends."""
        if self.wal_bytes_per_minute is None:
            return None
        return int(self.wal_bytes_per_minute * self.seconds / 60)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Returns a warning if the slot would be lost before the copy ends."""
        limit, kept = self.wal_limit_mb << 20, self.wal_bytes
        if kept is None or self.wal_limit_mb < 0 or kept <= limit:
            return ()
        return (
            warning(
                f"the initial copy takes about {duration(self.seconds)}, until when the slot keeps"
                f" about {size(kept)} of WAL, but max_slot_wal_keep_size is {size(limit)}: the slot"
                " may be lost before the copy ends. Raise the limit, copy when less is written, or"
                " begin with fewer tables"
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the fields and ``wal_bytes`` by their names: bytes, seconds, and megabytes of
        max_slot_wal_keep_size.
        """
        return {**asdict(self), "wal_bytes": self.wal_bytes}

    def describe(self) -> list[str]:
        """Returns the lines for a plan."""
        if self.unknown is not None:
            return [f"no estimate: {self.unknown}"]
        lines = [self._amount(), self._time(), self._wal(), self._cost()]
        if self.unread:
            lines.append(
                f"without {first_of(self.unread)}, which couldn't be read: missing privilege, or a"
                " lock"
            )
        return lines

    def _amount(self) -> str:
        return (
            f"{counted(self.tables, 'table')}, about {counted(_rounded(self.rows), 'row')}: reads"
            f" {size(self.source_bytes)} on the source, writes about {size(self.lake_bytes)} to"
            " the lake"
        )

    def _time(self) -> str:
        tasks = counted(readers(), "task")
        how = ", ".join(f"{name} for {took:.1f} s" for name, took in self.sampled.items())
        return (
            f"about {duration(self.seconds)} with {tasks} at once on a machine like this, plus the"
            f" start of Spark and uploads to an object store (sample: {how or 'none, all empty'})"
        )

    def _wal(self) -> str:
        rate, kept = self.wal_bytes_per_minute, self.wal_bytes
        if rate is None or kept is None:
            return (
                "WAL that the slot keeps until the copy ends: unknown, the sample was too short for"
                " a rate"
            )
        limit = "no limit" if self.wal_limit_mb < 0 else size(self.wal_limit_mb << 20)
        return (
            f"WAL: the server writes about {size(int(rate))} a minute now, so the slot keeps about"
            f" {size(kept)} until the copy ends (max_slot_wal_keep_size: {limit})"
        )

    def _cost(self) -> str:
        connections = readers() + _CONNECTIONS_PER_COPY * min(self.tables, COPIED_AT_ONCE) + 1
        return (
            f"cost for the source: sequential scans of {size(self.source_bytes)}, up to"
            f" {connections} connections, and snapshots that hold vacuum back for up to"
            f" {duration(self.longest_seconds)}"
        )


def estimate_copies(job: Job, targets: PlannedTargets, server: ServerFacts) -> CopyEstimate | None:
    """Estimate the copies of new targets, reading for some seconds; None without such targets, and
    never an error.

    As a superuser it reads nothing, because planning a query runs functions of the table's owner.
    """
    if server.superuser:
        return CopyEstimate(
            0,
            unknown=f"role {server.role} is a superuser: check as the role that runs the pipeline",
        )
    try:
        with job.source.connect("estimate") as connection:
            plan = partial(plan_copies, connection, job, targets)
            copies, _ = read_around(connection, _LOCK_TIMEOUT_S, plan)
            return _estimate(connection, job, copies, server) if copies else None
    except (WaldeltaError, psycopg.Error) as err:
        log.debug("no estimate", exc_info=err)
        return CopyEstimate(0, unknown=without_values(err))


def _estimate(
    connection: Connection, job: Job, copies: Sequence[PlannedCopy], server: ServerFacts
) -> CopyEstimate:
    sizes = _sizes(connection, [copy for copy in copies if copy.readable])
    readable = [copy for copy in copies if copy.table.oid in sizes]
    began, first = _wal_position(connection)
    sampled = _samples(job, readable, sizes)
    ended, last = _wal_position(connection)
    found = {copy: _of_whole(copy, sample) for copy, sample in sampled.items()}
    known = max(1, sum(sizes[copy.table.oid] for copy in found))
    seconds = sum(one.seconds for one in found.values()) / known
    encoded = sum(one.file_bytes for one in found.values()) / known
    rest = [copy for copy in readable if copy not in sampled]
    for copy, rows in _planned(connection, job.pipeline.target, rest).items():
        own = sizes[copy.table.oid]
        found[copy] = Sample(copy.blocks, rows, int(own * encoded), own * seconds)
    return CopyEstimate(
        tables=len({copy.target for copy in copies}),
        rows=sum(one.rows for one in found.values()),
        source_bytes=sum(sizes[copy.table.oid] for copy in found),
        lake_bytes=sum(one.file_bytes for one in found.values()),
        seconds=_seconds(found),
        longest_seconds=max((_seconds({copy: one}) for copy, one in found.items()), default=0.0),
        sampled={copy.target: one.seconds for copy, one in sampled.items()},
        unread=tuple(sorted({copy.target for copy in copies if copy not in found})),
        wal_bytes_per_minute=_wal_rate(server, last - first, ended - began),
        wal_limit_mb=server.number("max_slot_wal_keep_size"),
    )


def _seconds(copies: Mapping[PlannedCopy, Sample]) -> float:
    """Returns how long copies take together: at the end, some tasks' cores have nothing to do."""
    tasks = sum(
        max(1, -(-copy.table.size_bytes // bytes_per_task(copy.table.size_bytes)))
        for copy in copies
    )
    idle = -(-tasks // readers()) * readers() / max(1, tasks)
    return (
        _SECONDS_TO_START
        + _SECONDS_PER_TABLE * len(copies)
        + idle * sum(one.seconds for one in copies.values())
    )


def _samples(
    job: Job, copies: Sequence[PlannedCopy], sizes: Mapping[int, int]
) -> dict[PlannedCopy, Sample]:
    """Returns samples of the largest tables, each for its share of the time."""
    largest = sorted(copies, key=lambda copy: -sizes[copy.table.oid])[:_MOST_SAMPLED]
    total = max(1, sum(sizes[copy.table.oid] for copy in largest))
    found: dict[PlannedCopy, Sample] = {}
    for copy in largest:
        share = sizes[copy.table.oid] / total
        if not copy.blocks or (found and share < _LEAST_SHARE):
            continue
        with SnapshotHolder(job.source.conninfo, "waldelta estimate") as holder:
            try:
                target = job.pipeline.target
                seconds = SAMPLE_SECONDS * share
                sample = sample_copy(job.source.conninfo, holder, copy, target, seconds)
            except WaldeltaError as err:
                log.info("table=%s can't be sampled: %s", copy.table.id, err)
                continue
        if sample.blocks:
            found[copy] = sample
    return found


def _of_whole(copy: PlannedCopy, sample: Sample) -> Sample:
    """Returns what the whole copy takes, by a sample of it."""
    # A table may have grown since its size was read.
    times = max(1.0, copy.blocks / sample.blocks)
    return Sample(
        copy.blocks,
        round(sample.rows * times),
        round(sample.file_bytes * times),
        sample.seconds * times,
    )


def _planned(
    connection: Connection, target: Target, copies: Sequence[PlannedCopy]
) -> dict[PlannedCopy, int]:
    """Returns the planner's estimate of the rows of copies; locked ones are left out."""
    found = {}
    for copy in copies:
        if not copy.blocks:  # The planner would assume that rows are being added.
            found[copy] = 0
            continue
        options = target.types_of(copy.target)
        conditions = filter_conditions(
            replace(plan_copy(copy.table, "", {}, None, options), where=copy.where)
        )
        read_as = copy.table.read_as.identifier
        relation = sql.SQL("only {}" if copy.table.relkind == "r" else "{}").format(read_as)
        with (
            suppress(psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege),
            limited(connection, "lock_timeout", _LOCK_TIMEOUT_S),
        ):
            rows = sql.SQL("select from {}").format(rows_where(relation, conditions))
            found[copy] = planned_rows(connection, rows)
    return found


def _sizes(connection: Connection, copies: Sequence[PlannedCopy]) -> dict[int, int]:
    """Returns each copy's bytes with TOAST, by its relation, without locked tables."""
    locked = read_locked_tables(connection).relations
    leaves = {copy.table.oid: [leaf.oid for leaf in copy.table.stored_leaves] for copy in copies}
    free = {oid: own for oid, own in leaves.items() if locked.isdisjoint(own)}
    with limited(connection, "lock_timeout", _LOCK_TIMEOUT_S):
        return read_bytes(connection, free)


def _wal_position(connection: Connection) -> tuple[float, int]:
    """Returns the server's clock and how many bytes of WAL were ever written."""
    ((at, position),) = connection.execute(_POSITION).fetchall()
    return float(at), int(position)


def _wal_rate(server: ServerFacts, written: int, seconds: float) -> float | None:
    """Returns the bytes of WAL a minute, by the time of the sample if that was long enough."""
    if seconds >= _LEAST_WAL_SECONDS:
        return written * 60 / seconds
    return None if server.wal_bytes_per_hour is None else server.wal_bytes_per_hour / 60


def _rounded(number: int) -> int:
    """Returns a number with three digits that count.

    >>> _rounded(1_234_567), _rounded(42)
    (1230000, 42)
    """
    return round(number, min(0, 3 - len(str(number))))


_POSITION = """
select extract(epoch from clock_timestamp()), pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')
"""

"""Estimates the initial copy by a sample: rows, bytes, minutes, the WAL kept until it ends, and its
cost for the source.

The publications may not exist yet, so the copies are derived from what preflight planned. A sample
is some blocks of a table, read and encoded as a copy does it; the encoded files are only counted.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from waldelta.config.pipeline_file import Target
from waldelta.errors import SlotMissing, WaldeltaError, without_values
from waldelta.findings import Finding, warning
from waldelta.lake import DataFile
from waldelta.lake.ledger import SYNCED, TableState
from waldelta.pipeline import Job
from waldelta.postgres import (
    Connection,
    PublishedTable,
    limited,
    planned_rows,
    read_around,
    read_bytes,
    read_leaves,
    read_locked_tables,
    rows_where,
)
from waldelta.quantities import counted, duration, first_of, size
from waldelta.snapshot.chunks import COPIED_AT_ONCE, Chunk, bytes_per_task, plan_chunks
from waldelta.snapshot.exported_snapshot import SnapshotHolder
from waldelta.snapshot.read_table import (
    TableCopy,
    filter_conditions,
    plan_copy,
    read_chunks,
    row_groups,
)
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
# In milliseconds: how long a sample waits at most for a table's lock, and for the table's first
# blocks.
_TIMEOUTS_MS = {"lock_timeout": 1_000, "statement_timeout": 10_000}
_MOST_ROWS = 1 << 20  # The most rows of a row group.
# Parts of a table that a sample is spread over.
_PLACES = 256
_LEAST_PLACE_BYTES = 1 << 20
# A reader begins with one block, whose values may be large, and then reads for about this long.
_FIRST_BLOCKS = 1
_SECONDS_PER_READ = 0.25
_MOST_READERS = 8


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A relation that a sync will copy into a target.

    ``where`` is the target's own filter as PostgreSQL reads it.
    """

    target: str
    table: PublishedTable
    where: str | None

    @property
    def readable(self) -> bool:
        """Returns whether the role can read all of it."""
        return all(leaf.readable for leaf in self.table.stored_leaves)

    @property
    def blocks(self) -> int:
        """Returns the blocks of all leaves, without TOAST."""
        return sum(leaf.blocks for leaf in self.table.stored_leaves)


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
        limit, wal = self.wal_limit_mb << 20, self.wal_bytes
        if wal is None or self.wal_limit_mb < 0 or wal <= limit:
            return ()
        return (
            warning(
                f"the initial copy takes about {duration(self.seconds)}, until when the slot keeps"
                f" about {size(wal)} of WAL, but max_slot_wal_keep_size is {size(limit)}: the slot"
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
        """Returns the lines of setup's plan: rows and bytes, time, WAL, and the source's cost."""
        if self.unknown is not None:
            return [f"no estimate: {self.unknown}"]
        tasks = counted(readers(), "task")
        how = ", ".join(f"{name} for {took:.1f} s" for name, took in self.sampled.items())
        connections = readers() + _CONNECTIONS_PER_COPY * min(self.tables, COPIED_AT_ONCE) + 1
        lines = [
            (
                f"{counted(self.tables, 'table')}, about {counted(_round(self.rows), 'row')}:"
                f" reads {size(self.source_bytes)} on the source, writes about"
                f" {size(self.lake_bytes)} to the lake"
            ),
            (
                f"about {duration(self.seconds)} with {tasks} at once on a machine like this, plus"
                " the start of Spark and uploads to an object store (sample:"
                f" {how or 'none, all empty'})"
            ),
            self._wal(),
            (
                f"cost for the source: sequential scans of {size(self.source_bytes)}, up to"
                f" {connections} connections, and snapshots that hold vacuum back for up to"
                f" {duration(self.longest_seconds)}"
            ),
        ]
        if self.unread:
            lines.append(
                f"without {first_of(self.unread)}, which couldn't be read: missing privilege, or a"
                " lock"
            )
        return lines

    def _wal(self) -> str:
        rate, wal = self.wal_bytes_per_minute, self.wal_bytes
        if rate is None or wal is None:
            return (
                "WAL that the slot keeps until the copy ends: unknown, the sample was too short for"
                " a rate"
            )
        limit = "no limit" if self.wal_limit_mb < 0 else size(self.wal_limit_mb << 20)
        return (
            f"WAL: the server writes about {size(int(rate))} a minute now, so the slot keeps about"
            f" {size(wal)} until the copy ends (max_slot_wal_keep_size: {limit})"
        )


def estimate_copies(job: Job, targets: PlannedTargets, server: ServerFacts) -> CopyEstimate | None:
    """Estimate how long the initial copies of new targets take, by reading their rows for some
    seconds; None without new targets.

    It raises no error of the source: the estimate's ``unknown`` then says why there is none. It
    reads nothing as a superuser, because planning a query could run functions of the table's owner
    with a superuser's rights.
    """
    if server.superuser:
        return CopyEstimate(
            0,
            unknown=f"role {server.role} is a superuser: check as the role that runs the pipeline",
        )
    try:
        with job.source.connect("estimate") as connection:
            copies, _ = read_around(
                connection, _LOCK_TIMEOUT_S, partial(plan_copies, connection, job, targets)
            )
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
    samples = {copy: _of_whole(copy, sample) for copy, sample in sampled.items()}
    sampled_bytes = max(1, sum(sizes[copy.table.oid] for copy in samples))
    seconds = sum(one.seconds for one in samples.values()) / sampled_bytes
    encoded = sum(one.file_bytes for one in samples.values()) / sampled_bytes
    unsampled = [copy for copy in readable if copy not in sampled]
    for copy, rows in _planned_copies(connection, job.pipeline.target, unsampled).items():
        table_bytes = sizes[copy.table.oid]
        samples[copy] = Sample(copy.blocks, rows, int(table_bytes * encoded), table_bytes * seconds)
    return CopyEstimate(
        tables=len({copy.target for copy in copies}),
        rows=sum(one.rows for one in samples.values()),
        source_bytes=sum(sizes[copy.table.oid] for copy in samples),
        lake_bytes=sum(one.file_bytes for one in samples.values()),
        seconds=_seconds(samples),
        longest_seconds=max((_seconds({copy: one}) for copy, one in samples.items()), default=0.0),
        sampled={copy.target: one.seconds for copy, one in sampled.items()},
        unread=tuple(sorted({copy.target for copy in copies if copy not in samples})),
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
    samples: dict[PlannedCopy, Sample] = {}
    for copy in largest:
        share = sizes[copy.table.oid] / total
        if not copy.blocks or (samples and share < _LEAST_SHARE):
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
            samples[copy] = sample
    return samples


def _of_whole(copy: PlannedCopy, sample: Sample) -> Sample:
    """Returns the blocks, rows, bytes and seconds of the whole copy, extrapolated from a sample."""
    # A table may have grown since its size was read.
    times = max(1.0, copy.blocks / sample.blocks)
    return Sample(
        copy.blocks,
        round(sample.rows * times),
        round(sample.file_bytes * times),
        sample.seconds * times,
    )


def _planned_copies(
    connection: Connection, target: Target, copies: Sequence[PlannedCopy]
) -> dict[PlannedCopy, int]:
    """Returns the planner's estimate of the rows of copies; locked ones are left out."""
    row_counts = {}
    for copy in copies:
        if not copy.blocks:  # The planner would assume that rows are being added.
            row_counts[copy] = 0
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
            row_counts[copy] = planned_rows(connection, rows)
    return row_counts


def _sizes(connection: Connection, copies: Sequence[PlannedCopy]) -> dict[int, int]:
    """Returns each copy's bytes with TOAST, by its relation, without locked tables."""
    locked = read_locked_tables(connection).relations
    leaves = {copy.table.oid: [leaf.oid for leaf in copy.table.stored_leaves] for copy in copies}
    free = {oid: oids for oid, oids in leaves.items() if locked.isdisjoint(oids)}
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


def _round(number: int) -> int:
    """Returns a number with three digits that count.

    >>> _round(1_234_567), _round(42)
    (1230000, 42)
    """
    return round(number, min(0, 3 - len(str(number))))


@dataclass(frozen=True, slots=True)
class Sample:
    """What was read of a copy: blocks and rows, how many bytes its files have, how long it took."""

    blocks: int
    rows: int
    file_bytes: int
    seconds: float


class _Counted:
    """Stands for a file system: what is written to it is counted and forgotten."""

    def create_dir(self, _: str) -> None:
        """Do nothing."""

    def delete_file(self, _: str) -> None:
        """Do nothing."""

    def open_output_stream(self, _: str) -> Any:
        """Returns a file that only counts."""
        return pa.MockOutputStream()


def readers() -> int:
    """Returns how many tasks a local Spark session runs at once, which read concurrently."""
    return min(_MOST_READERS, os.cpu_count() or 1)


def sample_copy(
    conninfo: str, holder: SnapshotHolder, copy: PlannedCopy, target: Target, seconds: float
) -> Sample:
    """Read parts of a copy for about these seconds, by as many readers as a copy has.

    Raises as read_chunks() does.
    """
    lsn = holder.lsn.value if target.metadata_columns else None
    leaves = copy.table.stored_leaves
    files = holder.relfilenodes([leaf.oid for leaf in leaves])
    planned = plan_copy(copy.table, holder.snapshot_id, files, lsn, target.types_of(copy.target))
    planned = replace(planned, where=copy.where)
    chunks = plan_chunks(leaves, max(_LEAST_PLACE_BYTES, copy.table.size_bytes // _PLACES))
    random.Random(0).shuffle(chunks)  # noqa: S311 - any order that is spread over the table
    places = _Places(chunks, time.monotonic() + seconds)
    began, count = time.monotonic(), min(readers(), len(chunks))
    with ThreadPoolExecutor(count, thread_name_prefix="sample") as pool:
        read = partial(_read, conninfo, planned, places)
        rows, sizes = zip(*pool.map(lambda _: read(), range(count)), strict=True)
    # The readers' connections are open before the first of them reads.
    took = time.monotonic() - max(began, places.began)
    return Sample(sum(places.blocks), sum(rows), sum(sizes), took)


def _read(conninfo: str, copy: TableCopy, places: _Places) -> tuple[int, int]:
    """Returns how many rows one reader read, and how many bytes their files have."""
    batches = read_chunks(conninfo, copy, places.hand_out(), "waldelta estimate", _TIMEOUTS_MS)
    with DataFile(_Counted(), copy.schema) as file:
        for group in row_groups(batches, _MOST_ROWS):
            file.write(group)
        return file.rows, file.close().get("size", 0)


class _Places:
    """Parts of a copy that several readers share until the time is over.

    ``blocks`` has how many blocks each part had that was read.
    """

    def __init__(self, chunks: Sequence[Chunk], until: float) -> None:
        # What a reader leaves of a place comes last, so that a short sample is spread over all.
        self._chunks, self._until = deque(chunks), until
        self.blocks: list[int] = []
        self.began = 0.0

    def hand_out(self) -> Iterator[Chunk]:
        """Yields parts to one reader until the time is over.

        The reader needs about _SECONDS_PER_READ for each part.
        """
        began = self.began = max(self.began, time.monotonic())
        step = float(_FIRST_BLOCKS)
        with suppress(IndexError):  # Another reader took the last one.
            while began < self._until:
                chunk, blocks, chunks = _part(self._chunks.popleft(), int(step))
                self._chunks.extend(chunks)
                yield chunk
                self.blocks.append(blocks)
                took, began = time.monotonic() - began, time.monotonic()
                step = max(1.0, step * min(4.0, _SECONDS_PER_READ / max(took, 0.001)))


def _part(place: Chunk, most_blocks: int) -> tuple[Chunk, int, list[Chunk]]:
    """Returns the first blocks of a place, how many of its leaves' blocks these are, and the rest,
    if any.
    """
    end = max(leaf.blocks for leaf in place.leaves)
    last = end if place.last_block is None else min(place.last_block, end)
    chunks = []
    if all(leaf.has_ctid for leaf in place.leaves) and last - place.first_block > most_blocks:
        last = place.first_block + most_blocks
        chunks = [replace(place, first_block=last)]
        place = replace(place, last_block=last)
    blocks = sum(max(0, min(last, leaf.blocks) - place.first_block) for leaf in place.leaves)
    return place, blocks, chunks


def plan_copies(
    conn: Connection, job: Job, planned: PlannedTargets, locked: frozenset[int]
) -> tuple[PlannedCopy, ...]:
    """Returns the copies of all targets without a complete one; leaves that are ``locked`` (by oid)
    count as empty.
    """
    states: Mapping[str, TableState] = {}
    with suppress(SlotMissing):  # Before the first setup no target has a copy.
        states = job.read_states()
    sources = [
        (name, mapping, table)
        for name, mapping in sorted(planned.sources.items())
        if job.pipeline.target.copies(name)
        and (name not in states or states[name].status != SYNCED)
        for table in planned.tables_of(name)
    ]
    leaves = read_leaves(conn, list({table.oid for _, _, table in sources}), locked=locked)
    copies = []
    for name, mapping, table in sources:
        table_leaves = leaves[table.oid]
        if mapping.partition is not None:
            table_leaves = tuple(leaf for leaf in table_leaves if leaf.is_of(mapping.partition))
        copies.append(PlannedCopy(name, replace(table, leaves=table_leaves), mapping.where))
    return tuple(copies)


_POSITION = """
select extract(epoch from clock_timestamp()), pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')
"""

"""The tables of a lake: their status, the time up to which they are complete, recent changes, and
what each target holds of its source's rows and columns.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake import READ_FAILURES, DeltaTarget, row_count
from waldelta.lake.ledger import (
    COPYING,
    FAILED,
    NEEDS_SYNC,
    REMOVED,
    SYNCED,
    ColumnState,
    Decisions,
    Ledger,
    RowCounts,
    Run,
    TableState,
    last_rows,
    now,
    of_run,
    of_tables,
)
from waldelta.lake.ledger.records import rows_of
from waldelta.metadata_columns import PREFIX
from waldelta.monitoring.check_results import Check
from waldelta.monitoring.run_history import LANDING, RunLine, complete_upto, read_result
from waldelta.pipeline.targets import target_generations
from waldelta.postgres.publication_membership import from_texts, rules
from waldelta.quantities import counted
from waldelta.target_modes.mirror import MIRROR
from waldelta.types.json import Variant

# Results of at most this many runs, newest first, are read to find since when a table is behind.
_MOST_RESULTS = 20
# What a target misses, or keeps, when an operation isn't published.
_NOT_PUBLISHED = {
    "insert": "inserts aren't published: rows inserted since its copy are missing",
    "update": "updates aren't published: rows stay as they were inserted or copied",
    "delete": "deletes aren't published: rows that the source deleted stay",
    "truncate": "truncates aren't published: rows that the source truncated stay",
}
_UNFINISHED = {
    COPYING: "its copy isn't complete",
    FAILED: "its copy failed",
    NEEDS_SYNC: "it waits for a new copy",
    REMOVED: "it is no longer published",
}


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The changes of one run, or of a window's runs, to a table.

    ``at`` is when the run recorded them; of a window, when the latest change was committed on the
    source, or else recorded. ``verb`` and ``run_id`` name the latest run. ``operations.truncated``
    counts the runs that truncated the table. ``version``, of the copy ``generation``, is the last
    with rows written by a window's runs; None if there is none.
    """

    at: datetime
    verb: str
    run_id: str
    operations: RowCounts
    version: int | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class TableLine:
    """One table; it has everything committed on the source until ``complete_upto`` (None: unknown).

    ``status`` is the ledger's, but "behind" for a copied table whose changes the latest run
    couldn't apply.
    """

    table_name: str
    status: str
    reason: str | None
    generation: int
    complete_upto: datetime | None
    changed: TableChanges | None = None
    in_quarantine: int = 0
    check: Check | None = None
    kind: str = ""  # How it differs from a mirror of all rows (content_label).
    discarded: int = 0


def read_changed(
    ledger: Ledger, since: datetime | None, table: str | None = None
) -> dict[str, TableChanges]:
    """Returns by table, or for one, the changes of runs since then: what they consumed, replayed
    and repaired.

    They come from the records of each attempt at a run. Cuts are incomplete, because none is
    published while one table is behind. Unchanged tables are left out.
    """
    rows = ledger.table(Run).scan((*_RUN, "targets"), since)
    return {
        row["table_name"]: TableChanges(
            row["committed_at_max"],
            row["verb_last"],
            row["run_id_last"],
            _counts(row),
            row["version_last"],
            row["generation_last"],
        )
        for row in _sums_by_table(rows, table)
    }


def read_rows_by_run(ledger: Ledger, table: str, since: datetime, most: int) -> list[TableChanges]:
    """Returns what the latest of the runs since then did to a table, newest first."""
    # A day of a busy table has enough runs.
    for start in (max(since, now() - timedelta(days=1)), since):
        scanned = ledger.table(Run).scan((*_RUN, "targets"), start)
        keys = (
            _targets(scanned, table)
            .group_by(["verb", "run_id"], use_threads=False)
            .aggregate([("at", "last"), *((name, "sum") for name in _OPERATIONS)])
        )
        if keys.num_rows >= most:
            break
    rows = sorted(keys.to_pylist(), key=lambda row: row["at_last"], reverse=True)
    return [TableChanges(r["at_last"], r["verb"], r["run_id"], _counts(r)) for r in rows[:most]]


def read_operations(ledger: Ledger, verb: str, run_id: str) -> dict[str, RowCounts]:
    """Returns by table what all attempts at a run did."""
    rows = ledger.table(Run).scan((*_RUN, "targets"), None, of_run(run_id, verb))
    return {row["table_name"]: _counts(row) for row in _sums_by_table(rows)}


_RUN = ("at", "verb", "run_id")
_WRITTEN = ("inserted", "updated", "deleted", "truncated")
_OPERATIONS = tuple(f.name for f in fields(RowCounts))


def _counts(row: Mapping[str, Any]) -> RowCounts:
    return RowCounts(**{name: row[f"{name}_sum"] for name in _OPERATIONS})


def _targets(rows: pa.Table, table: str | None = None) -> pa.Table:
    """Returns what these attempts did, one row for each attempt and table, or for one table."""
    lists = rows["targets"].combine_chunks()
    targets, of = pc.list_flatten(lists), pc.list_parent_indices(lists)
    if table is not None:
        is_of_table = pc.equal(pc.struct_field(targets, "table_name"), table)
        targets, of = targets.filter(is_of_table), of.filter(is_of_table)
    parents = rows.select(list(_RUN)).take(of)
    columns = {name: parents[name] for name in _RUN} | {
        name: pc.struct_field(targets, name)
        for name in ("table_name", "commit_ts", "version", "generation")
    }
    for name in _OPERATIONS:
        columns[name] = pc.fill_null(pc.cast(pc.struct_field(targets, name), pa.int64()), 0)
    return pa.table(columns)


def _sums_by_table(rows: pa.Table, table: str | None = None) -> list[dict[str, Any]]:
    """Returns by table what these attempts did, with the latest of them.

    Version and generation are those of the latest attempt that wrote rows.
    """
    flat = _targets(rows, table)
    columns = {name: flat[name] for name in flat.column_names}
    columns["committed_at"] = pc.coalesce(columns.pop("commit_ts"), flat["at"])
    written = reduce(pc.add, (columns[name] for name in _WRITTEN))
    for name in ("version", "generation"):
        columns[name] = pc.if_else(pc.greater(written, 0), columns[name], None)
    # "last" skips nulls.
    lasts = [(name, "last") for name in ("verb", "run_id", "version", "generation")]
    sums = [(name, "sum") for name in _OPERATIONS]
    grouped = pa.table(columns).group_by("table_name", use_threads=False)
    return list(grouped.aggregate([*sums, *lasts, ("committed_at", "max")]).to_pylist())


_STATE = (
    "at",
    "run_id",
    "table_name",
    "generation",
    "status",
    "reason",
    "mode",
    "copy_skipped",
    "row_filter",
    "target_filter",
    "publishes",
    "external_commits",
    "later_filters",
    "unrepaired_leaves",
)


def _rank(line: TableLine) -> int:
    """Returns a sort key: tables that need attention come first, removed ones last."""
    if line.status == REMOVED:
        return 4
    if line.status != SYNCED:
        return 0
    if line.check is not None and line.check.verdict in ("failed", "unknown"):
        return 1
    is_warned = line.check is not None and line.check.verdict == "warning"
    return 2 if line.in_quarantine or is_warned else 3


def latest_states(ledger: Ledger) -> list[TableState]:
    """Returns the latest state of each target, without columns, storage and row counts."""
    table = ledger.table(TableState)
    result = table.place.read_once(
        "latest", lambda _: last_rows(table.scan(_STATE), ["table_name"])
    )
    return [] if result is None else rows_of(TableState, result[1])


def read_column_names(ledger: Ledger) -> dict[str, tuple[str, ...]]:
    """Returns the names of each target's columns, by its latest state."""
    rows = ledger.table(TableState).scan(("table_name", "status", "columns"))
    rows = last_rows(rows, ["table_name"]).filter(pc.field("status") != REMOVED)
    lists, tables = rows["columns"].combine_chunks(), rows["table_name"].to_pylist()
    columns = pc.struct_field(pc.list_flatten(lists), "name").to_pylist()
    names: dict[str, tuple[str, ...]] = dict.fromkeys(tables, ())
    for number, column in zip(pc.list_parent_indices(lists).to_pylist(), columns, strict=True):
        names[tables[number]] += (column,)
    return names


def copied_at(ledger: Ledger, tables: Collection[str]) -> dict[str, datetime]:
    """Returns when these targets were last copied as a whole, or compared row by row by a resync.

    A repair ends like a copy, with its own snapshot and the next generation, but corrects only some
    rows. It is recognized by its first state, which already has the snapshot; a copy takes it
    later.
    """
    return (
        {copy.table_name: copy.at for copy in read_copies(ledger, of_tables(tables))}
        if tables
        else {}
    )


def copied_rows(ledger: Ledger, tables: Collection[str]) -> dict[str, int]:
    """Returns how many rows the last copy of each of these targets had; a repair is no copy."""
    return {copy.table_name: copy.rows for copy in read_copies(ledger, of_tables(tables))}


def read_copies(ledger: Ledger, where: pc.Expression | None = None) -> Iterator[TableState]:
    """Yields the first complete state of each whole copy, oldest first."""
    columns = ("at", "run_id", "table_name", "generation", "status", "snapshot", "rows")
    ended: set[tuple[str, int]] = set()
    has_snapshot: dict[tuple[str, int], bool] = {}
    for row in ledger.table(TableState).scan(columns, None, where).to_pylist():
        of = (row["table_name"], row["generation"])
        if row["status"] == COPYING:
            has_snapshot[of] = bool(row["snapshot"])
        # Later states of the same copy record changed columns and external commits.
        elif row["status"] == SYNCED and row["snapshot"] and of not in ended:
            ended.add(of)
            if not has_snapshot.get(of, True):
                yield TableState(**row)


def replicated_tables(ledger: Ledger) -> list[str]:
    """Returns the replicated targets: all except those that left the publications."""
    return [state.table_name for state in latest_states(ledger) if state.status != REMOVED]


def read_tables(
    ledger: Ledger,
    runs: Sequence[RunLine],
    changed: Mapping[str, TableChanges],
    checks: Mapping[str, Check],
    idle_checked_at: datetime | None = None,
) -> list[TableLine]:
    """Returns every table that was ever copied, those that need attention first, then by name.

    ``runs`` are newest first. ``idle_checked_at`` is when a run last found nothing to do, which the
    ledger doesn't store.
    """
    quarantined, discarded = Decisions(ledger.lake).missing_counts(target_generations(ledger))
    # A run that failed before it applied anything shows neither that a table is behind nor that it
    # is complete.
    landing = [run for run in runs if run.verb in LANDING and run.has_landed and run.came_to_apply]
    behind = _behind(ledger, landing)
    upto = complete_upto(runs, idle_checked_at)
    if behind:  # The other tables have all changes that landed.
        times = (run.as_of for run in landing if run.as_of and run.status != "running")
        upto = max(times, default=None)
    lines = []
    for state in latest_states(ledger):
        status = "behind" if state.status == SYNCED and state.table_name in behind else state.status
        lines.append(
            TableLine(
                state.table_name,
                status,
                state.reason,
                state.generation,
                behind.get(state.table_name, upto) if state.status == SYNCED else None,
                changed.get(state.table_name),
                quarantined.get(state.table_name, 0),
                checks.get(state.table_name),
                content_label(state),
                discarded.get(state.table_name, 0),
            )
        )
    return sorted(lines, key=lambda line: (_rank(line), line.table_name))


def _behind(ledger: Ledger, landing: list[RunLine]) -> dict[str, datetime | None]:
    """Returns the tables that the latest run couldn't bring up to date, with their complete
    time.
    """
    ended = [run for run in landing if run.status != "running"]
    if not ended or ended[0].applied:
        return {}
    behind = dict.fromkeys(_not_applied(ledger, ended[0]))
    times: dict[str, datetime | None] = dict(behind)
    for run in ended[1:_MOST_RESULTS]:
        for name in set(behind) if run.applied else set(behind) - set(_not_applied(ledger, run)):
            times[name] = run.as_of
            del behind[name]
        if not behind:
            break
    return times


def _not_applied(ledger: Ledger, run: RunLine) -> list[str]:
    result = read_result(ledger, run.verb, run.run_id, run.at)
    return [str(name) for name in (result or {}).get("not_applied") or ()]


def limits_of(state: TableState, quarantined: int = 0, discarded: int = 0) -> tuple[str, ...]:
    """Returns all reasons known to the ledger why a target's rows or columns aren't those of its
    source, by its latest state and the numbers of rows kept out of it.
    """
    kept_out = ((quarantined, "in quarantine"), (discarded, "discarded"))
    texts = (f"{counted(rows, 'row')} missing or outdated: {why}" for rows, why in kept_out if rows)
    return (*_limits(state), *texts)


def content_label(state: TableState) -> str:
    """Returns in a few words how a target differs from a mirror of all rows; empty for one.

    Needs the state's mode, ``copy_skipped``, ``publishes`` and filters only.
    """
    missing = [f"{operation}s" for operation in _missing(state)]
    parts = [
        *([str(state.target_mode)] if state.target_mode != MIRROR else []),
        *(["without a copy"] if state.copy_skipped else []),
        *(["filtered"] if state.row_filter or state.target_filter else []),
        *([f"no {', '.join(missing)}"] if missing else []),
    ]
    return ", ".join(parts)


def _limits(state: TableState) -> Iterator[str]:
    if state.status != SYNCED:
        yield _UNFINISHED[state.status]
    if state.target_mode != MIRROR:
        yield f"mode {state.target_mode}: {state.target_mode.summary}"
    if state.copy_skipped:
        yield "no initial copy: earlier rows of the source are missing"
    if filters := [text for text in (state.row_filter, state.target_filter) if text]:
        yield f"only rows where {' and '.join(filters)}"
    if len(set(rules(from_texts(state.entries)).values())) > 1:
        yield "its publications send some operations by other filters"
    if state.later_filters:
        yield "its publications sent other rows at times since its copy"
    if state.unrepaired_leaves:
        yield f"{counted(len(state.unrepaired_leaves), 'partition')} added, removed or truncated"
    yield from (_NOT_PUBLISHED[operation] for operation in _missing(state))
    yield from _hidden_columns(state)


def _hidden_columns(state: TableState) -> Iterator[str]:
    if stopped := [column.name for column in state.columns if column.stopped]:
        yield f"last values only of {', '.join(stopped)}: an operator refused the source's change"
    if names := list(_unpublished_columns(state)):
        yield f"{counted(len(names), 'column')} of the source not published: {', '.join(names)}"


def _missing(state: TableState) -> list[str]:
    """Returns the operations that its publications didn't publish at its copy, or don't now.

    An earlier version didn't record them; then it returns none.
    """
    if not state.publishes:
        return []
    published = set(state.publishes)
    if now := from_texts(state.entries):
        published &= rules(now).keys()
    return [name for name in _NOT_PUBLISHED if name not in published]


_DELTA_RS = """\
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

query = QueryBuilder().register("target", DeltaTable({}))
rows = pa.table(query.execute("select * from target"))"""


@dataclass(frozen=True, slots=True)
class ColumnLine:
    """A column of a target; ``source_type`` is None for a column that the source lacks."""

    name: str
    type: str
    source_type: str | None = None
    is_key: bool = False
    is_required: bool = False
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class TableDetails:
    """A target as readers of the lake find it.

    ``limits``: see limits_of(). ``published`` are the operations that reach it, ``filter`` the
    condition of its rows. ``unpublished`` are the columns that only the source has; a number where
    the name wasn't recorded. ``quarantined`` and ``discarded`` rows are kept out of it. ``rows``,
    ``bytes``, ``files`` and ``version`` are None where it can't be read. ``has_deleted_rows``: its
    files may contain deleted rows, which ``rows`` counts.
    """

    uri: str
    columns: tuple[ColumnLine, ...]
    limits: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    filter: str = ""
    unpublished: tuple[str, ...] = ()
    quarantined: int = 0
    discarded: int = 0
    rows: int | None = None
    bytes: int | None = None
    files: int | None = None
    version: int | None = None
    has_deleted_rows: bool = False

    @property
    def summary(self) -> str:
        """Returns what the target holds, once the changes that have landed are applied.

        >>> TableDetails("file:///lake/t", ()).summary
        'what its publications send'
        """
        whole = "all rows and columns of the source"
        return "; ".join(self.limits) or (whole if self.published else "what its publications send")

    @property
    def recipes(self) -> dict[str, str]:
        """Returns, by reader, code that reads all rows of this target.

        delta-rs reads every feature that targets get, but only through QueryBuilder: its
        to_pyarrow_table() returns nulls where Delta maps column names. It returns variants as
        bytes, so it isn't there for a table that has some.
        """
        path, sql_path = json.dumps(self.uri, ensure_ascii=False), self.uri.replace("'", "''")
        recipes = {
            "Spark": f'spark.read.format("delta").load({path})',
            "DuckDB": f"install delta; load delta;\nselect * from delta_scan('{sql_path}');",
            "Python (delta-rs)": _DELTA_RS.format(path),
        }
        if any(Variant.spark in column.type for column in self.columns):
            del recipes["Python (delta-rs)"]
        return recipes

    @property
    def key(self) -> tuple[str, ...]:
        """Returns the key's columns."""
        return tuple(column.name for column in self.columns if column.is_key)


def read_table_details(
    ledger: Ledger, table_name: str, line: TableLine | None = None
) -> TableDetails | None:
    """Returns a target by its latest state and its Delta log.

    ``line`` is its line, if that has been read already. Returns None for a table that the ledger
    doesn't know, or an invalid table name.
    """
    states = ledger.table_rows(table_name)
    try:
        target = ledger.lake.target(table_name)
    except ValueError:
        return None
    if not states:
        return None
    state = states[-1]
    if line is None:
        counts = Decisions(ledger.lake).missing_counts({table_name: state.generation})
        quarantined, discarded = (rows.get(table_name, 0) for rows in counts)
    else:
        quarantined, discarded = line.in_quarantine, line.discarded
    details = TableDetails(
        target.uri,
        tuple(_line(column.name, column.stored_type, column, state) for column in state.columns),
        limits_of(state, quarantined, discarded),
        tuple(name for name in state.publishes if name not in _missing(state)),
        " and ".join(filter(None, (state.row_filter, state.target_filter))),
        tuple(_unpublished_columns(state)),
        quarantined,
        discarded,
    )
    return _with_log_details(target, state, details)


def _with_log_details(
    target: DeltaTarget, state: TableState, details: TableDetails
) -> TableDetails:
    """Adds what a target's Delta log has; where it isn't copied yet, or is gone, the ledger's
    columns stay.
    """
    try:
        table = target.open()
        types, files = table.spark_types, table.files
    except READ_FAILURES:
        return details
    sources = {column.name: column for column in state.columns}
    lines = [_line(name, kind, sources.get(name), state) for name, kind in types.items()]
    # The source's columns as the target has them, then waldelta's own.
    lines.sort(key=lambda line: line.source_type is None and line.name.startswith(PREFIX))
    return replace(
        details,
        columns=tuple(lines),
        rows=row_count(files),
        bytes=pc.sum(files["size_bytes"]).as_py() or 0 if files.num_rows else 0,
        files=files.num_rows,
        version=table.version,
        has_deleted_rows=table.has_deletion_vectors,
    )


def _unpublished_columns(state: TableState) -> Iterator[str]:
    """Yields the columns that the source has, by name or else by number, and publishes not."""
    names = {a.attnum: a.name for a in state.storage.attributes}
    for number in sorted(set(state.unpublished) - {column.attnum for column in state.columns}):
        if not names or number in names:
            yield names.get(number) or f"column {number}"


def _line(name: str, type_name: str, column: ColumnState | None, state: TableState) -> ColumnLine:
    if column is None:
        return ColumnLine(name, type_name)
    comment = next((a.comment for a in state.storage.attributes if a.attnum == column.attnum), None)
    is_key = name in state.key_columns
    return ColumnLine(name, type_name, column.type_name, is_key, column.not_null, comment)

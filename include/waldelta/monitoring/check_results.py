"""Results of checks: per table and run, and per expectation of one table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake.ledger import CAN_BE_JUDGED, ExpectationResult, Ledger, now, of_tables
from waldelta.lake.ledger.check_records import (
    NO_CHECKS,
    ON_OTHERS,
    WORST_FIRST,
    Verdict,
    is_admission,
    verdict_of,
)
from waldelta.monitoring.run_history import latest_run
from waldelta.quantities import counted

R = TypeVar("R")
# How far back the columns of a heat map are searched, step by step; None: all stored results.
_STEPS = (timedelta(hours=3), timedelta(days=1), timedelta(days=8), None)
# Results of failed expectations are searched this far before all stored ones are.
_RECENT = timedelta(days=8)


@dataclass(frozen=True, slots=True)
class Check:
    """One table's check in one run.

    ``failed`` counts unmet critical expectations, ``unknown`` those not evaluated. ``version`` is
    the target's latest version with a result. ``unmet`` are the failed expectations and warnings,
    where only one table was read.
    """

    at: datetime
    run_id: str
    table_name: str
    expectations: int
    failed: int
    unknown: int
    warnings: int
    version: int | None = None
    unmet: Sequence[FailedExpectation] = field(default=(), compare=False)

    @property
    def verdict(self) -> Verdict:
        """Returns the worst result."""
        counts = {"failed": self.failed, "unknown": self.unknown, "warning": self.warnings}
        return next((v for v in WORST_FIRST if counts.get(v)), "passed")

    @property
    def summary(self) -> str:
        """Returns the result in words, without values."""
        if self.verdict == "passed":
            return f"{self.expectations} met"
        parts = (
            (self.failed, "failed"),
            (self.unknown, "not evaluated"),
            (self.warnings, "not met (warning)"),
        )
        return (
            f"{', '.join(f'{count} {what}' for count, what in parts if count)} of"
            f" {self.expectations}"
        )


@dataclass(frozen=True, slots=True)
class FailedExpectation:
    """An expectation that a check or a gate found not met; ``finding`` is in words, without values.

    ``examples`` are some of the rows that fail it: each has its ``key``, empty where unknown, and
    the ``values`` that the expectation reads. ``since`` is when it was first not met, without a
    break. ``may_pass``: it is of a gate that a release lets changes pass.
    """

    at: datetime
    run_id: str
    table_name: str
    meaning: str
    severity: str
    finding: str
    since: datetime
    examples: tuple[Mapping[str, Any], ...] = ()
    may_pass: bool = False

    @classmethod
    def of(cls, row: Mapping[str, Any], since: datetime | None = None) -> FailedExpectation:
        """Returns the expectation of a stored result with FAILING_COLUMNS."""
        count = row["unexpected_count"]
        # The observed value may be a row's value, such as a maximum.
        otherwise = "can't be evaluated" if row["success"] is None else "not met"
        return cls(
            row["at"],
            row["run_id"],
            row["table_name"],
            row["meaning"],
            row["severity"],
            counted(count, "row") if count else otherwise,
            since or row["at"],
            tuple(map(json.loads, row["examples"] or ())),
        )

    @property
    def verdict(self) -> Verdict:
        """Returns how bad it is."""
        return verdict_of(self.severity, success=False)

    def describe(self, *, shows_values: bool) -> str:
        """Returns table, expectation, result and run in a line, with the examples if allowed."""
        text = f"{self.table_name}: {self.meaning}: {self.finding}, run {self.run_id}"
        if not shows_values or not self.examples:
            return text
        rows = (json.dumps({**one["key"], **one["values"]}) for one in self.examples)
        return f"{text}: {', '.join(rows)}"


_RESULT = ("at", "table_name", "meaning", "success")
_CHECK = tuple(name for name in Check.__dataclass_fields__ if name != "unmet")
_JUDGED = ("severity", "meaning", "expectation", "version")


@dataclass(frozen=True, slots=True)
class Cell:
    """What one run's check found of an expectation; ``finding`` is in words, without values."""

    verdict: Verdict
    finding: str


# A label, and its cells by run.
HeatRow = tuple[str, tuple[Cell | None, ...]]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Verdicts by row and run, the newest run last; a cell is None where nothing was checked.

    ``runs`` are their times and ids. ``not_checked``, for one table: what the last check couldn't
    judge, and why.
    """

    runs: tuple[tuple[datetime, str], ...]
    rows: tuple[HeatRow, ...]
    not_checked: tuple[str, ...] = ()

    @property
    def shows_seconds(self) -> bool:
        """Returns whether two runs checked within one minute, so that seconds must be shown."""
        return len({at.replace(second=0, microsecond=0) for at, _ in self.runs}) < len(self.runs)


def read_checks(ledger: Ledger, since: datetime | None, run_id: str | None = None) -> list[Check]:
    """Returns the checks since then, or of one run, oldest first."""
    where = None if run_id is None else pc.field("run_id") == run_id
    rows = _without_retried(_read(ledger, since, _JUDGED, where))
    # A check that was retried has recorded everything again.
    return _checks(_last_of(rows, ("run_id", "table_name", "meaning")), ("run_id", "table_name"))


def _checks(rows: pa.Table, keys: Sequence[str]) -> list[Check]:
    """Returns one check per group of rows, oldest first."""
    missed = pc.fill_null(pc.invert(rows["success"]), False)
    is_warning = pc.fill_null(pc.equal(rows["severity"], "warning"), False)
    counts = {
        "failed": pc.and_(missed, pc.invert(is_warning)),
        "unknown": pc.is_null(rows["success"]),
        "warnings": pc.and_(missed, is_warning),
    }
    for name, values in counts.items():
        rows = rows.append_column(name, pc.cast(values, pa.int64()))
    lasts = [(name, "last") for name in ("at", "run_id", "table_name") if name not in keys]
    grouped = rows.group_by(list(keys), use_threads=False).aggregate(
        [*lasts, ("version", "max"), ([], "count_all"), *((name, "sum") for name in counts)]
    )
    names = [
        "expectations" if name == "count_all" else re.sub("_(last|sum|max)$", "", name)
        for name in grouped.column_names
    ]
    return [
        Check(**row)
        for row in grouped.rename_columns(names).sort_by("at").select(list(_CHECK)).to_pylist()
    ]


def _last_of(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Returns the latest rows of each group, in order.

    Limits of one domain share a meaning, so a group may have several.
    """
    numbered = rows.select([*keys, "at"]).append_column("n", pa.array(np.arange(rows.num_rows)))
    groups = (
        numbered.group_by(list(keys), use_threads=False)
        .aggregate([("at", "max"), ("n", "list")])
        .combine_chunks()
    )
    numbers = pc.list_flatten(groups["n_list"])
    ends = groups["at_max"].take(pc.list_parent_indices(groups["n_list"]))
    return rows.take(
        numbers.filter(pc.equal(rows["at"].take(numbers), ends)).combine_chunks().sort()
    )


def read_latest_checks(
    ledger: Ledger, since: datetime | None, tables: Collection[str] = (), table: str | None = None
) -> dict[str, Check]:
    """Returns by table, or for one, what is known of its expectations; of ``tables`` even if older
    than ``since``.

    That is the latest result of each expectation in its last check. Foreign keys and freshness
    include maintenance's results. Results recorded since then by gates and by discarding rows are
    included.
    """
    first = None if table is None else [table]
    rows = _current(ledger, _JUDGED if table is None else FAILING_COLUMNS, since, tables, first)
    rows = _last_of(rows, ("table_name", "meaning"))
    # Discarding rows is no check: a table's check is as old as its results for a version.
    rows = rows.take(np.argsort(rows["version"].is_valid().to_numpy(), kind="stable"))
    unmet = () if table is None else _failed_expectations(ledger, rows)
    return {of.table_name: replace(of, unmet=unmet) for of in _checks(rows, ("table_name",))}


# What FailedExpectation.of() reads, besides the columns that all checks have.
FAILING_COLUMNS = (*_JUDGED, "unexpected_count", "examples")


def read_failed_in_run(ledger: Ledger, run_id: str) -> list[FailedExpectation]:
    """Returns the expectations that a run's check found not met, critical ones first."""
    of_run = pc.field("run_id") == run_id
    ends = pc.min_max(ledger.table(ExpectationResult).scan(("at",), where=of_run)["at"]).as_py()
    if ends["min"] is None:
        return []
    where = of_run & (pc.field("at") <= pa.scalar(ends["max"]))
    rows = _without_retried(_read(ledger, ends["min"], FAILING_COLUMNS, where))
    return _failed_expectations(ledger, _last_of(rows, ("table_name", "meaning")))


def read_failed(ledger: Ledger, tables: Collection[str]) -> list[FailedExpectation]:
    """Returns the expectations that these tables' last checks found not met, critical ones first.

    Those of gates aren't among them, nor what maintenance found more than eight days ago for a
    table that has been checked since.
    """
    since = now() - _RECENT
    rows = _current(ledger, FAILING_COLUMNS, since, tables, tables)
    return _failed_expectations(ledger, _last_of(rows, ("table_name", "meaning")))


def _current(
    ledger: Ledger,
    columns: Sequence[str],
    since: datetime | None,
    tables: Collection[str],
    first: Collection[str] | None,
) -> pa.Table:
    """Returns the rows that are current (see _in_force()) of each table with results since then; of
    ``tables`` even if they are older. Only tables of ``first`` are searched in the recent ones.
    """
    begins: dict[str, datetime | None] = {}
    for start in [None] if since is None else [_lately(ledger, since), since, None]:
        begins |= _begins(ledger, start, first)
        first = {*tables, *begins} - {name for name, at in begins.items() if at is not None}
        if not first:
            break
    # Examples are large, and a week has millions of results: only those that count are read.
    groups: dict[bool | None, dict[str, datetime | None]] = {}
    for name, begin in begins.items():
        is_recent = None if begin is None else begin >= now() - _STEPS[1]
        groups.setdefault(is_recent, {})[name] = begin
    parts = [_read(ledger, now(), columns)]
    for group in groups.values():
        start = min(filter(None, group.values()), default=None)
        parts.append(_in_force(_read(ledger, start, columns, of_tables(group))))
    return pa.concat_tables(parts)


def _lately(ledger: Ledger, since: datetime) -> datetime:
    """Returns the time since when busy tables have all results that count: those of the last
    checks, and of the last maintenance.
    """
    run = latest_run(ledger, "maintain", since)
    if run is not None and run.status == "running":
        return since
    ended = now() if run is None else run.at - timedelta(seconds=run.seconds or 0)
    return max(since, min(ended, now() - _STEPS[1]))


def _begins(
    ledger: Ledger, since: datetime | None, tables: Collection[str] | None = None
) -> dict[str, datetime | None]:
    """Returns for each table with results since then, or for ``tables``, when its current rows
    begin; None for one that wasn't checked.
    """
    names = ("at", "table_name", "expectation", "version")
    where = None if tables is None else of_tables(tables)
    rows = ledger.table(ExpectationResult).scan(names, since, where)
    for name, kinds in (("check", NO_CHECKS), ("other", ON_OTHERS)):
        is_of = pc.is_in(rows["expectation"], value_set=pa.array(sorted(kinds)))
        flags = pc.and_(rows["version"].is_valid(), pc.xor(is_of, kinds is NO_CHECKS))
        rows = rows.append_column(name, pc.cast(flags, pa.int8()))
    # All results of one check are recorded with one time.
    entries = rows.group_by(["table_name", "at"], use_threads=False).aggregate(
        [("check", "max"), ("other", "max")]
    )
    checked = _last_at(entries.filter(pc.field("check_max") == 1))
    only_others = (pc.field("check_max") == 0) & (pc.field("other_max") == 1)
    maintained = _last_at(entries.filter(only_others))
    return {
        name: min(checked[name], maintained.get(name, checked[name])) if name in checked else None
        for name in entries["table_name"].unique().to_pylist()
    }


def _last_at(entries: pa.Table) -> dict[str, datetime]:
    """Returns by table the latest of some times."""
    ends = entries.group_by("table_name", use_threads=False).aggregate([("at", "max")])
    return dict(zip(ends["table_name"].to_pylist(), ends["at_max"].to_pylist(), strict=True))


def _failed_expectations(ledger: Ledger, rows: pa.Table) -> list[FailedExpectation]:
    missed = rows.filter(pc.invert(pc.field("success")) & pc.is_valid(pc.field("version")))
    begins = _failing_since(ledger, missed) if missed.num_rows else {}
    expectations = [
        FailedExpectation.of(row, begins.get((row["table_name"], row["meaning"])))
        for row in missed.to_pylist()
    ]
    return sorted(
        expectations, key=lambda one: (one.verdict == "warning", one.table_name, one.meaning)
    )


def _failing_since(ledger: Ledger, missed: pa.Table) -> dict[tuple[str, str], datetime]:
    """Returns by table and meaning since when expectations aren't met, up to these results."""
    last = pc.max(missed["at"]).as_py()
    where = of_tables(missed["table_name"].unique().to_pylist()) & (pc.field("at") <= last)
    where &= pc.field("meaning").isin(missed["meaning"].unique())
    for step in _STEPS[1:]:
        start = None if step is None else last - step
        rows = ledger.table(ExpectationResult).scan(_RESULT, start, where)
        met = _newest(rows.filter(pc.field("success")), rows, "meaning")
        if not met.null_count:
            break
    unmet = rows.filter(pc.fill_null(pc.greater(rows["at"], met), True))
    groups = unmet.group_by(["table_name", "meaning"], use_threads=False)
    begins = groups.aggregate([("at", "min")]).to_pylist()
    return {(row["table_name"], row["meaning"]): row["at_min"] for row in begins}


def _rows_of_full_checks(rows: pa.Table) -> pa.Table:
    """Returns the rows of full checks.

    Gates' rows have no version, maintenance judges some kinds alone, and an aborted check has no
    results.
    """
    return rows.filter(
        pc.is_valid(pc.field("version")) & ~pc.field("expectation").isin(sorted(NO_CHECKS))
    )


def _without_retried(rows: pa.Table) -> pa.Table:
    """Returns the rows without failed checks that were retried and then judged the target."""
    broke_off = pc.equal(rows["expectation"], CAN_BE_JUDGED)
    if not pc.any(broke_off).as_py():
        return rows
    judged = rows.filter(pc.and_(pc.is_valid(rows["version"]), pc.invert(broke_off)))
    again = pc.fill_null(pc.greater(_newest(judged, rows, "run_id"), rows["at"]), False)
    return rows.filter(pc.invert(pc.and_(broke_off, again)))


def _in_force(rows: pa.Table) -> pa.Table:
    """Returns the rows that are current: from each table's last check, and maintenance's since."""
    checks = _rows_of_full_checks(rows)
    on_others = pc.is_in(rows["expectation"], value_set=pa.array(sorted(ON_OTHERS)))
    # All results of one check are recorded with one time.
    beside = pc.invert(pc.is_in(_table_and_time(rows), value_set=_table_and_time(checks).unique()))
    # Discarding rows records the rows that lack values again, and nothing else.
    of_maintenance = pc.and_(pc.and_(on_others, beside), pc.is_valid(rows["version"]))
    checked, maintained = _newest(checks, rows), _newest(rows.filter(of_maintenance), rows)
    # Maintenance judges these kinds again: a result that it doesn't repeat is outdated.
    is_later = pc.fill_null(pc.greater(maintained, checked), False)
    # Maintenance judges only these kinds when everything else of the target can be judged.
    outlived = pc.or_(on_others, pc.equal(rows["expectation"], CAN_BE_JUDGED))
    begins = pc.if_else(pc.or_(of_maintenance, pc.and_(outlived, is_later)), maintained, checked)
    return rows.filter(pc.fill_null(pc.greater_equal(rows["at"], begins), True))


def _table_and_time(rows: pa.Table) -> pa.ChunkedArray:
    """Returns the table and time of each row as one text."""
    return pc.binary_join_element_wise(
        rows["table_name"], rows["at"].cast(pa.int64()).cast(pa.string()), "\n"
    )


def _newest(entries: pa.Table, rows: pa.Table, *columns: str) -> pa.ChunkedArray:
    """Returns for each row when its table (and these columns) was last in ``entries``; null if
    never.
    """

    def key(of: pa.Table) -> pa.ChunkedArray:
        return pc.binary_join_element_wise(of["table_name"], *(of[name] for name in columns), "\n")

    newest = (
        entries.append_column("key", key(entries))
        .group_by("key", use_threads=False)
        .aggregate([("at", "max")])
    )
    return newest["at_max"].take(pc.index_in(key(rows), value_set=newest["key"].combine_chunks()))


def tables_map(ledger: Ledger, now: datetime, most: int) -> HeatMap:
    """Returns a map of tables by the latest ``most`` runs that checked any.

    Tables with the worst latest verdict come first.
    """
    checks = _widening(partial(read_checks, ledger), attrgetter("run_id"), now, most)
    cells = {(c.table_name, c.run_id): Cell(c.verdict, c.summary) for c in checks}
    return _heat_map([(c.at, c.run_id) for c in checks], cells, most)


def missed_earlier(
    ledger: Ledger, heat: HeatMap, since: datetime, tables: Collection[str]
) -> list[Check]:
    """Returns the checks of tables with problems that the map's newest cell doesn't show.

    They were found before these runs, for ``tables`` even before ``since``. The worst come first.
    """
    verdicts = {
        name: next(cell.verdict for cell in reversed(cells) if cell is not None)
        for name, cells in heat.rows
    }
    checks = read_latest_checks(ledger, since, tables).values()
    missed = [c for c in checks if c.verdict not in ("passed", verdicts.get(c.table_name))]
    return sorted(missed, key=lambda c: (WORST_FIRST.index(c.verdict), c.table_name))


def expectations_map(ledger: Ledger, table_name: str, now: datetime, most: int) -> HeatMap:
    """Returns a map of one table's expectations by the latest ``most`` runs that checked it."""

    def read(since: datetime | None) -> list[dict[str, Any]]:
        columns = (
            "severity",
            "meaning",
            "expectation",
            "unexpected_count",
            "version",
            "not_checked",
        )
        rows = _read(ledger, since, (*columns, "observed"), pc.field("table_name") == table_name)
        return list(_without_retried(rows).to_pylist())

    results = _widening(read, itemgetter("run_id"), now, most)
    cells: dict[tuple[str, str], Cell] = {}
    ends: dict[tuple[str, str], object] = {}
    for row in results:
        of, cell = (str(row["meaning"]), str(row["run_id"])), _cell(row)
        # Limits of one domain share a meaning.
        if ends.get(of) == row["at"]:
            cell = min(cells[of], cell, key=lambda one: WORST_FIRST.index(one.verdict))
        cells[of], ends[of] = cell, row["at"]
    heat = _heat_map([(row["at"], row["run_id"]) for row in results], cells, most)
    # Gates, whose rows have no version, don't record what they left out.
    checks = [row for row in results if row["version"] is not None]
    last = [row for row in checks if row["at"] == checks[-1]["at"]]
    return replace(
        heat, not_checked=tuple(text for row in last for text in row["not_checked"] or ())
    )


def _read(
    ledger: Ledger,
    since: datetime | None,
    columns: Sequence[str],
    where: pc.Expression | None = None,
) -> pa.Table:
    return ledger.table(ExpectationResult).scan(
        ("at", "run_id", "table_name", "success", *columns), since, where
    )


def _widening(
    read: Callable[[datetime | None], list[R]],
    run_id: Callable[[R], object],
    now: datetime,
    most: int,
) -> list[R]:
    """Read as far back as needed for this many runs.

    Hourly pipelines have them within days, busy ones within hours.
    """
    results: list[R] = []
    for step in _STEPS:
        results = read(None if step is None else now - step)
        if len(set(map(run_id, results))) >= most:
            break
    return results


def _heat_map(
    checked: Iterable[tuple[datetime, str]], cells: dict[tuple[str, str], Cell], most: int
) -> HeatMap:
    latest: dict[str, datetime] = {}
    for at, run_id in checked:
        latest[run_id] = max(at, latest.get(run_id, at))
    runs = sorted(latest, key=lambda run_id: (latest[run_id], run_id))[-most:]
    names = sorted({name for name, run_id in cells if run_id in set(runs)})
    rows = [(name, tuple(cells.get((name, run_id)) for run_id in runs)) for name in names]
    rows.sort(key=lambda row: WORST_FIRST.index(next(c.verdict for c in row[1][::-1] if c)))
    return HeatMap(tuple((latest[run_id], run_id) for run_id in runs), tuple(rows))


def _cell(row: dict[str, Any]) -> Cell:
    if row["success"] is None:
        return Cell("unknown", "couldn't be evaluated")
    if row["success"]:
        return Cell("passed", row["observed"] if is_admission(row["observed"]) else "met")
    count = f", {counted(row['unexpected_count'], 'row')}" if row["unexpected_count"] else ""
    return Cell(verdict_of(row["severity"], success=False), f"not met{count}")

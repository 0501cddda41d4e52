"""Routes events of a target with its own filter, as PostgreSQL's row filters do for a publication.

This stage is between decode and collapse. Spark evaluates the filter on the new row and, where one
was sent, on the old row; false and NULL both exclude a row. An UPDATE becomes what PostgreSQL's
chapter on row filters says:

=========  =========  ==========
old row    new row    becomes
=========  =========  ==========
matches    matches    UPDATE
matches    doesn't    DELETE
doesn't    matches    INSERT
doesn't    doesn't    nothing
=========  =========  ==========

TRUNCATE isn't an event, so it isn't filtered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import with_column
from waldelta.changes.decode.collapse import DELETE, INSERT
from waldelta.errors import NeedsSync, SchemaChanged
from waldelta.lake import write_parquet
from waldelta.lake.ledger import ColumnState
from waldelta.metadata_columns import RAW
from waldelta.pipeline.drift import Evolution
from waldelta.row_filter import RowFilter
from waldelta.row_filter.spark.evaluate import evaluate
from waldelta.row_filter.spark.translate import spark_condition
from waldelta.spark import Runner
from waldelta.spark_sql import string
from waldelta.types import TargetType

if TYPE_CHECKING:
    from waldelta.changes.decode.decode import DecodePlan

# What an event says about its old row. SAME: nothing, because the filter's columns are as in the
# new row. SENT: its values. UNKNOWN, only for a DELETE: too little to judge it; whether the target
# has the row decides.
SAME, SENT, UNKNOWN = 0, 1, 2
OLD_ROW = "old_row"
# Which task collapses an event; a column and a folder's name in Hive's style.
BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class Routing:
    """A target's filter, ready for Spark: its columns' positions, and the conditions on new and old
    rows.

    Between decode and route, an event has typed columns for each of these positions: ``n<i>`` (new)
    and ``p<i>`` (previous value, null unless ``old_row`` is SENT). For ``raw_positions``, it also
    has ``nr<i>`` and ``pr<i>``: texts that the type can't hold.
    """

    positions: tuple[int, ...]
    raw_positions: tuple[int, ...]
    new: str
    old: str

    def fields(self, types: Sequence[TargetType]) -> list[pa.Field]:
        """Returns the Arrow fields that events have in addition to collapse's."""
        columns = [pa.field(OLD_ROW, pa.int32())]
        for letter in "np":
            columns += [pa.field(f"{letter}{i}", types[i].arrow) for i in self.positions]
            columns += [pa.field(f"{letter}r{i}", pa.string()) for i in self.raw_positions]
        return columns


def plan_routing(row_filter: RowFilter | None, columns: Sequence[ColumnState]) -> Routing | None:
    """Returns how a target with these columns judges events; None without a filter.

    Raises FilterNotTranslatable.
    """
    if row_filter is None:
        return None
    names = [column.name for column in columns]
    sources = [column.name_on_source for column in columns]
    positions = tuple(sources.index(name) for name in row_filter.columns)
    raw_positions = tuple(i for i in positions if columns[i].stored_as.may_be_raw)

    def condition(letter: str) -> str:
        columns_of = {names[i]: f"{letter}{i}" for i in positions}
        entries = ", ".join(f"{string(names[i])}, {letter}r{i}" for i in raw_positions)
        raw = f"map({entries})" if entries else "cast(null as map<string,string>)"
        return spark_condition(row_filter, columns, {**columns_of, RAW: raw})

    return Routing(positions, raw_positions, condition("n"), condition("p"))


def check_columns(
    table: str, row_filter: RowFilter | None, evolution: Evolution, *, follows: bool
) -> None:
    """Check that the columns of the filter are still those for which it was analysed.

    Raises NeedsSync or SchemaChanged when they differ.
    """
    for name in row_filter.columns if row_filter is not None else ():
        # A column that was renamed on the source has another name there by now.
        n, column = next(
            (
                (n, c)
                for n, c in enumerate(evolution.columns)
                if c.state.name_on_source == name and c.source is not None
            ),
            (0, None),
        )
        if column is None or any(places[n] is None for places in evolution.positions):
            raise SchemaChanged(
                f"{table}: column {name!r}, which target.tables.{table}.where uses, was renamed or"
                " dropped: correct the filter in the pipeline file, then sync the table again"
            )
        if not column.same_type and follows:
            raise NeedsSync(f"{table}: column {name!r}, which its filter uses, changed its type")


def route(runner: Runner, events: pa.Table, plan: DecodePlan, folder: str) -> pa.Table:
    """Route few events, which are in memory.

    Where Arrow doesn't know the filter's conditions, Spark reads the filter's columns, from a file
    in ``folder``.
    """
    if plan.routing is None:
        return events
    judged = None if runner.is_started else operations_by_arrow(events, plan.routing)
    if judged is None:
        write_parquet(folder, events.select(plan.filtered_schema.names))
        rows = runner.spark().read.parquet(folder)
        judged = rows.selectExpr("ord", _operation(plan.routing)).toArrow()
    return routed(events.select(plan.event_schema.names), judged)


def operations_by_arrow(events: pa.Table, routing: Routing) -> pa.Table | None:
    """Returns each event's operation for the target, as judgement() finds it; None where only
    Spark can.
    """
    results = [evaluate(condition, events) for condition in (routing.new, routing.old)]
    if any(one is None for one in results):
        return None
    matches, did_match = (pc.fill_null(one, False).to_numpy() for one in results)
    op, old_row = events["op"].to_numpy(), events[OLD_ROW].fill_null(SAME).to_numpy()
    new = matches & (op != DELETE)
    old = (old_row == SENT) & did_match
    was_in = np.where(old_row == SENT, did_match, (old_row == UNKNOWN) | new)
    may_leave = (old_row == UNKNOWN) | old
    enters = (op != INSERT) & (old_row == SENT) & ~did_match
    is_change = (op != INSERT) & (op != DELETE)
    becomes = np.where(is_change & new & enters, INSERT, np.where(is_change & ~new, DELETE, op))
    concerns = np.select([op == INSERT, op == DELETE], [new, was_in], new | may_leave)
    return pa.table({"ord": events["ord"], "op": pa.array(becomes, pa.int32(), mask=~concerns)})


def judge_files(runner: Runner, paths: Sequence[str], routing: Routing, folder: str) -> None:
    """Judge the events whose filter's columns are in Parquet files, each with its BUCKET.

    Writes each event's ``ord`` and its operation for the target as Parquet into
    ``<folder>/bucket=N``.
    """
    judged = runner.spark().read.parquet(*paths).selectExpr(BUCKET, "ord", _operation(routing))
    judged.write.mode("overwrite").partitionBy(BUCKET).parquet(folder)


def _operation(routing: Routing) -> str:
    return f"cast({judgement(routing)} as int) as op"


def routed(events: pa.Table, judged: pa.Table) -> pa.Table:
    """Returns the events that concern the target, with the operation that they are for it.

    ``judged`` has each event's ``ord`` and its operation, in any order.
    """
    ordered = judged.sort_by("ord")["op"]
    places = pc.rank(events["ord"], tiebreaker="first").to_numpy() - 1
    kinds = ordered.take(pa.array(places))
    return with_column(events, "op", kinds).filter(pc.is_valid(kinds))


def judgement(routing: Routing) -> str:
    """Returns in Spark SQL the operation that an event is for the target; NULL for none."""
    # PostgreSQL doesn't evaluate a filter on a row that doesn't exist. A condition that could fail
    # mustn't do so either.
    new = f"(op <> {DELETE} and coalesce({routing.new}, false))"
    old = f"coalesce({routing.old}, false)"
    was_in = f"(case {OLD_ROW} when {SENT} then {old} when {UNKNOWN} then true else {new} end)"
    return (
        f"case op when {INSERT} then case when {new} then op end"
        f" when {DELETE} then case when {was_in} then op end"
        # Each condition appears once, because Spark doesn't keep the result of an expression after
        # AND.
        f" else case when {new} then case when {OLD_ROW} = {SENT} and not {old} then {INSERT} else"
        " op end"
        f" when {OLD_ROW} = {UNKNOWN} or ({OLD_ROW} = {SENT} and {old}) then {DELETE} end end"
    )

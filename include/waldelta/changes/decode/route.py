"""Route: events of a target with a filter of its own, judged one by one as PostgreSQL judges those
of a publication.

Stage between decode and collapse. Spark evaluates the filter on the new row and, where one was
sent, on the old row; false and NULL alike keep a row out. An UPDATE becomes what the chapter on row
filters says:

=========  =========  ==========
old row    new row    becomes
=========  =========  ==========
matches    matches    UPDATE
matches    doesn't    DELETE
doesn't    matches    INSERT
doesn't    doesn't    nothing
=========  =========  ==========

TRUNCATE is no event, so no filter sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import DELETE, INSERT
from waldelta.errors import NeedsSync, SchemaChanged
from waldelta.lake import write_parquet
from waldelta.lake.ledger import ColumnState
from waldelta.metadata_columns import RAW
from waldelta.pipeline.drift import Evolution
from waldelta.row_filter import RowFilter
from waldelta.row_filter.spark import spark_condition
from waldelta.row_filter.typed_tree import column_type
from waldelta.spark_sql import string
from waldelta.types import TargetType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from waldelta.changes.decode.decode import DecodePlan

# What an event says of its old row: nothing, since the filter's columns are as in the new one; its
# values; or, of a DELETE alone, too little to judge it: the target knows then whether it has the
# row.
SAME, SENT, UNKNOWN = 0, 1, 2
OLD_ROW = "old_row"


@dataclass(frozen=True, slots=True)
class Routing:
    """A target's filter, ready for Spark: the positions of its columns, and the conditions on new
    and on old rows.

    Between decode and route an event has, for each of these positions, the typed ``n<i>`` (new) and
    ``p<i>`` (previous value, null but where ``old_row`` is SENT), and ``nr<i>``, ``pr<i>`` for
    those of ``raw_positions``: texts that no type holds.
    """

    positions: tuple[int, ...]
    raw_positions: tuple[int, ...]
    new: str
    old: str

    def fields(self, types: Sequence[TargetType]) -> list[pa.Field]:
        """The Arrow fields that events have besides collapse's."""
        found = [pa.field(OLD_ROW, pa.int32())]
        for letter in "np":
            found += [pa.field(f"{letter}{i}", types[i].arrow) for i in self.positions]
            found += [pa.field(f"{letter}r{i}", pa.string()) for i in self.raw_positions]
        return found


def plan_routing(row_filter: RowFilter | None, columns: Sequence[ColumnState]) -> Routing | None:
    """How a target with these columns judges events; None without a filter. Raises
    FilterNotTranslatable.
    """
    if row_filter is None:
        return None
    names = [column.name for column in columns]
    positions = tuple(names.index(name) for name in row_filter.columns)
    raw_positions = tuple(
        i for i in positions if column_type(columns[i].type_name, columns[i].spark_type).may_be_raw
    )

    def condition(letter: str) -> str:
        held = {names[i]: f"{letter}{i}" for i in positions}
        entries = ", ".join(f"{string(names[i])}, {letter}r{i}" for i in raw_positions)
        raw = f"map({entries})" if entries else "cast(null as map<string,string>)"
        return spark_condition(row_filter, columns, {**held, RAW: raw})

    return Routing(positions, raw_positions, condition("n"), condition("p"))


def translate(row_filter: RowFilter, columns: Sequence[ColumnState]) -> Routing | None:
    """Whether the filter can be evaluated exactly; raises FilterNotTranslatable with the place that
    can't.
    """
    return plan_routing(row_filter, columns)


def check_columns(
    table: str, row_filter: RowFilter | None, evolution: Evolution, *, follows: bool
) -> None:
    """The filter was analysed for the columns that the copy had; raises NeedsSync or SchemaChanged
    when they differ.
    """
    for name in row_filter.columns if row_filter is not None else ():
        column = next((c for c in evolution.columns if c.source == name), None)
        absent = any(
            places[n] is None
            for places in evolution.positions
            for n, c in enumerate(evolution.columns)
            if c.source == name
        )
        if column is None or absent or column.state.name != name:
            raise SchemaChanged(
                f"{table}: column {name!r}, which target.tables.{table}.where uses, was renamed or"
                " dropped: correct the filter in the pipeline file, then sync the table again"
            )
        if not column.same_type and follows:
            raise NeedsSync(f"{table}: column {name!r}, which its filter uses, changed its type")


def route(events: DataFrame, routing: Routing, names: Sequence[str]) -> DataFrame:
    """The events that concern the target, as what they are to it; columns ``names``, as collapse
    takes them.
    """
    judged = events.withColumn("op", judgement(routing))
    return judged.where("op is not null").select(*names)


def route_in_driver(
    spark: SparkSession, events: pa.Table, plan: DecodePlan, folder: str
) -> pa.Table:
    """The same for few events, which the driver holds: Spark sees their filter's columns alone, as
    a file in ``folder``.
    """
    routing, names = plan.routing, plan.event_schema.names
    if routing is None:
        return events.select(names)
    needed = ["ord", "op", *(field.name for field in routing.fields(plan.types))]
    write_parquet(folder, events.select(needed))
    judged = (
        spark.read.parquet(folder)
        .select("ord", judgement(routing).cast("int").alias("op"))
        .toArrow()
    )
    ordered = judged.sort_by("ord")["op"]
    places = pc.rank(events["ord"], tiebreaker="first").to_numpy() - 1
    kinds = ordered.take(pa.array(places))
    routed = events.select(names)
    routed = routed.set_column(names.index("op"), routed.schema.field("op"), kinds)
    return routed.filter(pc.is_valid(kinds))


def judgement(routing: Routing) -> Column:
    """The operation that an event is to the target; NULL for none."""
    # PostgreSQL doesn't look at a row that isn't there, and neither may a condition that could
    # fail.
    new = f"(op <> {DELETE} and coalesce({routing.new}, false))"
    old = f"coalesce({routing.old}, false)"
    before = f"(case {OLD_ROW} when {SENT} then {old} when {UNKNOWN} then true else {new} end)"
    return F.expr(
        f"case op when {INSERT} then case when {new} then op end"
        f" when {DELETE} then case when {before} then op end"
        # Each condition once: Spark doesn't keep the result of what stands behind AND.
        f" else case when {new} then case when {OLD_ROW} = {SENT} and not {old} then {INSERT} else"
        " op end"
        f" when {OLD_ROW} = {UNKNOWN} or ({OLD_ROW} = {SENT} and {old}) then {DELETE} end end"
    )

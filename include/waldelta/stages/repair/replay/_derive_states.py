"""Derives the states at a target's watermark of the keys that a range of batches touched, as files.

In a replay this takes the place of apply's staging. The whole log from the range on is decoded, and
a semi-join keeps only events of relevant keys. Relevant keys are the touched ones, and those that
rows moved to or from since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import and_

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from waldelta.arrow import Bools, Ints, with_column
from waldelta.changes.decode.collapse import (
    ACTION_PURGE,
    ACTION_SKIP,
    ACTION_UPDATE,
    ACTION_UPSERT,
    DELETE,
    INSERT,
    RAW_ROWS,
    EventShape,
    Root,
    codes_of,
    find_chains,
    keys_only,
    remaining_rows,
)
from waldelta.changes.decode.decode import DecodePlan, collapse_events, decode, with_typed_keys
from waldelta.changes.decode.route import OLD_ROW, UNKNOWN, judgement
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.stage.net_files import rows_at_once
from waldelta.changes.stage.read_changes import read_row_changes
from waldelta.changes.stage.stage import Staged, tasks_for
from waldelta.errors import ApplyError
from waldelta.lake import write_parquet
from waldelta.lake.changelog import ChangeLog
from waldelta.metadata_columns import OURS
from waldelta.pgoutput.transactions import SEQ_BITS
from waldelta.pipeline import Job
from waldelta.spark import Runner
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.task_attempts import once
from waldelta.spark_sql import parquet, quote
from waldelta.stages.repair.mend.mend import TWICE, ExpectedRows, differences
from waldelta.stages.repair.replay._plan import ReplayPlan
from waldelta.target_modes.target_mode import MOVED

# Prefixes of the typed key of the row that an event replaces, and of the row that it writes; null
# where there is none.
_SOURCE, _DESTINATION = "s", "d"
# Prefix of a key alone; a further column says whether rows moved from or to it.
_KEY = "k"


def derive_states(runner: Runner, change_log: ChangeLog, replay: ReplayPlan, folder: str) -> int:
    """Write the final states as Parquet into ``folder``; returns how many there are.

    With a TRUNCATE in or after the replayed batches these are all keys touched since, because no
    other key has a row. For merged partitions, these are all keys of the truncated partitions.
    """
    plan, decode_plan = replay.target, replay.target.decode
    events = _events(runner, change_log, plan)
    moves = plan.volume.moves or plan.may_move
    tasks = tasks_for(plan.volume)
    keys = [f"{_KEY}{k}" for k in range(len(decode_plan.shape.key))]
    for k, key in enumerate(keys):
        events = events.withColumn(key, F.coalesce(f"{_DESTINATION}{k}", f"{_SOURCE}{k}"))
    if plan.is_truncated:
        events = events.withColumn(MOVED, F.lit(moves))
    else:
        events = events.join(
            _keys(runner, events, replay, moves=moves, folder=f"{folder}-moved"), keys
        )
    # Keys that rows moved between go to the same task, so that no chain is split.
    events = events.repartition(tasks, F.when(F.col(MOVED), F.lit(0)).otherwise(F.hash(*keys)))

    def derive_part(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        batches = list(parts)
        if batches:
            events = pa.Table.from_batches(batches).cast(decode_plan.event_schema)
            states = collapse_events(events, decode_plan, fold=final_states)
            yield from states.to_batches(max_chunksize=rows_at_once(states))

    states = events.select(*decode_plan.event_schema.names).mapInArrow(
        once(derive_part), ddl(decode_plan.net_schema)
    )
    states.write.mode("overwrite").parquet(folder)
    return runner.spark().read.parquet(folder).count()


def _events(runner: Runner, change_log: ChangeLog, target: TargetPlan) -> DataFrame:
    """Returns every event of the target in the range, routed, with its typed keys."""
    plan = target.decode
    changes = read_row_changes(runner, change_log, plan, target.state.relation_ids)
    # A key that doesn't include the leaf partition may have a row in another one, which no
    # condition on the leaf finds.
    ends = bool(target.truncated_leaves) and plan.relid not in plan.shape.key
    decoded = replace(plan, truncated_at={}) if ends else plan
    sides = {f"{_SOURCE}{k}": (f"o{k}", i) for k, i in enumerate(plan.shape.key)}
    sides |= {f"{_DESTINATION}{k}": (f"c{i}", i) for k, i in enumerate(plan.shape.key)}
    fields = [pa.field(name, plan.types[i].arrow) for name, (_, i) in sides.items()]
    schema = pa.schema([*plan.decoded_schema, *fields])

    def decode_keyed(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            for found in decode(part, decoded):
                events = with_ends(found, plan) if ends else found
                typed = with_typed_keys(events, plan)
                columns = [*events.columns, *(typed[name] for name, _ in sides.values())]
                yield from pa.table(columns, schema=schema).to_batches()

    events = changes.mapInArrow(once(decode_keyed), ddl(schema))
    if plan.routing is not None:
        events = events.withColumn("op", judgement(plan.routing)).where("op is not null")
    # An event that the filter turned into an INSERT or a DELETE has only one side.
    for name in sides:
        absent = INSERT if name.startswith(_SOURCE) else DELETE
        events = events.withColumn(name, F.when(F.col("op") != absent, F.col(name)))
    return events


def with_ends(events: pa.Table, plan: DecodePlan) -> pa.Table:
    """Returns one leaf's events, with those before its last TRUNCATE as DELETEs of each touched
    key.

    No row of the leaf partition remains then, and no other leaf had a row of a key that was in it.
    """
    leaf = int(events[f"c{plan.relid}"][0].as_py()) if len(events) else 0
    before = np.asarray(events["ord"]) <= plan.truncated_at.get(leaf, -1)
    if not before.any():
        return events
    op = np.asarray(events["op"])
    ended = [events.filter(pa.array(before & (op != other))) for other in (INSERT, DELETE)]
    for k, i in enumerate(plan.shape.key):
        ended[1] = with_column(ended[1], f"o{k}", ended[1][f"c{i}"])
    ends = pa.concat_tables(ended)
    ends = with_column(ends, "op", pa.array(np.full(len(ends), DELETE, np.int32)))
    if plan.routing is not None:
        ends = with_column(ends, OLD_ROW, pa.array(np.full(len(ends), UNKNOWN, np.int32)))
    return pa.concat_tables([ends, events.filter(pa.array(~before))])


def _keys(
    runner: Runner, events: DataFrame, replay: ReplayPlan, *, moves: bool, folder: str
) -> DataFrame:
    """Returns the relevant keys: touched in the replayed batches, or connected to these by moved
    rows.
    """
    sides = [
        [
            F.col(f"{letter}{k}").alias(f"{_KEY}{k}")
            for k in range(len(replay.target.decode.shape.key))
        ]
        for letter in (_SOURCE, _DESTINATION)
    ]
    within = events.where(_counts(replay))
    one, other = (within.select(*side).where(F.col(f"{_KEY}0").isNotNull()) for side in sides)
    touched = one.unionByName(other).distinct()
    unmoved = touched.withColumn(MOVED, F.lit(False))
    if not moves or not _write_moved(runner, events, touched, folder):
        return unmoved
    moved = runner.spark().read.parquet(folder)
    names = [name for name in moved.columns if name != MOVED]
    return unmoved.join(moved, names, "left_anti").unionByName(moved.withColumn(MOVED, F.lit(True)))


def _counts(replay: ReplayPlan) -> Column:
    """Returns the condition that an event touches a key that is relevant by itself."""
    in_range = F.shiftright("ord", SEQ_BITS) <= replay.upto
    if not (leaves := replay.target.truncated_leaves):
        return in_range
    return in_range | F.col(f"c{replay.target.decode.relid}").cast("string").isin(*map(str, leaves))


def _write_moved(runner: Runner, events: DataFrame, touched: DataFrame, folder: str) -> bool:
    """Write the keys that moved rows connect to touched ones; returns whether there are any."""
    names = touched.columns
    ends = [[f"{letter}{k}" for k in range(len(names))] for letter in (_SOURCE, _DESTINATION)]
    same = reduce(and_, (F.col(s).eqNullSafe(F.col(d)) for s, d in zip(*ends, strict=True)))
    has_both = F.col(ends[0][0]).isNotNull() & F.col(ends[1][0]).isNotNull()
    moves = events.where(has_both & ~same).select(*ends[0], *ends[1]).distinct().toArrow()
    if not len(moves):
        return False
    source, destination = (moves.select(side).rename_columns(names) for side in ends)
    write_parquet(folder, pa.concat_tables([source, destination]))
    known = (
        touched.join(runner.spark().read.parquet(folder), names, "left_semi")
        .toArrow()
        .select(names)
        .cast(source.schema)
    )
    every = pa.concat_tables([known, source, destination])
    codes = codes_of([every[name] for name in names])
    first, second = len(known), len(known) + len(moves)
    hit = pa.array(reached(codes[:first], codes[first:second], codes[second:]))
    chosen = pa.concat_tables([source.filter(hit), destination.filter(hit)])
    write_parquet(folder, chosen.group_by(names).aggregate([]))
    return len(chosen) > 0


def final_states(
    events: pa.Table, shape: EventShape, *, base_is_empty: bool | Bools = False
) -> pa.Table:
    """Return one row per key that the events touch, in the columns of collapse's net changes.

    ``action`` is ``upsert`` for a row that the events inserted. It is ``update`` for a row that
    existed before them, with a flag ``u<i>`` for each value that no event sent. It is ``purge`` for
    a key without a row. ``b<k>`` is the key. ``events`` (columns as in collapse) must include the
    events of all keys that rows moved from and to. A key that only an UPDATE of a missing row would
    have given a row is left out: a PostgreSQL subscriber skips that UPDATE. ``base_is_empty`` as in
    collapse().
    """
    events, chains = find_chains(events, shape, base_is_empty)
    live = chains.live()
    held = chains.origin[live] == Root.BASE
    last = chains.touch_event[chains.is_last]
    # An event that consumed a key as the last to touch it left no row there.
    gone = np.sort(last[chains.destination[last] != chains.touch_key[chains.is_last]])
    parts = [
        remaining_rows(events, shape, chains, ACTION_UPDATE, live[held], base=(live[held], "new")),
        remaining_rows(
            events, shape, chains, ACTION_UPSERT, live[~held], base=(live[~held], "new")
        ),
        keys_only(events, shape, ACTION_PURGE, gone, "old"),
    ]
    return pa.concat_tables(part for part in parts if part is not None)


def reached(touched: Ints, source: Ints, destination: Ints) -> Bools:
    """Return which moves concern a touched key, directly or through other moves.

    The moves go from ``source`` to ``destination``, as codes of keys.

    >>> reached(np.array([1]), np.array([1, 2, 7]), np.array([2, 3, 8])).tolist()
    [True, True, False]
    """
    size = (
        int(max((codes.max(initial=-1) for codes in (touched, source, destination)), default=-1))
        + 1
    )
    found = np.zeros(size, np.bool_)
    found[touched] = True
    while True:
        hit: Bools = found[source] | found[destination]
        before = int(found.sum())
        found[source[hit]] = found[destination[hit]] = True
        if int(found.sum()) == before:
            return hit


def write_differences(
    runner: Runner,
    job: Job,
    states: str,
    replay: ReplayPlan,
    folder: str,
    discarded: str | None = None,
) -> Staged:
    """Compare the states in Parquet folder ``states`` with the target.

    Writes the changes into ``folder``. A row that differs becomes an update, a missing row an
    upsert, an extra row a delete. A row that may rightly be missing is counted as skipped. Rows of
    the keys in Parquet folder ``discarded`` are left as they are. Raises ApplyError when the target
    has a key twice.
    """
    decode = replay.target.decode
    rows = runner.spark().read.parquet(states)
    target = job.lake.target(replay.target.state.table_name).frame(runner.spark())
    if discarded is not None:
        but, shape = runner.spark().read.parquet(discarded), decode.shape
        rows = rows.join(but, shape.bases, "left_anti")
        key = zip(shape.bases, shape.key, strict=True)
        same = [target[quote(decode.names[i])] == but[base] for base, i in key]
        target = target.join(but, same, "left_anti")
    missing = f"'{ACTION_UPSERT}'"
    if not replay.invents:
        missing = f"case s.action when '{ACTION_UPDATE}' then '{ACTION_SKIP}' else {missing} end"
    metadata, extra = OURS if job.pipeline.target.metadata_columns else (), _extra(replay.target)
    expected = ExpectedRows(rows, decode.columns, decode.shape, metadata, missing, extra)
    differences(expected, target).write.mode("overwrite").parquet(folder)
    return _staged(runner, replay.target, folder)


def _staged(runner: Runner, plan: TargetPlan, folder: str) -> Staged:
    """Returns the staged changes with their counts; raises ApplyError for a key twice."""
    found = runner.spark().read.parquet(folder).groupBy("action")
    lacking = [F.col(flag) for flag in plan.decode.shape.flags]
    is_new = F.col("action") == ACTION_UPSERT
    incomplete = is_new & F.greatest(F.lit(False), F.lit(False), *lacking)
    by_action = found.agg(
        F.count("*").alias("rows"),
        F.count("raw").alias("verbatim"),
        F.max(incomplete).alias("incomplete"),
    ).collect()
    counts = {row["action"]: row["rows"] for row in by_action}
    if TWICE in counts:
        raise ApplyError(
            f"{plan.state.table_name}: its target has rows with the same key, which no replay can"
            " tell apart: copy it again (initial sync with its name in tables)"
        )
    if verbatim := sum(row["verbatim"] for row in by_action):
        counts[RAW_ROWS] = verbatim
    return Staged(folder, parquet(folder), counts, any(row["incomplete"] for row in by_action))


def _extra(plan: TargetPlan) -> str | None:
    """Returns which rows leave the target without a state: those that a TRUNCATE removed."""
    if not plan.truncated:
        return None
    if not plan.decode.merges_leaves:
        return "true"
    return f"t.t{plan.decode.relid} in ({', '.join(map(str, plan.truncated_leaves))})"

"""Touched keys: every key that a range of landed batches removes or writes a row of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from waldelta.changes.decode.collapse import DELETE, INSERT, ColumnNumbering, codes_of
from waldelta.changes.decode.decode import CHANGE_COLUMNS, DecodePlan, decode, typed_key
from waldelta.changes.decode.net_rows import first_of_each
from waldelta.changes.decode.target_plan import TargetPlan, plan_target
from waldelta.changes.stage.net_files import check_rows
from waldelta.errors import NeedsSync
from waldelta.lake import open_parquet, remove_folder
from waldelta.lake.changelog import BatchNumbers, BatchRanges, ChangeLog
from waldelta.lake.changelog.row_messages import row_messages
from waldelta.lake.ledger import TableState
from waldelta.pipeline import Job
from waldelta.pipeline.drift import read_catalog_state, schema_rules
from waldelta.pipeline.targets import Watermarks
from waldelta.postgres import read_types
from waldelta.spark import Runner
from waldelta.spark.runner import shares

_WRITTEN = pa.schema([("rows", pa.int64())])


def waiting_keys(runner: Runner, job: Job, state: TableState, folder: str) -> pa.Table | None:
    """Returns changed_keys() of what has landed and the target doesn't have yet."""
    identity = job.read_identity()
    last = job.change_log(identity).last_batch() or 0
    batches = BatchNumbers(Watermarks(job, identity).of(state), last)
    return changed_keys(runner, job, state, batches, folder)


def changed_keys(
    runner: Runner, job: Job, state: TableState, batches: BatchNumbers, folder: str
) -> pa.Table | None:
    """Returns the keys that a range of batches changes (touched_schema()); None: it changes none.

    Changes by transactions that the state's snapshot sees are left out. Tasks write into
    ``folder``, which is empty afterwards. Raises NeedsSync for changes that aren't only of rows.
    """
    if batches.is_empty:
        return None
    identity = job.read_identity()
    change_log = job.change_log(identity)
    sizes = job.read_landed_sizes(identity, *batches)
    batch_range = BatchRanges(change_log, sizes).of(batches)
    with job.source.connect("repair") as connection:
        present = read_catalog_state(connection, [state])[state.table_name]
        types, rules = partial(read_types, connection), schema_rules(job, state)
        plan: TargetPlan = plan_target(types, batch_range, state, present, rules)
    if plan.truncated or plan.evolution is not None:
        raise NeedsSync("it was truncated or altered during the repair")
    return read_touched(runner, change_log, plan, folder) if plan.volume.rows else None


def read_touched(runner: Runner, change_log: ChangeLog, plan: TargetPlan, folder: str) -> pa.Table:
    """Returns the keys that a plan's changes touch, one per printed form.

    The target's own filter is ignored, because the row itself is read again later.
    """
    decode = replace(plan.decode, routing=None)
    if plan.rows is not None:
        return touched_keys(plan.rows.to_batches(), decode)
    condition = row_messages(decode.segments, plan.state.relation_ids, decode.snapshot)
    dealt, lake = shares(change_log.pieces(condition)), change_log.lake
    base, _, name = folder.rpartition("/")

    def write(number: int) -> pa.Table:
        keys = touched_keys(change_log.read(dealt[number], condition, CHANGE_COLUMNS), decode)
        files = lake.files(base)
        files.create_dir(name)
        pq.write_table(keys, f"{name}/part-{number}.parquet", filesystem=files)
        return pa.table([[len(keys)]], schema=_WRITTEN)

    try:
        written = sum(row["rows"] for row in runner.run(len(dealt), _WRITTEN, write))
        keys = open_parquet(folder).to_table() if dealt else touched_keys([], decode)
    finally:
        remove_folder(folder)
    check_rows(folder, len(keys), written)
    texts = [keys[name] for name in keys.column_names if name.startswith("t")]
    return keys.take(pa.array(first_of_each(codes_of(texts))))


def touched_schema(plan: DecodePlan) -> pa.Schema:
    """Returns the schema: ``t<k>``, the key's columns as printed, then ``k<k>`` in the target's
    types.
    """
    key = plan.numbering.key
    texts = [(f"t{k}", pa.string()) for k in range(len(key))]
    return pa.schema([*texts, *((f"k{k}", plan.types[i].arrow) for k, i in enumerate(key))])


def touched_keys(changes: Iterable[pa.RecordBatch], plan: DecodePlan) -> pa.Table:
    """Returns the old and new keys of the events in ``changes`` (CHANGE_COLUMNS), one per printed
    form.
    """
    plan = _of_key(plan)
    names = [f"t{k}" for k in range(len(plan.numbering.key))]
    tables = [pa.schema([(name, pa.string()) for name in names]).empty_table()]
    for events in (events for part in changes for events in decode(part, plan)):
        op = events["op"].to_numpy()
        for columns, mask in (
            (plan.numbering.old_keys, op != INSERT),
            ([f"c{i}" for i in plan.numbering.key], op != DELETE),
        ):
            rows = events.select(columns).filter(pa.array(mask)).rename_columns(names)
            tables.append(rows.cast(tables[0].schema))
    keys = pa.concat_tables(tables).group_by(names).aggregate([])
    present = np.ones(len(keys), np.bool_)
    for k, i in enumerate(plan.numbering.key):
        keys = keys.append_column(
            f"k{k}", typed_key(keys[f"t{k}"], plan.types[i], plan.names[i], present)
        )
    return keys.cast(touched_schema(plan))


def _of_key(plan: DecodePlan) -> DecodePlan:
    """Returns the plan for events with only the key's columns."""
    key = plan.numbering.key
    return replace(
        plan,
        numbering=ColumnNumbering(len(key), tuple(range(len(key)))),
        names=tuple(plan.names[i] for i in key),
        types=tuple(plan.types[i] for i in key),
        positions=tuple(tuple(places[i] for i in key) for places in plan.positions),
        fills=tuple(plan.fills[i] for i in key),
        wire_names=tuple(plan.wire_names[i] for i in key),
        relid=key.index(plan.relid) if plan.relid in key else None,
    )

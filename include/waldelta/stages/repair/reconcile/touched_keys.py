"""Touched keys: writes every key that a range of landed batches removes or writes a row of, for a
repair to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from waldelta.changes.decode.collapse import DELETE, INSERT
from waldelta.changes.decode.decode import DecodePlan, decode, typed_key
from waldelta.changes.decode.target_plan import TargetPlan, plan_target
from waldelta.changes.stage.read_changes import read_row_changes
from waldelta.errors import NeedsSync
from waldelta.lake import write_parquet
from waldelta.lake.changelog import BatchNumbers, BatchRanges, ChangeLog
from waldelta.lake.ledger import TableState
from waldelta.pipeline import Job
from waldelta.pipeline.drift import read_catalog_state
from waldelta.postgres.type_catalog import read_types
from waldelta.spark import Runner
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.task_attempts import once


def stage_changed(
    runner: Runner, job: Job, state: TableState, batches: BatchNumbers, folder: str
) -> int:
    """Write the keys that a range of batches changes; returns how many there are.

    Changes by transactions that the state's snapshot sees are left out. Raises NeedsSync for
    changes that aren't only of rows.
    """
    if batches.is_empty:
        return 0
    identity, target = job.read_identity(), job.pipeline.target
    change_log = job.change_log(identity)
    sizes = job.read_landed_sizes(identity, *batches)
    batch_range = BatchRanges(change_log, sizes).of(batches)
    with job.source.connect("repair") as connection:
        present = read_catalog_state(connection, [state])[state.table_name]
        rules = target.schema_rules_of(state.table_name)
        plan: TargetPlan = plan_target(
            partial(read_types, connection), batch_range, state, present, rules
        )
    if plan.truncated or plan.evolution is not None:
        raise NeedsSync("it was truncated or altered during the repair")
    return stage_touched(runner, change_log, plan, folder) if plan.volume.rows else 0


def stage_touched(runner: Runner, change_log: ChangeLog, plan: TargetPlan, folder: str) -> int:
    """Write the keys (columns as in touched_schema()) as Parquet into ``folder``; returns how many.

    The target's own filter is ignored, because the row itself is read again later.
    """
    everything = replace(plan.decode, routing=None)
    if plan.rows is not None:
        keys = touched_keys(plan.rows.to_batches(), everything)
        write_parquet(folder, keys)
        return len(keys)

    def keys_of(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            yield from touched_keys([part], everything).to_batches()

    changes = read_row_changes(runner, change_log, everything, plan.state.relation_ids)
    found = changes.mapInArrow(once(keys_of), ddl(touched_schema(everything)))
    found.dropDuplicates([f"t{k}" for k in range(len(everything.shape.key))]).write.mode(
        "overwrite"
    ).parquet(folder)
    return runner.spark().read.parquet(folder).count()


def touched_schema(plan: DecodePlan) -> pa.Schema:
    """Returns the schema: ``t<k>``, the key's columns as printed, then ``k<k>`` in the target's
    types.
    """
    key = plan.shape.key
    texts = [(f"t{k}", pa.string()) for k in range(len(key))]
    return pa.schema([*texts, *((f"k{k}", plan.types[i].arrow) for k, i in enumerate(key))])


def touched_keys(changes: Iterable[pa.RecordBatch], plan: DecodePlan) -> pa.Table:
    """Returns the old and new keys of the events in ``changes`` (CHANGE_COLUMNS), one per printed
    form.
    """
    names = [f"t{k}" for k in range(len(plan.shape.key))]
    found = [pa.schema([(name, pa.string()) for name in names]).empty_table()]
    for events in (events for part in changes for events in decode(part, plan)):
        op = events["op"].to_numpy()
        for columns, chosen in (
            (plan.shape.old_keys, op != INSERT),
            ([f"c{i}" for i in plan.shape.key], op != DELETE),
        ):
            rows = events.select(columns).filter(pa.array(chosen)).rename_columns(names)
            found.append(rows.cast(found[0].schema))
    keys = pa.concat_tables(found).group_by(names).aggregate([])
    present = np.ones(len(keys), np.bool_)
    for k, i in enumerate(plan.shape.key):
        keys = keys.append_column(
            f"k{k}", typed_key(keys[f"t{k}"], plan.types[i], plan.names[i], present)
        )
    return keys.cast(touched_schema(plan))

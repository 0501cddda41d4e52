"""Apply: landed batches go into the targets, each target by its own watermark, each batch range as one commit."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.changes import read_changes
from spark_jobs.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_SKIP,
    ACTION_UPDATE,
    ACTION_UPSERT,
)
from spark_jobs.decode import CHANGE_COLUMNS, ROW_KINDS, DecodePlan, collapse_events, decode
from spark_jobs.merge import CommitTag, insert_statement, merge_statement, tagged
from spark_jobs.plan import TargetPlan, plan_target
from spark_jobs.task_error import first_line, named_error
from waldelta.change_log import ChangeLog
from waldelta.consume import SlotIdentity
from waldelta.errors import ApplyError, LateWriter, StateError, WaldeltaError
from waldelta.job import Job
from waldelta.lake import bookkeeping_uri, encode_segment, remove_folder, sync_commit
from waldelta.ledger import BatchCut, TableState, TargetCut, now
from waldelta.locks import target_lock
from waldelta.watermark import Watermarks, apply_app_id, last_cut, synced_states, uri_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

# One Python task collapses about this many rows; more of them mean more tasks.
ROWS_PER_TASK = 500_000
# A full batch and the short one behind it are one step: every MERGE rewrites the files it touches.
BATCHES_PER_STEP = 2


@dataclass
class Applied:
    """What an apply did: step by step, and the tables that failed."""

    steps: list[BatchCut] = field(default_factory=list)
    failures: dict[str, WaldeltaError] = field(default_factory=dict)


def apply(spark: SparkSession, job: Job) -> Applied:
    """Bring every synced target up to the last landed batch, publishing a cut whenever all of them got there.

    Small batches are applied together, up to twice batch.max_changes at once. A failing table doesn't hold up the others;
    it is named in ``failures`` and resumes from its own watermark.
    """
    identity = job.slot_identity()
    change_log = job.change_log(identity)
    applied = Applied()
    last = change_log.last_batch()
    if last is None:
        return applied
    states = synced_states(job)
    held = Watermarks(job, identity)
    watermarks = _watermarks(job, held, states, applied.failures)
    sizes = change_log.sizes(min(watermarks.values(), default=last), last)
    for upto in _steps(sizes, BATCHES_PER_STEP * job.pipeline.batch.max_changes):
        cuts = []
        behind = all(watermark <= upto for watermark in watermarks.values())
        for state in states:
            name = state.table_name
            if name in applied.failures:
                continue
            try:
                cut = _apply_locked(spark, job, held, state, (watermarks[name], upto))
            except WaldeltaError as err:
                log.error("table=%s not applied: %s", name, err)
                applied.failures[name] = err
            else:
                watermarks[name] = max(watermarks[name], upto)
                cuts.append(cut)
        applied.steps.append(_finish_step(job, change_log, upto, cuts, complete=behind and not applied.failures))
    return applied


def _watermarks(
    job: Job, held: Watermarks, states: Sequence[TableState], failures: dict[str, WaldeltaError]
) -> dict[str, int]:
    """The last batch of each target; those that can't be fed go into ``failures``."""
    for name, broken in job.table_states().items():
        if broken.status == "failed":
            failures[name] = StateError(
                f"{name} gets no changes since its last sync failed ({broken.reason}): run the initial sync for it again"
            )
    watermarks: dict[str, int] = {}
    for state in states:
        try:
            watermarks[state.table_name] = held.of(state)
        except StateError as err:
            failures[state.table_name] = err
    return watermarks


def _steps(sizes: dict[int, int], most: int) -> list[int]:
    """The batches after which a step ends, so that no step takes more messages than allowed.

    >>> _steps({1: 40, 2: 50, 3: 20, 4: 500}, 100)
    [2, 3, 4]
    """
    ends: list[int] = []
    taken = 0
    for batch in sorted(sizes):
        if ends and taken + sizes[batch] <= most:
            ends.pop()
            taken += sizes[batch]
        else:
            taken = sizes[batch]
        ends.append(batch)
    return ends


def _finish_step(job: Job, change_log: ChangeLog, batch: int, cuts: list[TargetCut], *, complete: bool) -> BatchCut:
    landed = change_log.landed(batch)
    cut = BatchCut(now(), job.run_id, batch, landed.end_lsn, landed.commit_ts, cuts)
    newest = last_cut(job)
    if complete and cuts and (newest is None or _members(newest) != _members(cut) or newest.batch != batch):
        job.ledger.append(cut)
    return cut


def _members(cut: BatchCut) -> set[tuple[str, int]]:
    return {(target.table_name, target.generation) for target in cut.targets}


def _apply_locked(
    spark: SparkSession, job: Job, held: Watermarks, state: TableState, batches: tuple[int, int]
) -> TargetCut:
    began = time.monotonic()
    with target_lock(job, state.table_name):
        _check_same_copy(job, state)
        # Another run may have applied some of it since the watermarks were read.
        after = max(batches[0], held.of(state))
        cut = _apply_target(spark, job, held.identity, state, (after, batches[1]))
    log.info(
        "table=%s applied up to batch %d: %d inserted, %d updated, %d deleted, %d skipped, %.1f s",
        state.table_name, batches[1], cut.inserted, cut.updated, cut.deleted, cut.skipped, time.monotonic() - began,
    )  # fmt: skip
    return cut


def _check_same_copy(job: Job, state: TableState) -> None:
    """Under the target's lock: the copy is still the one whose changes were chosen."""
    present = job.table_states().get(state.table_name)
    if present is None or (present.generation, present.status) != (state.generation, state.status):
        raise LateWriter(f"{state.table_name} was synced again meanwhile: its changes are applied by the next run")


def _apply_target(
    spark: SparkSession, job: Job, identity: SlotIdentity, state: TableState, batches: tuple[int, int]
) -> TargetCut:
    uri = uri_of(job, state.table_name)
    tag = CommitTag(apply_app_id(identity, state), batches[1])
    if batches[0] >= batches[1]:
        return _read_cut(job, uri, state, tag)
    change_log = job.change_log(identity)
    with job.connect("apply") as connection:
        plan = plan_target(connection, change_log, state, batches)
    if not plan.volume.rows and not plan.truncated:
        return _read_cut(job, uri, state, tag)
    # Any run id, however long, gives a short folder name of its own.
    run = hashlib.sha256(job.run_id.encode()).hexdigest()[:12]
    folder = encode_segment(f"{state.table_name[:60]}-{state.generation}-{tag.batch}-{run}")
    staged = f"{bookkeeping_uri(job.pipeline.target.root, 'staging')}/{folder}"
    try:
        counts = _stage(spark, change_log, plan, staged)
        _merge(spark, job, uri, staged, plan, tag)
    except WaldeltaError:
        raise
    except Exception as err:
        raise _apply_error(state, err) from err
    finally:
        remove_folder(staged)
    return _read_cut(job, uri, state, tag, counts, truncated=plan.truncated)


def _stage(spark: SparkSession, change_log: ChangeLog, plan: TargetPlan, staged: str) -> dict[str, int]:
    """Decode and collapse the range into files; returns the number of net changes by action."""
    changes = (
        read_changes(spark, change_log, plan.decode.segments)
        .where(F.col("relation_id").isin(plan.state.relation_ids) & F.col("kind").isin(*ROW_KINDS))
        .where(F.col("xid8") >= plan.decode.snapshot.xmin)
        .select(*CHANGE_COLUMNS)
    )
    changes.transform(_collapsed(plan)).write.mode("overwrite").parquet(staged)
    by_action = spark.read.parquet(staged).groupBy("action").count().collect()
    _check_complete(spark, staged, plan)
    return {row["action"]: row["count"] for row in by_action}


def _collapsed(plan: TargetPlan) -> Callable[[DataFrame], DataFrame]:
    """The transformation from raw messages to net changes.

    Chains of moved keys cross any partitioning by key, so a range with moves is collapsed by one task.
    """
    decode_plan, shape, empty = plan.decode, plan.decode.shape, plan.truncated
    events_schema = from_arrow_schema(decode_plan.event_schema, prefer_timestamp_ntz=True)
    result_schema = from_arrow_schema(decode_plan.net_schema, prefer_timestamp_ntz=True)

    def decode_part(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            for events in decode(part, decode_plan):
                yield from events.to_batches()

    def collapse_part(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _collapse_all(list(parts), decode_plan, empty)

    def decode_and_collapse(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _collapse_all(list(decode_part(parts)), decode_plan, empty)

    def transform(changes: DataFrame) -> DataFrame:
        tasks = 1 if plan.volume.moves or plan.may_move else -(-plan.volume.rows // ROWS_PER_TASK)
        if tasks <= 1:
            return changes.coalesce(1).mapInArrow(decode_and_collapse, result_schema)
        key = [F.coalesce(f"o{k}", f"c{i}") for k, i in enumerate(shape.key)]
        events = changes.mapInArrow(decode_part, events_schema)
        return events.repartition(tasks, *key).mapInArrow(collapse_part, result_schema)

    return transform


def _collapse_all(parts: Sequence[pa.RecordBatch], plan: DecodePlan, base_is_empty: bool) -> Iterator[pa.RecordBatch]:
    if parts:
        events = pa.Table.from_batches(parts, plan.event_schema)
        yield from collapse_events(events, plan, base_is_empty=base_is_empty).to_batches(max_chunksize=65_536)


def _check_complete(spark: SparkSession, staged: str, plan: TargetPlan) -> None:
    """A new row must bring every value; one that arrives with an unchanged TOAST value has nowhere to take it from."""
    flags = [F.col(flag) for flag in plan.decode.shape.flags]
    if not flags:
        return
    fresh = F.col("action").isin(ACTION_INSERT, ACTION_UPSERT)
    incomplete = spark.read.parquet(staged).where(fresh & F.greatest(F.lit(False), *flags)).limit(1).count()
    if incomplete:
        raise ApplyError(
            f"{plan.state.table_name}: a row came into the row filter without the value of a large column that did not change; "
            f"set REPLICA IDENTITY FULL on the table, then sync it again"
        )


def _merge(spark: SparkSession, job: Job, uri: str, staged: str, plan: TargetPlan, tag: CommitTag) -> None:
    source = f"parquet.`{staged}`"
    keep_metadata = job.pipeline.target.metadata_columns
    names = plan.decode.names
    if plan.truncated or not plan.decode.shape.key:
        statement = insert_statement(uri, source, names, metadata_columns=keep_metadata, overwrite=plan.truncated)
    else:
        statement = merge_statement(uri, source, names, plan.decode.shape, metadata_columns=keep_metadata)
    with tagged(spark, tag):
        spark.sql(statement).collect()


def _read_cut(
    job: Job,
    uri: str,
    state: TableState,
    tag: CommitTag,
    counts: dict[str, int] | None = None,
    *,
    truncated: bool = False,
) -> TargetCut:
    """What the target's own log says was done; raises LateWriter when the commit isn't there."""
    table = DeltaTable(uri, storage_options=job.storage_options)
    if counts is None:
        return TargetCut(state.table_name, state.generation, table.version())
    for entry in table.history(50):
        if entry.get("userMetadata") == tag.metadata:
            version, metrics = int(entry["version"]), entry.get("operationMetrics", {})
            sync_commit(uri, version)
            return TargetCut(
                state.table_name, state.generation, version, truncated=truncated, **_effects(metrics, counts)
            )
    if any(counts.values()):
        raise LateWriter(f"{state.table_name}: batch {tag.batch} isn't in the target's history: run again")
    return TargetCut(state.table_name, state.generation, table.version())


def _effects(metrics: dict[str, Any], counts: dict[str, int]) -> dict[str, int]:
    """Rows inserted, updated, deleted and skipped, from Delta's own metrics of the commit.

    A new row that found one at its key replaced it: Delta counts that as updated. Updates and deletes that found no
    row are skipped, as PostgreSQL's subscriber does.
    """
    if "numTargetRowsInserted" not in metrics:  # an INSERT, not a MERGE
        return {"inserted": int(metrics.get("numOutputRows", 0)), "skipped": counts.get(ACTION_SKIP, 0)}
    inserted = int(metrics.get("numTargetRowsInserted", 0))
    updated = int(metrics.get("numTargetRowsUpdated", 0))
    deleted = int(metrics.get("numTargetRowsDeleted", 0))
    new_rows = counts.get(ACTION_INSERT, 0) + counts.get(ACTION_UPSERT, 0)
    replaced = max(0, new_rows - inserted)
    skipped = counts.get(ACTION_SKIP, 0) + max(0, counts.get(ACTION_UPDATE, 0) - (updated - replaced))
    skipped += max(0, counts.get(ACTION_DELETE, 0) - deleted)
    return {"inserted": inserted, "updated": updated, "deleted": deleted, "skipped": skipped}


def _apply_error(state: TableState, err: Exception) -> WaldeltaError:
    if (named := named_error(err)) is not None:
        return named
    text = str(err)
    if "DELTA_CONCURRENT" in text or "ConcurrentTransactionException" in text:
        return LateWriter(f"{state.table_name}: somebody else committed to the target meanwhile: run again")
    return ApplyError(f"{state.table_name}: {first_line(err)}")

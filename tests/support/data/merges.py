"""Targets of three columns, and merges of changes into them."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from tests.support.data.events import NUMBERING, events_table
from waldelta.changes.decode.collapse import ColumnNumbering, collapse
from waldelta.changes.merge.file_merge import NetChanges, merge_files
from waldelta.changes.merge.statements import CommitTag
from waldelta.changes.stage.net_files import NetTable
from waldelta.changes.stage.stage import Staged
from waldelta.lake import UNFENCED, local_path, write_parquet
from waldelta.lake.ledger import TableState
from waldelta.snapshot.read_table import RAW_TYPE

NAMES = ("Id", "the `v`", "it's.big")
SCHEMA = pa.schema(
    [
        pa.field("Id", pa.int64(), nullable=False),
        ("the `v`", pa.string()),
        ("it's.big", pa.string()),
        ("gone", pa.float64()),
        ("_wd_lsn", pa.int64()),
        ("_wd_commit_ts", pa.timestamp("us", "UTC")),
        ("_wd_raw", RAW_TYPE),
    ]
)


def write(job, rows, **options) -> None:
    write_deltalake(f"{job.pipeline.target.root}/s/t", rows, mode="overwrite", **options)


def table(job) -> DeltaTable:
    return DeltaTable(f"{job.pipeline.target.root}/s/t")


def rows(*held) -> pa.Table:
    """Rows of (id, v, big)."""
    return pa.Table.from_pylist(
        [dict(zip(SCHEMA.names, [*row, 0.5, -1], strict=False)) for row in held], SCHEMA
    )


def net_of(events, raw=None) -> pa.Table:
    net = collapse(events_table(events), NUMBERING)
    return net.append_column(pa.field("raw", RAW_TYPE), pa.array([raw] * len(net), RAW_TYPE))


def plan(*, truncated=False, leaves=(), numbering: ColumnNumbering = NUMBERING):
    state = TableState(None, "r", "s.t", 1, "synced")
    decode = SimpleNamespace(numbering=numbering, names=NAMES, gathers=bool(leaves))
    return SimpleNamespace(
        truncated=truncated,
        is_truncated=truncated and not leaves,
        truncated_leaves=leaves,
        decode=decode,
        state=state,
    )


def tag(batch=1) -> CommitTag:
    return CommitTag("app", batch, "run")


def held(job) -> dict:
    found = table(job).to_pyarrow_table().to_pylist()
    return {row["Id"]: (row["the `v`"], row["it's.big"]) for row in found}


def table_uri(job) -> str:
    return f"{job.pipeline.target.root}/s/t"


def one_by_one(count, schema, task, *, stops=False) -> list[dict]:
    """Tasks, one after the other, in this process; each is done twice, as Spark may."""
    told = []
    for number in range(count):
        task(number)
        told += task(number).cast(schema).to_pylist()
    return told


def staged(job, net, parts=3) -> str:
    """Net changes in several files."""
    folder = f"{job.pipeline.target.root}/staged/{random.randrange(1 << 60)}"
    size = -(-len(net) // parts) or 1
    for number in range(parts):
        write_parquet(folder, net.slice(number * size, size), number)
    return folder


def changes_of(job, net, counts, ending=None, in_memory=None) -> Staged:
    """Net changes: by default in memory for a target that isn't large."""
    if in_memory is None:
        in_memory = not job.lake.on_spark
    folder = f"{job.pipeline.target.root}/staged/{random.randrange(1 << 60)}"
    table = NetTable.of_rows(folder, job.lake, net) if in_memory else None
    return Staged(folder if in_memory else staged(job, net), counts, ending=ending, net=table)


def merge_large(job, *given, **options) -> CommitTag | None:
    """As a target that isn't small."""
    return merge_small(large(job), *given, **options)


def large(job) -> SimpleNamespace:
    """The job, whose targets pass for large."""
    return SimpleNamespace(pipeline=job.pipeline, lake=replace(job.lake, on_spark=True))


def merge_small(
    job, events, batch=1, raw=None, fence=UNFENCED, run=one_by_one, **options
) -> CommitTag | None:
    net, ending = net_of(events, raw), options.pop("ending", None)
    in_memory = options.pop("in_memory", None)
    counted = {item["values"]: item["counts"] for item in net["action"].value_counts().to_pylist()}
    planned = replace(tag(batch), counts=counted)
    changes = changes_of(job, net, counted, ending, in_memory)
    return merge_plan(job, plan(**options), changes, planned, fence, run)


def merge_plan(job, made, changes, planned, fence=UNFENCED, run=one_by_one) -> CommitTag | None:
    """Merge staged changes of a plan."""
    net, runner = NetChanges.of(job, made, changes, planned), SimpleNamespace(run=run)
    return merge_files(runner, job, made.state.table_name, net, planned, fence)


def write_files(job, *files) -> None:
    """A target of so many files."""
    write(job, SCHEMA.empty_table())
    for held_rows in files:
        write_deltalake(table_uri(job), rows(*held_rows), mode="append")


def files_of(job) -> set:
    return set(local_path(table_uri(job)).rglob("*.parquet"))

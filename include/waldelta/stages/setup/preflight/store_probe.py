"""Probes a lake's object store before anything is made: whether it can be written and read, by
delta-rs and by Spark, and whether it lets two writers make the same commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pyarrow as pa

from waldelta.config.pipeline_file import Target
from waldelta.errors import PreflightFailed, raised_as, without_values
from waldelta.lake import DeltaTarget, Lake, Tag
from waldelta.lake.data_file import replace_by_rows
from waldelta.lake.delta_target import Overtaken
from waldelta.lake.staging_leftovers import staging_folder
from waldelta.lake.storage import remove_folder
from waldelta.lake.write_errors import named_write_errors
from waldelta.spark.session import borrowed_session, read_log_store
from waldelta.stages.setup.preflight.lake import check_log_store, is_in_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROW = pa.table({"writer": ["waldelta"]})
_SPARK = "Spark can't write the lake that delta-rs writes"


def probe_store(target: Target, lake: Lake, spark: SparkSession | None) -> None:
    """Commit to a Delta table of the probe's own, by delta-rs and by Spark; it is removed again.

    Without ``spark``, a session as jobs have is opened. Nothing is done for a lake on a disk.
    Raises TargetNotWritable when delta-rs can't write and read there, and PreflightFailed when
    Spark can't, or when a commit could overwrite another writer's. A killed probe leaves a staged
    folder, which maintenance removes.
    """
    if not is_in_store(target):
        return
    with probe_commits(target, lake) as probe, borrowed_session(spark) as session:
        scheme = urlsplit(target.root).scheme
        check_log_store(target, read_log_store(session, scheme), lake)
        _probe_spark(session, probe)


@contextmanager
def probe_commits(target: Target, lake: Lake) -> Iterator[DeltaTarget]:
    """Commit to a Delta table of the probe's own by delta-rs alone; the block's end removes it.

    Raises TargetNotWritable, and PreflightFailed as probe_store() does.
    """
    probe = DeltaTarget(lake, staging_folder(lake, "probe", 0, 0, ""))
    try:
        with named_write_errors(lake.root):
            is_exclusive = _is_exclusive(probe)
        if not (is_exclusive or target.accept_unsafe_store):
            text = (
                f"{lake.root}: the store let two writers make the same commit, so that one of them"
                " would be lost: it ignores If-None-Match (conditional writes); use another store,"
                " or a release of it that respects them, or accept the loss"
                " (target.accept_unsafe_store: true)"
            )
            raise PreflightFailed([text])
        yield probe
    finally:
        remove_folder(probe.uri)


def _is_exclusive(probe: DeltaTarget) -> bool:
    """Return whether only the first of two writers who have read the same version commits."""
    probe.create(_ROW.schema)
    first, second = probe.open(), probe.open()
    replace_by_rows(first, [], _ROW, Tag("probe", 0, "first"))
    try:
        replace_by_rows(second, [], _ROW, Tag("probe", 1, "second"))
    except Overtaken:
        return True
    return False


def _probe_spark(spark: SparkSession, probe: DeltaTarget) -> None:
    """Let Spark append to the table, and delta-rs read what it wrote."""
    root = probe.lake.root
    with raised_as(lambda err: PreflightFailed([f"{root}: {_SPARK}: {without_values(err)}"])):
        probe.write(spark.createDataFrame([("Spark",)], "writer string"), "append")
    with named_write_errors(root):
        written = probe.open().dataset().to_table()["writer"].to_pylist()
    if sorted(written) != ["Spark", "waldelta"]:
        text = (
            f"{root}: {_SPARK}: it wrote to another store; give both the same endpoint"
            " (AWS_ENDPOINT_URL and spark.hadoop.fs.s3a.endpoint)"
        )
        raise PreflightFailed([text])

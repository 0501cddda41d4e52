"""Repairs rows of a few keys in the driver: reads them from the source, stages and merges them by
Arrow without Spark.

It stages what Spark would stage, in the same folders, so Spark can continue whenever there is too
much data.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Ints
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_UPSERT,
    codes_of_both,
)
from waldelta.changes.merge import CommitTag
from waldelta.changes.merge.by_driver import NetChanges, commit_in_driver, read_within
from waldelta.changes.stage.net_files import parts_at_once
from waldelta.errors import without_values
from waldelta.lake import Fence, open_parquet, write_parquet
from waldelta.pipeline import Job
from waldelta.snapshot.read_selected import KEYS_PER_READ

if TYPE_CHECKING:
    from waldelta.stages.repair._repair_rows import RepairRows

log = logging.getLogger(__name__)

# One session in the driver reads up to this many keys; more keys are divided among Spark tasks.
MOST_KEYS = 20_000


def read_staged_texts(folders: Collection[str], width: int) -> Iterator[pa.RecordBatch]:
    """Yields the texts of the touched keys in these folders (columns ``t<k>``), in batches for one
    statement each.
    """
    for folder in folders:
        texts = open_parquet(folder).to_table([f"t{k}" for k in range(width)])
        yield from texts.combine_chunks().to_batches(KEYS_PER_READ)


def _read_staged_keys(folders: Collection[str], rows: RepairRows) -> pa.Table:
    """Returns the touched keys (columns ``k<k>``) cast to the target's types.

    Spark's files don't store these types exactly.
    """
    types = dict(rows.copy.columns)
    schema = pa.schema([(f"k{k}", types[column.name].arrow) for k, column in enumerate(rows.key)])
    return pa.concat_tables(
        [open_parquet(folder).to_table(schema.names).cast(schema) for folder in folders]
    )


def write_parts(folder: str, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
    """Replace a folder's files by these rows, with one file's rows in memory."""
    write_parquet(folder, schema.empty_table())
    for number, part in enumerate(parts_at_once(batches), 1):
        write_parquet(folder, part.cast(schema), number)


def net_changes(again: pa.Table, touched: pa.Table, places: Sequence[int]) -> pa.Table:
    """Returns one net change per touched key (columns ``k<k>``): the row read again, else a delete.

    ``places`` are the indexes of the key's columns in ``again``. A key may have two printed forms,
    and was then read twice.
    """
    bases = [f"b{k}" for k in range(len(places))]
    for base, place in zip(bases, places, strict=True):
        again = again.append_column(base, again[f"c{place}"])
    keys = pa.table({base: touched[f"k{k}"].cast(again[base].type) for k, base in enumerate(bases)})
    read, asked = codes_of_both([again[base] for base in bases], keys.columns)
    found = again.take(pa.array(_first_of_each(read)))
    first = _first_of_each(asked)
    gone = keys.take(pa.array(first[~np.isin(asked[first], read)]))
    parts = [(found, ACTION_UPSERT), (gone, ACTION_DELETE)]
    acting = [
        part.append_column("action", pa.array([action] * len(part), pa.string()))
        for part, action in parts
    ]
    return pa.concat_tables(acting, promote_options="default").combine_chunks()


def _first_of_each(codes: Ints) -> Ints:
    _, first = np.unique(codes, return_index=True)
    return np.asarray(np.sort(first), np.int64)


def stage_net_in_driver(
    rows: RepairRows, staged: str, touched: Collection[str], why: str
) -> dict[str, int] | None:
    """Write the net changes of the rows read again, as stage_net() does.

    Returns None when they don't fit in memory, or when Arrow can't compare keys of their types
    (arrays).
    """
    dataset = open_parquet(f"{staged}/again")
    if (again := read_within(dataset, dataset.schema)) is None:
        return None
    try:
        net = net_changes(again, _read_staged_keys(touched, rows), rows.shape.key)
    except pa.ArrowException as err:
        log.info(
            "Spark stages the rows of %s, since the driver can't: %s", staged, without_values(err)
        )
        return None
    write_parquet(
        f"{staged}/net", net.add_column(0, "why", pa.array([why] * len(net), pa.string()))
    )
    counts = Counter({why: len(net)})
    for found in pc.value_counts(net["action"]).to_pylist():
        counts[found["values"]] = found["counts"]
    return {name: count for name, count in counts.items() if count}


def merge_rows_in_driver(
    job: Job,
    table_name: str,
    rows: RepairRows,
    folder: str,
    tag: CommitTag,
    fence: Fence,
) -> bool:
    """Merge the rows staged in ``folder`` into a small target, as merge_rows() does.

    Returns False where Spark must merge. ``fence`` is verified as by merge_in_driver().
    """
    try:
        dataset = open_parquet(folder)
        net = read_within(dataset, dataset.schema)
    except (OSError, pa.ArrowException) as err:
        log.info("table=%s can't be merged on the driver: %s", table_name, without_values(err))
        return False
    if net is None:
        return False
    names = [name for name, _ in rows.copy.columns]
    changes = NetChanges.whole(net, names, rows.shape, metadata=rows.copy.lsn is not None)
    return commit_in_driver(job, table_name, changes, tag, fence) is not None

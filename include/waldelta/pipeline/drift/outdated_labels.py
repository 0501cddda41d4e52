"""Finds the columns in which a target holds texts of the catalogs that the source prints otherwise
now.

An object that was renamed or dropped asks for a new copy only where the target, or a change that
waits for it, names that object. Most objects are named by no row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake import TargetVersion
from waldelta.lake.changelog import Snapshot
from waldelta.lake.ledger import StorageState, TableState
from waldelta.pipeline.drift.unsent_changes import relabelled
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets import Watermarks

# With more distinct texts than this, a column may hold any.
MOST_TEXTS = 10_000
# What catalog_state records for a composite type, and for many objects: a digest of all those in a
# schema, or of all.
_ANY = re.compile(r"[0-9 ]*|\* [0-9a-f]{32}")
_OF_SCHEMA = re.compile(r"(.*\.)\* [0-9a-f]{32}", re.DOTALL)
# A text with one of these may contain the label beside others: an array, a row, a range, a grant.
_COMPOUND = re.compile(r"[{(\[,=]")


def outdated_columns(job: Job, state: TableState, now: StorageState | None) -> frozenset[int]:
    """Return the numbers of the columns that may hold a label that was changed since the ledger
    recorded it.

    Columns that the target doesn't have yet are among them. Everything that landed must have landed
    before ``now`` was read.
    """
    names = {column.attnum: column.name for column in state.columns}
    outdated = relabelled(state.storage, now)
    return frozenset(
        number
        for number, labels in outdated.items()
        if number not in names or _may_hold(job, state, names[number], labels)
    )


def is_in(text: str, label: str) -> bool:
    """Return whether a value that prints this text may contain the label.

    >>> is_in("app.orders", "app.orders"), is_in("app.orders_2", "app.orders")
    (True, False)
    >>> is_in("{app.orders,app.items}", "app.items")
    True
    """
    is_digest = _ANY.fullmatch(label) or _OF_SCHEMA.fullmatch(label)
    return text == label or bool((is_digest or _COMPOUND.search(text)) and _sought(label) in text)


def _may_hold(job: Job, state: TableState, column: str, labels: Collection[str]) -> bool:
    table = job.lake.target(state.table_name).find()
    if table is None:
        return True
    texts: set[str] = set()
    for part in _texts(table, column):
        texts.update(part)
        if len(texts) > MOST_TEXTS:
            return True
    return any(is_in(text, label) for label in labels for text in texts) or _may_wait(
        job, state, labels
    )


def _texts(table: TargetVersion, column: str) -> Iterator[list[str]]:
    """Yield the distinct texts in each part of a column."""
    for values in table.read_column(column):
        for leaf in _leaves(values):
            yield pc.unique(leaf).drop_null().to_pylist()


def _leaves(values: pa.Array) -> Iterator[pa.Array]:
    """Yield the texts of an array or a struct; of another type, what Arrow prints."""
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        yield from _leaves(pc.list_flatten(values))
    elif pa.types.is_struct(kind):
        for field in values.flatten():
            yield from _leaves(field)
    else:
        yield values.cast(pa.string())


def _may_wait(job: Job, state: TableState, labels: Collection[str]) -> bool:
    """Return whether a change that is to be applied may bring one of these labels.

    It was decoded before the catalogs changed. In binary format it has no names.
    """
    identity = job.read_identity()
    change_log = job.change_log(identity)
    applied, last = Watermarks(job, identity).of(state), change_log.last_batch()
    if last is None or last <= applied:
        return False
    stream, snapshot = change_log.stream(applied, last), Snapshot.parse(state.snapshot)
    parts = {_sought(label) for label in labels}
    for batch in change_log.rows_of(stream.segments, state.relation_ids, snapshot, ["data"]):
        if batch.num_rows and job.pipeline.source.options.binary:
            return True
        if any(pc.any(pc.match_substring(batch["data"], part)).as_py() for part in parts):
            return True
    return False


def _sought(label: str) -> str:
    """Return the longest part of a label without quotes, which other texts print otherwise."""
    if _ANY.fullmatch(label):
        return ""
    schema = _OF_SCHEMA.fullmatch(label)
    return max(re.split(r'["\\]+', label if schema is None else schema[1]), key=len)

"""Finds, from the source's catalogs, what changed rows of a table without sending them.

``alter column … type … using`` to the column's own type leaves no trace in the stream. Neither does
a volatile default that was dropped again. Both write the table into a new file and replace its
columns' rows of pg_attribute. VACUUM FULL, CLUSTER, TRUNCATE, SET TABLESPACE and the like only make
a new file. GRANT, SET STATISTICS, SET DEFAULT, RENAME and NOT NULL only replace a row of
pg_attribute. So values may have changed where both are new.

Two cases need care. Freezing keeps xmin as it is. Every rewrite of a table also fills in the values
that its old rows showed (attmissingval), which replaces the pg_attribute rows of those columns.
ALTER TYPE also recreates the column's default, so a default that keeps its oid rules out ALTER
TYPE.

``alter type … rename value`` of an enum, an attribute added to or dropped from a composite type,
and the rename of an object that a value names (regclass and its kind), write no row at all: they
change the text of existing rows. So does the drop of such an object, whose oid is printed from then
on. A label added to an enum changes none.

pgoutput doesn't send the TRUNCATE of a partition of a table that is published via its root. The
catalogs don't distinguish it from VACUUM FULL, CLUSTER or SET TABLESPACE: each gives the leaf a new
file. But only a TRUNCATE removes the rows that are older than the last check of the leaf. So a leaf
with a new file and no such row counts as truncated. Each of its rows may instead have been written
since, which does no harm to a repair. A TRUNCATE of the root is sent and truncates all leaves; the
caller must find it in the stream. It gives all leaves new files. A leaf whose file is from a later
transaction than another's, and that has no row older than that, was truncated once more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from waldelta.errors import without_values
from waldelta.lake import TargetVersion
from waldelta.lake.changelog import Snapshot
from waldelta.lake.ledger import StorageState, TableState
from waldelta.lake.ledger.records import AttributeState
from waldelta.pipeline.drift.catalog_state import CatalogTable
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets import Watermarks
from waldelta.postgres import fetch, limited, savepoint

log = logging.getLogger(__name__)

# A leaf counts as truncated when finding its first old row takes longer than this.
_SEARCH_TIMEOUT_S = 2.0
_XIDS = 1 << 32


def rewritten(then: StorageState, now: StorageState) -> frozenset[int]:
    """Returns the numbers of columns, new ones included, whose values may have changed unsent since
    ``then``.

    There are none when no leaf has another file; leaves that came or went don't count.
    """
    files = {file.oid: file.relfilenode for file in then.files}
    if all(files.get(file.oid, file.relfilenode) == file.relfilenode for file in now.files):
        return frozenset()
    attributes = {attribute.attnum: attribute for attribute in then.attributes}
    return frozenset(a.attnum for a in now.attributes if not _is_same(attributes.get(a.attnum), a))


def relabelled(then: StorageState, now: StorageState) -> dict[int, set[str]]:
    """Returns the labels of ``then`` that the catalogs have otherwise now, by column number.

    The column's type was altered, or an object that its values may name was renamed or dropped.
    """
    current, columns = set(now.labels), {attribute.attnum for attribute in now.attributes}
    outdated: dict[int, set[str]] = {}
    for label in then.labels:
        if label.attnum in columns and label not in current:
            outdated.setdefault(label.attnum, set()).add(label.label)
    return outdated


def unsent_changes(state: TableState, now: StorageState, outdated: Collection[int]) -> list[str]:
    """Describe what happened to a target's columns that may no longer hold what the source has.

    ``outdated``: see waldelta.pipeline.drift.unsent_changes.
    """
    changes = [
        (
            rewritten(state.storage, now),
            "ALTER TABLE rewrote {columns}, and PostgreSQL doesn't replicate rewrites",
        ),
        (
            outdated,
            (
                "the catalogs changed the values of {columns} (ALTER TYPE, or an object that they"
                " name was renamed or dropped), and PostgreSQL doesn't replicate that"
            ),
        ),
    ]
    named_columns = [
        ([c.name for c in state.columns if c.attnum in numbers], text) for numbers, text in changes
    ]
    return [
        text.format(columns=f"column{'s' if len(names) > 1 else ''} {', '.join(names)}")
        for names, text in named_columns
        if names
    ]


def with_stopped(state: TableState, now: StorageState, stopped: Collection[str]) -> TableState:
    """Returns the state as if the source had stopped columns then as it has them now."""
    then, numbers = state.storage, {c.attnum for c in state.columns if c.name in stopped}
    attributes = [
        *(one for one in then.attributes if one.attnum not in numbers),
        *(one for one in now.attributes if one.attnum in numbers),
    ]
    labels = [
        *(one for one in then.labels if one.attnum not in numbers),
        *(one for one in now.labels if one.attnum in numbers),
    ]
    return replace(state, storage=replace(then, attributes=attributes, labels=labels))


def to_record(
    state: TableState,
    now: StorageState,
    outdated: Collection[int],
    *,
    renew: bool = False,
) -> TableState | None:
    """Returns the state with the current files and columns, when they differ and need no new copy;
    else None.

    While columns that the target doesn't have yet may have come with values, the old files and
    columns stay: they are needed when the first rows with these columns are applied. The list of
    leaves is updated all the same, because leaves that came or went have been reported. With
    ``renew``, the old ones are recorded as of now.
    """
    then = state.storage
    if not now.files:  # The table was dropped.
        return None
    if rewritten(then, now) or outdated:
        relfilenodes = {file.oid: file.relfilenode for file in then.files}
        files = [
            replace(file, relfilenode=relfilenodes.get(file.oid, file.relfilenode))
            for file in now.files
        ]
        now = replace(then, files=files, as_of=now.as_of if renew else then.as_of)
    return replace(state, storage=now) if now != then or renew else None


def _is_same(old: AttributeState | None, new: AttributeState) -> bool:
    return old is not None and (
        old.xmin == new.xmin
        or (
            old.has_missing
            and not new.has_missing
            and old.default_oid is not None
            and old.default_oid == new.default_oid
        )
    )


def with_truncated(
    connection: psycopg.Connection[Any],
    states: Sequence[TableState],
    catalog_tables: Mapping[str, CatalogTable],
    landed_as_of: int | None = None,
) -> dict[str, CatalogTable]:
    """Returns the same tables with their truncated leaves; queries the source only for leaves with
    another file.

    A leaf that can't be judged now keeps the recorded file, so that it is checked again.

    ``landed_as_of`` (xid8): all transactions below it have landed, a TRUNCATE of the root included.
    A leaf whose file was written by a later transaction is also kept for the next check. 0: it
    isn't known what has landed. None: judge every leaf.
    """
    return {
        **catalog_tables,
        **{
            state.table_name: _judge_state(connection, state, there, leaves, landed_as_of)
            for state in states
            if (
                leaves := replaced_files(state, (there := catalog_tables[state.table_name]).storage)
            )
        },
    }


def _judge_state(
    connection: psycopg.Connection[Any],
    state: TableState,
    there: CatalogTable,
    leaves: Sequence[int],
    landed_as_of: int | None,
) -> CatalogTable:
    then, now = state.storage, there.storage
    judged = list(leaves) if landed_as_of != 0 else []
    written = {row.oid: row for row in fetch(connection, _WRITTEN, {"leaves": judged})}
    verdicts = {
        leaf: _is_truncated(connection, written.get(leaf), then.as_of, landed_as_of)
        for leaf in judged
    }
    unjudged = {
        file.oid: file
        for file in then.files
        if file.oid in leaves and verdicts.get(file.oid) is None
    }
    files = [
        replace(file, relfilenode=unjudged[file.oid].relfilenode) if file.oid in unjudged else file
        for file in now.files
    ]
    truncated = frozenset(leaf for leaf, is_truncated in verdicts.items() if is_truncated)
    first = min((row.xid for row in written.values()), default=0)
    later = [written[leaf] for leaf in truncated if written[leaf].xid > first]
    return replace(
        there,
        storage=replace(now, files=files),
        truncated=truncated,
        truncated_alone=frozenset(
            row.oid for row in later if _is_truncated(connection, row, row.xid, None)
        ),
    )


def replaced_files(state: TableState, now: StorageState) -> list[int]:
    """Returns the oids of leaves, of a table published via its root, that have another file than
    recorded; pure.

    Returns none where an ALTER explains it, where TRUNCATE isn't published, or where the time of
    the record isn't known.
    """
    then = state.storage
    is_unsent = state.publishes and "truncate" not in state.publishes
    if not then.as_of or is_unsent or rewritten(then, now):
        return []
    files = {file.oid: file.relfilenode for file in then.files}
    oids = set(state.relation_ids)
    return [
        f.oid
        for f in now.files
        if f.oid not in oids and files.get(f.oid, f.relfilenode) != f.relfilenode
    ]


def _is_truncated(
    connection: psycopg.Connection[Any], leaf: Any, as_of: int, landed_as_of: int | None
) -> bool | None:
    """Returns whether no row of the leaf is from a transaction below ``as_of``; None when unknown.

    ``leaf`` is its row of _WRITTEN, None without one.
    Frozen rows keep their transaction's number.
    """
    if leaf is None:
        return False  # The leaf was dropped since, which is reported as such.
    if landed_as_of is not None and leaf.age >= 0 and leaf.xid >= landed_as_of:
        return None
    # age() is negative for a transaction that is too far back for a 32-bit comparison.
    older = sql.SQL(
        "select exists (select from only {} where age(xmin) > age({}::text::xid) or age(xmin) < 0)"
    ).format(sql.Identifier(leaf.schema, leaf.name), sql.Literal(str(as_of % _XIDS)))
    try:
        with (
            limited(connection, "statement_timeout", _SEARCH_TIMEOUT_S),
            limited(connection, "lock_timeout", _SEARCH_TIMEOUT_S / 2),
            savepoint(connection),
        ):
            ((has_old_row,),) = connection.execute(older).fetchall()
    except psycopg.errors.QueryCanceled:
        return True
    except psycopg.errors.UndefinedTable:
        return False
    # A lock, a missing grant, or an access method whose rows have no xmin.
    except psycopg.Error as err:
        if connection.closed:
            raise
        log.warning(
            "partition %s.%s has a new file; this run can't check whether it was truncated (%s)",
            leaf.schema, leaf.name, without_values(err),
        )  # fmt: skip
        return None
    return not has_old_row


# Per leaf, the transaction (xid8) that wrote its row of pg_class, and that transaction's age.
# TRUNCATE is one of the statements that write that row.
_WRITTEN = """
select c.oid::bigint as oid, n.nspname as schema, c.relname as name, age(c.xmin)::bigint as age,
  pg_snapshot_xmax(pg_current_snapshot())::text::bigint - age(c.xmin)::bigint as xid
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
where c.oid = any(%(leaves)s::oid[])
"""


# --- columns in which a target holds texts of the catalogs that the source prints otherwise now. An
# object that was renamed or dropped asks for a new copy only where the target, or a change that
# waits for it, names that object. Most objects are named by no row.

# With more distinct texts than this, a column may hold any.
MOST_TEXTS = 10_000
# What catalog_state records for a composite type, and for many objects: a digest of all those in a
# schema, or of all.
_ANY = re.compile(r"[0-9 ]*|\* [0-9a-f]{32}")
_OF_SCHEMA = re.compile(r"(.*\.)\* [0-9a-f]{32}", re.DOTALL)
# A text with one of these may contain the label beside others: an array, a row, a range, a grant.
_COMPOUND = re.compile(r"[{(\[,=]")


def outdated_columns(job: Job, state: TableState, now: StorageState) -> frozenset[int]:
    """Returns the numbers of the columns that may hold a label that was changed since the ledger
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


def may_contain(text: str, label: str) -> bool:
    """Returns whether a value may contain a label that was changed, judged by the value's text.

    A label is text that the catalogs determine: an enum's label, the attributes of a composite
    type, or an object's name (regclass and its kind). An array's text contains those of its items.

    >>> may_contain("app.orders", "app.orders"), may_contain("app.orders_2", "app.orders")
    (True, False)
    >>> may_contain("{app.orders,app.items}", "app.items")
    True
    """
    is_digest = _ANY.fullmatch(label) or _OF_SCHEMA.fullmatch(label)
    return text == label or bool(
        (is_digest or _COMPOUND.search(text)) and _searchable_part(label) in text
    )


def _may_hold(job: Job, state: TableState, column: str, labels: Collection[str]) -> bool:
    table = job.lake.target(state.table_name).find()
    if table is None:
        return True
    texts: set[str] = set()
    for part in _texts(table, column):
        texts.update(part)
        if len(texts) > MOST_TEXTS:
            return True
    return any(may_contain(text, label) for label in labels for text in texts) or _may_wait(
        job, state, labels
    )


def _texts(table: TargetVersion, column: str) -> Iterator[list[str]]:
    """Yields the distinct texts in each part of a column."""
    for values in table.read_column(column):
        for leaf in _leaves(values):
            yield pc.unique(leaf).drop_null().to_pylist()


def _leaves(values: pa.Array) -> Iterator[pa.Array]:
    """Yields the texts of an array or a struct; of another type, what Arrow prints."""
    kind = values.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        yield from _leaves(pc.list_flatten(values))
    elif pa.types.is_struct(kind):
        for field in values.flatten():
            yield from _leaves(field)
    else:
        yield values.cast(pa.string())


def _may_wait(job: Job, state: TableState, labels: Collection[str]) -> bool:
    """Returns whether a change that is to be applied may bring one of these labels.

    It was decoded before the catalogs changed. In binary format it has no names.
    """
    identity = job.read_identity()
    change_log = job.change_log(identity)
    applied, last = Watermarks(job, identity).of(state), change_log.last_batch()
    if last is None or last <= applied:
        return False
    stream, snapshot = change_log.stream(applied, last), Snapshot.parse(state.snapshot)
    parts = {_searchable_part(label) for label in labels}
    for batch in change_log.rows_of(stream.segments, state.relation_ids, snapshot, ["data"]):
        if batch.num_rows and job.pipeline.source.options.binary:
            return True
        if any(pc.any(pc.match_substring(batch["data"], part)).as_py() for part in parts):
            return True
    return False


def _searchable_part(label: str) -> str:
    """Returns the longest part of a label without quotes and backslashes, which arrays and
    composite values print in another form than the label itself.
    """
    if _ANY.fullmatch(label):
        return ""
    schema = _OF_SCHEMA.fullmatch(label)
    return max(re.split(r'["\\]+', label if schema is None else schema[1]), key=len)

"""Merge: net changes into a Delta target, as one commit; the statements are built here as text and
run here.

Column names come from the source's catalogs, so every one is quoted; values never enter a
statement.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_UPSERT,
    EventShape,
)
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW, RELID
from waldelta.spark.session import TXN_APP, TXN_VERSION, USER_METADATA
from waldelta.spark_sql import path, quote, string

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# In a commit's counts: of a table without a key, the staged updates and deletes that found a row in
# the target.
FOUND_UPDATES, FOUND_DELETES = "found_updates", "found_deletes"
# And of a commit without Delta's metrics of a MERGE (merge_in_driver): the target's rows by what
# became of them.
MERGED_INSERTS, MERGED_UPDATES, MERGED_DELETES = (
    "merged_inserts",
    "merged_updates",
    "merged_deletes",
)

# A merge writes every file that it touches anew: with smaller ones, changes of rows that lie
# together touch little.
ROWS_PER_FILE = 250_000
_ROWS_PER_FILE = "spark.sql.files.maxRecordsPerFile"
# The source is a file that was just written, so Delta needs no second copy of it.
_MATERIALIZE = "spark.databricks.delta.merge.materializeSource"
# And one that is gone is another run's doing: half a source must never pass for all of it.
_IGNORE_MISSING = "spark.sql.files.ignoreMissingFiles"


@dataclass(frozen=True, slots=True)
class CommitTag:
    """Delta's identity of one application of changes: repeated, it changes nothing.

    ``counts`` are the staged net changes by action: from them and Delta's metrics follows what the
    commit did. Of a replay, ``batch`` is no batch, but the version of the target that it set out
    from. ``looked`` is the version up to which other people's commits were told before this one.
    """

    app_id: str
    batch: int
    run_id: str = ""
    truncated: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    verb: str = "apply"
    looked: int | None = None

    @property
    def metadata(self) -> str:
        """The commit's userMetadata, by which cuts and replays find it."""
        return json.dumps({"waldelta": asdict(self)})


def merge_statement(
    target: str,
    source: str,
    names: Sequence[str],
    shape: EventShape,
    *,
    metadata_columns: bool,
    truncated: Sequence[int] = (),
) -> str:
    """The MERGE of net changes (columns as in collapse) from relation ``source`` into the table at
    ``target``.

    ``truncated`` are the leaves whose rows go, by oid, but for those that the changes bring.
    """
    on = " and ".join(f"t.{quote(names[i])} = s.b{k}" for k, i in enumerate(shape.key))
    updates = [
        f"t.{quote(name)} = {new_value(i, name, shape.toastable)}" for i, name in enumerate(names)
    ]
    inserts = [(quote(name), f"s.c{i}") for i, name in enumerate(names)]
    if metadata_columns:
        updates += [
            f"t.{LSN} = s.lsn",
            f"t.{COMMIT_TS} = s.commit_ts",
            f"t.{RAW} = {merged_raw(names, shape.toastable)}",
        ]
        inserts += [(LSN, "s.lsn"), (COMMIT_TS, "s.commit_ts"), (RAW, "s.raw")]
    return (
        f"merge into {path(target)} as t\n"
        f"using {source} as s\n"
        f"on {on}\n"
        f"when matched and s.action in ('{ACTION_DELETE}', '{ACTION_PURGE}') then delete\n"
        f"when matched then update set {', '.join(updates)}\n"
        f"when not matched and s.action in ('{ACTION_INSERT}', '{ACTION_UPSERT}') then\n"
        f"  insert ({', '.join(n for n, _ in inserts)}) values ({', '.join(v for _, v in inserts)})"
        + (
            f"\nwhen not matched by source and {of_leaves('t', truncated)} then delete"
            if truncated
            else ""
        )
    )


def of_leaves(alias: str, oids: Sequence[int]) -> str:
    """The condition on a gathered target's row that it is of one of these leaves."""
    return f"{alias}.{RELID} in ({', '.join(f'{oid:d}' for oid in oids)})"


def insert_statement(
    target: str, source: str, names: Sequence[str], *, metadata_columns: bool, overwrite: bool
) -> str:
    """INSERT of the new rows alone: for a table without a key, or, overwriting, for one that was
    truncated.
    """
    columns = [(quote(name), f"c{i}") for i, name in enumerate(names)]
    if metadata_columns:
        columns += [(LSN, "lsn"), (COMMIT_TS, "commit_ts"), (RAW, "raw")]
    return (
        f"insert {'overwrite' if overwrite else 'into'} {path(target)}"
        f" ({', '.join(n for n, _ in columns)})\nselect {', '.join(v for _, v in columns)}\nfrom"
        f" {source}\nwhere action in ('{ACTION_INSERT}', '{ACTION_UPSERT}')"
    )


def with_variants(source: str, columns: Sequence[str]) -> str:
    """The relation ``source`` with these of its columns, which are JSON texts, as variants."""
    if not columns:
        return source
    parsed = ", ".join(f"parse_json({column}) as {column}" for column in columns)
    return f"(select * except ({', '.join(columns)}), {parsed} from {source})"


def void_statement(target: str, column: str) -> str:
    """An UPDATE of no row, which is a commit all the same: whatever else comes under its
    transaction id is late.
    """
    return f"update {path(target)} set {quote(column)} = {quote(column)} where false"


@contextmanager
def tagged(spark: SparkSession, tag: CommitTag) -> Iterator[None]:
    """Statements inside commit under ``tag``; at most one for each table, since Delta skips a
    second one silently.
    """
    settings = {
        TXN_APP: tag.app_id,
        TXN_VERSION: str(tag.batch),
        USER_METADATA: tag.metadata,
        _MATERIALIZE: "none",
        _IGNORE_MISSING: "false",
        _ROWS_PER_FILE: str(ROWS_PER_FILE),
    }
    with session_settings(spark, settings):
        yield


@contextmanager
def session_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Settings of the session for the statements inside."""
    try:
        for key, value in settings.items():
            spark.conf.set(key, value)
        yield
    finally:
        for key in settings:
            spark.conf.unset(key)


def new_value(i: int, name: str, toastable: Collection[int]) -> str:
    """A column of the row: what was sent, or what stays as it is."""
    if i in toastable:
        return f"case when s.u{i} then t.{quote(name)} else s.c{i} end"
    return f"s.c{i}"


def merged_raw(names: Sequence[str], toastable: Collection[int]) -> str:
    """The row's verbatim values: those sent now, and those of the columns that stay as they are."""
    if not toastable:
        return "s.raw"
    kept = " or ".join(f"(k = {string(names[i])} and s.u{i})" for i in toastable)
    unchanged = " or ".join(f"s.u{i}" for i in toastable)
    merged = (
        f"map_concat(coalesce(map_filter(t.{RAW}, (k, v) -> {kept}), map()), coalesce(s.raw,"
        " map()))"
    )
    return f"case when t.{RAW} is not null and ({unchanged}) then {merged} else s.raw end"

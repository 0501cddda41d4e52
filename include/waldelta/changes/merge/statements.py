"""Builds and runs the SQL that merges net changes into a Delta target as one commit.

Column names come from the source's catalogs, so every name is quoted. Values never become part of a
statement.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_UPSERT,
    ColumnNumbering,
)
from waldelta.lake import Tag
from waldelta.lake.delta_statements import (
    MATERIALIZE_SOURCE,
    TXN_APP,
    TXN_VERSION,
    USER_METADATA,
)
from waldelta.lake.layout import ROWS_PER_FILE
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW, RELID
from waldelta.spark import Runner
from waldelta.spark.session import session_settings
from waldelta.spark_sql import quote, string
from waldelta.types import TargetType

if TYPE_CHECKING:
    pass

# In a commit's counts, for a table without a key: the staged updates and deletes that found a row
# in the target.
FOUND_UPDATES, FOUND_DELETES = "found_updates", "found_deletes"
# The counts of a commit that has no metrics of a MERGE (merge_files): how many of the target's
# rows were inserted, updated and deleted.
MERGED_INSERTS, MERGED_UPDATES, MERGED_DELETES = (
    "merged_inserts",
    "merged_updates",
    "merged_deletes",
)

_ROWS_PER_FILE = "spark.sql.files.maxRecordsPerFile"
# A source file that is missing was removed by another run: a part of the source must never pass for
# all of it.
_IGNORE_MISSING = "spark.sql.files.ignoreMissingFiles"


@dataclass(frozen=True, slots=True)
class CommitTag:
    """Delta's identity of one application of changes: a repeated one changes nothing.

    ``counts`` are the staged net changes by action. Together with Delta's metrics, they show what
    the commit did. ``checked_version`` is the version up to which external commits had been
    reported before this one.
    """

    app_id: str
    batch: int
    run_id: str = ""
    truncated: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    verb: str = "apply"
    checked_version: int | None = None

    @property
    def metadata(self) -> str:
        """The commit's userMetadata, by which cuts find it."""
        # asdict() makes another Counter of a Counter's pairs, which counts them.
        return json.dumps({"waldelta": asdict(self) | {"counts": dict(self.counts)}})

    @property
    def delta(self) -> Tag:
        """The same tag for a commit that delta-rs makes."""
        return Tag(self.app_id, self.batch, self.metadata)


@dataclass(frozen=True, slots=True)
class NetColumns:
    """The columns that net changes write: the source's by name, and with ``metadata`` waldelta's
    own.
    """

    names: Sequence[str]
    numbering: ColumnNumbering
    metadata: bool

    @property
    def sources(self) -> dict[str, str]:
        """The column of the net changes that each column of the target is written from."""
        found = {name: f"c{i}" for i, name in enumerate(self.names)}
        return found | {LSN: "lsn", COMMIT_TS: "commit_ts", RAW: "raw"} if self.metadata else found

    @property
    def compared(self) -> dict[str, str]:
        """The ``sources`` that tell a row from another: not where and when it was written."""
        return {n: source for n, source in self.sources.items() if n not in {LSN, COMMIT_TS}}

    @property
    def key_names(self) -> list[str]:
        """The target's key columns, in the order of the net changes' base columns."""
        return [self.names[i] for i in self.numbering.key]

    @property
    def bases(self) -> list[str]:
        """The net changes' columns with the values of ``key_names``."""
        return [f"b{k}" for k in range(len(self.numbering.key))]


def net_statement(
    target: str,
    source: str,
    net_columns: NetColumns,
    *,
    overwrite: bool = False,
    others: Iterable[str] = (),
) -> str:
    """Returns the MERGE of net changes (columns as in collapse) from ``source`` into the target.

    Both are relations of Spark SQL, as in the other statements. Without a key it is an INSERT of
    the new rows; so it is for a table that was truncated, where it overwrites. ``others`` are
    conditions and actions for rows that no change names, as a TRUNCATE needs them.
    """
    names, numbering, values = net_columns.names, net_columns.numbering, net_columns.sources
    columns = ", ".join(map(quote, values))
    if overwrite or not numbering.key:
        return (
            f"insert {'overwrite' if overwrite else 'into'} {target} ({columns})\n"
            f"select {', '.join(values.values())}\n"
            f"from {source}\n"
            f"where action in ('{ACTION_INSERT}', '{ACTION_UPSERT}')"
        )
    keys = zip(net_columns.key_names, net_columns.bases, strict=True)
    on = " and ".join(f"t.{quote(name)} = s.{base}" for name, base in keys)
    new = {name: f"s.{value}" for name, value in values.items()}
    changed = new | {
        names[i]: f"case when s.u{i} then t.{quote(names[i])} else s.c{i} end"
        for i in numbering.toastable
    }
    if net_columns.metadata:
        changed[RAW] = merged_raw(names, numbering.toastable)
    return (
        f"merge into {target} as t\n"
        f"using {source} as s\n"
        f"on {on}\n"
        f"when matched and s.action in ('{ACTION_DELETE}', '{ACTION_PURGE}') then delete\n"
        "when matched then update set "
        f"{', '.join(f't.{quote(name)} = {value}' for name, value in changed.items())}\n"
        f"when not matched and s.action in ('{ACTION_INSERT}', '{ACTION_UPSERT}') then\n"
        f"  insert ({columns}) values ({', '.join(new.values())})"
        + "".join(f"\nwhen not matched by source and {clause}" for clause in others)
    )


def of_leaves(alias: str, oids: Sequence[int]) -> str:
    """Returns the condition that a row of merged partitions belongs to one of these leaves."""
    return f"{alias}.{RELID} in ({', '.join(f'{oid:d}' for oid in oids)})"


def as_stored(source: str, types: Sequence[TargetType]) -> str:
    """Returns the relation ``source`` with columns ``c<i>`` of these types as the target stores
    them.
    """
    forms = {f"c{i}": kind.stored_sql(f"c{i}") for i, kind in enumerate(types)}
    changed = {column: form for column, form in forms.items() if form != column}
    if not changed:
        return source
    stored = ", ".join(f"{form} as {column}" for column, form in changed.items())
    return f"(select * except ({', '.join(changed)}), {stored} from {source})"


def void_statement(target: str, column: str) -> str:
    """Returns an UPDATE of no row, which still is a commit: any other with its transaction id is
    late.
    """
    return f"update {target} set {quote(column)} = {quote(column)} where false"


def commit_statement(runner: Runner, tag: CommitTag, statement: str) -> CommitTag:
    """Run one statement that commits under ``tag``, and return ``tag``.

    A second statement for the same table needs another tag, since Delta silently skips a repeated
    one. Delta's settings apply to the whole session while this runs: nothing else may commit
    through it.
    """
    settings = {
        TXN_APP: tag.app_id,
        TXN_VERSION: str(tag.batch),
        USER_METADATA: tag.metadata,
        # The source is a file that was just written, so Delta needs no second copy of it.
        MATERIALIZE_SOURCE: "none",
        _IGNORE_MISSING: "false",
        _ROWS_PER_FILE: str(ROWS_PER_FILE),
    }
    with session_settings(runner.spark(), settings):
        runner.spark().sql(statement).collect()
    return tag


def raw_entries(raw: str) -> str:
    """Returns the SQL expression of a row's raw values as an array, which unlike a map can be
    compared with ``=``; null without raw values.
    """
    return f"case when size({raw}) > 0 then array_sort(map_entries({raw})) end"


def merged_raw(names: Sequence[str], toastable: Collection[int]) -> str:
    """Returns the SQL expression of a row's new column ``_wd_raw``.

    It has the raw values that the change sent, and the target's raw values of columns that the
    change didn't send.
    """
    if not toastable:
        return "s.raw"
    is_unsent = " or ".join(f"(k = {string(names[i])} and s.u{i})" for i in toastable)
    unchanged = " or ".join(f"s.u{i}" for i in toastable)
    merged = (
        f"map_concat(coalesce(map_filter(t.{RAW}, (k, v) -> {is_unsent}), map()), coalesce(s.raw,"
        " map()))"
    )
    return f"case when t.{RAW} is not null and ({unchanged}) then {merged} else s.raw end"

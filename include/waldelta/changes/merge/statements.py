"""Builds and runs the SQL that merges net changes into a Delta target as one commit.

Column names come from the source's catalogs, so every name is quoted. Values never become part of a
statement.

Merges row versions into a Delta target that keeps more than a mirror does, as one commit.

This follows row_versions, in place of merge. Every statement is built here, with quoted names, and
with numbers as the only values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_SKIP,
    ACTION_UPDATE,
    ACTION_UPSERT,
    COMPLETED_ROWS,
    PLACE,
    QUARANTINED_ROWS,
    RAW_ROWS,
    EventShape,
)
from waldelta.lake import DeltaTarget, Tag, write_parquet
from waldelta.lake.delta_statements import (
    MATERIALIZE_SOURCE,
    TXN_APP,
    TXN_VERSION,
    USER_METADATA,
)
from waldelta.lake.layout import ROWS_PER_FILE
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW, RELID
from waldelta.snapshot import TableCopy
from waldelta.spark import Runner
from waldelta.spark.session import session_settings
from waldelta.spark_sql import insert_clause, parquet, quote, string
from waldelta.target_modes import Fold, TargetMode
from waldelta.target_modes.target_mode import MOVED, STATE_XID, TO_LSN, TO_TS
from waldelta.types import TargetType

if TYPE_CHECKING:
    from waldelta.changes.decode.target_plan import TargetPlan
    from waldelta.changes.stage.stage import Staged

# In a commit's counts, for a table without a key: the staged updates and deletes that found a row
# in the target.
FOUND_UPDATES, FOUND_DELETES = "found_updates", "found_deletes"
# The counts of a commit that has no metrics of a MERGE (merge_in_driver): how many of the target's
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
        return json.dumps({"waldelta": asdict(self)})

    @property
    def delta(self) -> Tag:
        """The same tag for a commit that delta-rs makes."""
        return Tag(self.app_id, self.batch, self.metadata)


@dataclass(frozen=True, slots=True)
class WrittenColumns:
    """The columns that net changes write: the source's by name, and with ``metadata`` waldelta's
    own.
    """

    names: Sequence[str]
    shape: EventShape
    metadata: bool

    @property
    def sources(self) -> dict[str, str]:
        """The column of the net changes that each column of the target is written from."""
        found = {name: f"c{i}" for i, name in enumerate(self.names)}
        return found | {LSN: "lsn", COMMIT_TS: "commit_ts", RAW: "raw"} if self.metadata else found

    @property
    def key_names(self) -> list[str]:
        """The target's key columns, in the order of the net changes' base columns."""
        return [self.names[i] for i in self.shape.key]

    @property
    def bases(self) -> list[str]:
        """The net changes' columns with the values of ``key_names``."""
        return [f"b{k}" for k in range(len(self.shape.key))]


def merge_statement(
    target: str,
    source: str,
    names: Sequence[str],
    shape: EventShape,
    *,
    metadata_columns: bool,
    truncated: Sequence[int] = (),
) -> str:
    """Returns the MERGE of net changes (columns as in collapse) from ``source`` into the target.

    Both are relations of Spark SQL, as in the other statements. ``truncated`` are the oids of
    leaves whose rows are removed, except for those in the changes.
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
        f"merge into {target} as t\n"
        f"using {source} as s\n"
        f"on {on}\n"
        f"when matched and s.action in ('{ACTION_DELETE}', '{ACTION_PURGE}') then delete\n"
        f"when matched then update set {', '.join(updates)}\n"
        f"when not matched and s.action in ('{ACTION_INSERT}', '{ACTION_UPSERT}') then\n"
        f"  {insert_clause(inserts)}"
        + (
            f"\nwhen not matched by source and {of_leaves('t', truncated)} then delete"
            if truncated
            else ""
        )
    )


def of_leaves(alias: str, oids: Sequence[int]) -> str:
    """Returns the condition that a row of merged partitions belongs to one of these leaves."""
    return f"{alias}.{RELID} in ({', '.join(f'{oid:d}' for oid in oids)})"


def insert_statement(
    target: str, source: str, names: Sequence[str], *, metadata_columns: bool, overwrite: bool
) -> str:
    """Returns an INSERT of the new rows only.

    It is used for a table without a key, or, overwriting, for one that was truncated.
    """
    columns = [(quote(name), f"c{i}") for i, name in enumerate(names)]
    if metadata_columns:
        columns += [(LSN, "lsn"), (COMMIT_TS, "commit_ts"), (RAW, "raw")]
    return (
        f"insert {'overwrite' if overwrite else 'into'} {target}"
        f" ({', '.join(n for n, _ in columns)})\nselect {', '.join(v for _, v in columns)}\nfrom"
        f" {source}\nwhere action in ('{ACTION_INSERT}', '{ACTION_UPSERT}')"
    )


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


def new_value(i: int, name: str, toastable: Collection[int]) -> str:
    """Returns the SQL expression of a column's new value: the sent value, or the target's value
    where none was sent.
    """
    if i in toastable:
        return f"case when s.u{i} then t.{quote(name)} else s.c{i} end"
    return f"s.c{i}"


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
    kept = " or ".join(f"(k = {string(names[i])} and s.u{i})" for i in toastable)
    unchanged = " or ".join(f"s.u{i}" for i in toastable)
    merged = (
        f"map_concat(coalesce(map_filter(t.{RAW}, (k, v) -> {kept}), map()), coalesce(s.raw,"
        " map()))"
    )
    return f"case when t.{RAW} is not null and ({unchanged}) then {merged} else s.raw end"


def staged_names(copy: TableCopy) -> list[str]:
    """Returns the names of a copy's staged columns: by position, like collapse's net changes."""
    metadata = ["lsn", "commit_ts", "raw"] if copy.lsn is not None else []
    return [*(f"c{i}" for i in range(len(copy.columns))), *metadata]


def staged_shape(copy: TableCopy, key: Iterable[str]) -> EventShape:
    """Returns the positions of the key columns among a copy's staged columns."""
    names = [name for name, _ in copy.columns]
    return EventShape(len(names), tuple(names.index(column) for column in key))


def merge_rows(
    runner: Runner,
    target: DeltaTarget,
    copy: TableCopy,
    key: Sequence[str],
    folder: str,
    tag: CommitTag,
) -> CommitTag:
    """Merge the rows staged in ``folder`` into ``target``, and return ``tag``.

    The columns are ``action``, ``b<k>`` for the key, and the staged names. Delta's settings apply
    to the whole session while this runs: nothing else may commit through it.
    """
    names = [name for name, _ in copy.columns]
    source = as_stored(parquet(folder), [kind for _, kind in copy.columns])
    statement = merge_statement(
        target.relation,
        source,
        names,
        staged_shape(copy, key),
        metadata_columns=copy.lsn is not None,
    )
    return commit_statement(runner, tag, statement)


# In a commit's counts: new rows, and ended states of the target.
STATES, ENDS = "states", "ends"
_COUNTED = (ACTION_SKIP, RAW_ROWS, COMPLETED_ROWS, QUARANTINED_ROWS)
_BASE = "waldelta_base"


@dataclass(frozen=True, slots=True)
class Kept:
    """A target as these statements see it: mode, columns, positions of the key and of TOASTable
    columns.

    Columns are given by position. In statements the target is ``t``, and staged rows are ``s``.
    """

    # Whether a staged state ends a state of the target, or begins one.
    ended: ClassVar[str] = f"s.action = '{ACTION_DELETE}'"
    begun: ClassVar[str] = f"s.action in ('{ACTION_INSERT}', '{ACTION_UPDATE}')"

    mode: TargetMode
    names: tuple[str, ...]
    key: tuple[int, ...]
    toastable: tuple[int, ...] = ()
    # TargetMode.stored_key() of the target.
    stored_key: tuple[str, ...] = ()

    @property
    def key_names(self) -> list[str]:
        """The key's columns."""
        return [self.names[i] for i in self.key]

    @property
    def values(self) -> list[tuple[str, str]]:
        """The columns that every target has, quoted, with the staged values for new rows."""
        values = [(quote(name), f"s.c{i}") for i, name in enumerate(self.names)]
        return [*values, (LSN, "s.lsn"), (COMMIT_TS, "s.commit_ts"), (RAW, "s.raw")]


def kept_of(plan: TargetPlan) -> Kept:
    """Returns the target of a plan."""
    decode = plan.decode
    return Kept(plan.state.kept_as, decode.names, decode.shape.key, decode.shape.toastable)


def complete_states(
    runner: Runner, target: DeltaTarget, plan: TargetPlan, staged: Staged, folder: str
) -> Staged:
    """Complete states from the target's own rows with the values that no event sent.

    States of rows that the target doesn't have are skipped, and counted. The result is staged again
    in ``folder``, since the merge must not look up the target's rows a second time.
    """
    kept, counts = kept_of(plan), Counter(staged.counts)
    is_log = kept.mode.fold.has_changes
    looks_up = counts[ACTION_UPDATE] > 0
    if is_log:
        flags = " or ".join(f"u{i}" for i in kept.toastable)
        lacking = f"select 1 from {staged.source} where {flags} limit 1"
        looks_up = bool(kept.key and flags and runner.spark().sql(lacking).collect())
    source = as_stored(staged.source, plan.decode.types)
    if not looks_up:
        return replace(staged, source=source, counts=metric_counts(counts), net=None)
    current = kept.mode.current_rows(target.frame(runner.spark()), kept.key_names)
    current.createOrReplaceTempView(_BASE)
    runner.spark().sql(completed_query(kept, source, _BASE)).write.mode("overwrite").parquet(folder)
    updates = count_actions(runner, folder).get(ACTION_UPDATE, 0)
    if not is_log:
        counts[ACTION_SKIP] += counts[ACTION_UPDATE] - updates
        counts[ACTION_UPDATE] = updates
    return replace(staged, source=parquet(folder), counts=metric_counts(counts), net=None)


def count_actions(runner: Runner, folder: str) -> dict[str, int]:
    """Returns how many staged rows have each action."""
    rows = runner.spark().read.parquet(folder).groupBy("action").count().collect()
    return {row["action"]: row["count"] for row in rows}


def metric_counts(counts: Counter[str]) -> dict[str, int]:
    """Returns counts that match Delta's metrics of the commit.

    Inserted rows are states, updated rows are ended states.
    """
    told = {name: counts[name] for name in _COUNTED if counts[name]}
    return told | {
        STATES: counts[ACTION_INSERT] + counts[ACTION_UPDATE],
        ENDS: counts[ACTION_DELETE],
    }


def completed_query(kept: Kept, source: str, base: str) -> str:
    """Returns the staged rows, completed with the values that only the target has."""
    on = " and ".join(f"t.{quote(kept.names[i])} = s.b{k}" for k, i in enumerate(kept.key))
    is_log = kept.mode.fold.has_changes
    wanted = "true" if is_log else f"s.action = '{ACTION_UPDATE}'"
    held = f"t.{quote(kept.names[kept.key[0]])} is not null"
    columns = ["s.action", *(f"s.b{k}" for k in range(len(kept.key)))]
    columns += [
        f"{new_value(i, name, kept.toastable)} as c{i}" for i, name in enumerate(kept.names)
    ]
    columns += [f"(s.u{i} and not ({held})) as u{i}" for i in kept.toastable]
    columns.append("s.lsn")
    if is_log:
        columns += [
            "s.commit_ts",
            f"s.{PLACE}",
            f"s.{STATE_XID}",
            f"s.{MOVED}",
            *(f"s.o{k}" for k in range(len(kept.key))),
        ]
    else:
        start = kept.mode.began_at
        columns += [f"greatest(s.commit_ts, t.{start}) as commit_ts", f"s.{TO_LSN}"]
        columns.append(
            f"case when s.{TO_TS} is null then null else greatest(s.{TO_TS}, t.{start}) end as"
            f" {TO_TS}"
        )
    columns.append(f"{merged_raw(kept.names, kept.toastable)} as raw")
    where = "" if is_log else f"\nwhere s.action <> '{ACTION_UPDATE}' or {held}"
    return (
        f"select {', '.join(columns)}\nfrom {source} s left join {base} t on {wanted} and"
        f" {on}{where}"
    )


def differences_query(kept: Kept, source: str, lsn: str, at: str) -> str:
    """Returns differences from a snapshot as the rows that row_versions would make of changes.

    ``lsn`` and ``at`` are its position and time, as Spark SQL.
    """
    bases = [f"b{k}" for k in range(len(kept.key))]
    values = [f"c{i}" for i in range(len(kept.names))]
    told = [f"{lsn} as lsn", f"{at} as commit_ts"]
    if kept.mode.fold.has_changes:
        place = f"-row_number() over (order by {', '.join(bases)}) as {PLACE}"
        keys = {i: f"b{k}" for k, i in enumerate(kept.key)}
        gone = [f"{keys[i]} as c{i}" if i in keys else f"c{i}" for i in range(len(kept.names))]
        rest = [
            f"cast(null as bigint) as {STATE_XID}",
            f"false as {MOVED}",
            *(f"{b} as o{k}" for k, b in enumerate(bases)),
        ]
        return f"select action, {', '.join([*gone, *told, place, *rest])}, raw from {source}"
    ended = [f"cast(null as bigint) as {TO_LSN}", f"cast(null as timestamp) as {TO_TS}"]
    states = (
        f"select action, {', '.join([*bases, *values, *told, *ended])}, raw from {source} "
        f"where action in ('{ACTION_INSERT}', '{ACTION_UPDATE}')"
    )
    # The state before an update ends too, where it is kept; else the new one overwrites it.
    ends = (
        f"('{ACTION_DELETE}', '{ACTION_UPDATE}')"
        if kept.mode.fold is Fold.STATES
        else f"('{ACTION_DELETE}')"
    )
    until = [f"{lsn} as {TO_LSN}", f"{at} as {TO_TS}"]
    return (
        f"{states} union all select '{ACTION_DELETE}' as action,"
        f" {', '.join([*bases, *values, *told, *until])}, raw from {source} where action in {ends}"
    )


def merge_states(
    runner: Runner, target: DeltaTarget, plan: TargetPlan, staged: Staged, tag: CommitTag
) -> CommitTag:
    """Commit the staged rows; returns the tag they were committed under."""
    kept, source = kept_of(plan), staged.source
    truncates = plan.decode.unfolding.truncates if plan.decode.unfolding else ()
    if kept.mode.fold.has_changes:
        name, frame = plan.state.table_name, target.frame(runner.spark())
        kept = replace(kept, stored_key=kept.mode.stored_key(name, frame, kept.key_names))
        if truncates:
            folder = f"{staged.folder}-truncates"
            at = pa.array([t.at_us for t in truncates], pa.int64())
            rows = {
                "lsn": [t.lsn for t in truncates],
                "commit_ts": at.cast(pa.timestamp("us", "UTC")),
                PLACE: [t.place for t in truncates],
                STATE_XID: [t.xid for t in truncates],
            }
            write_parquet(folder, pa.table(rows))
            source = f"({_with_truncates(kept, source, folder)})"
    statement = kept.mode.statement(target.relation, kept, source, truncates)
    return commit_statement(runner, tag, statement)


def _with_truncates(kept: Kept, source: str, folder: str) -> str:
    """Returns the changes, and a row without values for each TRUNCATE."""
    names = (
        [f"c{i}" for i in range(len(kept.names))]
        + [f"o{k}" for k in range(len(kept.key))]
        + ["raw"]
    )
    flags = [f"u{i}" for i in kept.toastable]
    told = ["lsn", "commit_ts", PLACE, STATE_XID]
    every = ["action", *names, *flags, MOVED, *told]
    empty = ["'truncate'", *(["null"] * len(names)), *(["false"] * len(flags)), "false", *told]
    return (
        f"select {', '.join(every)} from {source} union all select {', '.join(empty)} from"
        f" {parquet(folder)}"
    )

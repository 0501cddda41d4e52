"""Commits a target's staged net changes: file by file with Arrow, or by Spark.

Changes of tables without a key remove or change duplicate rows, in one commit. A MERGE can't take
one of two equal rows, so Spark rewrites the target. Rows are equal where every published column is,
as a PostgreSQL subscriber compares them: nulls are equal, so are -0 and 0, all NaN, and 1.0 and
1.00. Among equal rows, those written exactly like the source's are removed first, so that the
target keeps what the source keeps.

Both forms of a row are columns of a generator (inline). Had a projection computed them, Spark's
optimizer would know that they equal a struct of all columns. It would derive that equality again
for each column that a later projection renames, with and without each of the earlier names: twice
as many for every column.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import tenacity

from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_INSERT, ACTION_UPDATE, PLACE
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.merge.divide import without_partitions
from waldelta.changes.merge.file_merge import NetChanges, merge_files
from waldelta.changes.merge.rows import ending_of_leaves
from waldelta.changes.merge.statements import (
    FOUND_DELETES,
    FOUND_UPDATES,
    CommitTag,
    as_stored,
    commit_statement,
    net_statement,
    of_leaves,
    raw_entries,
)
from waldelta.changes.stage.stage import Staged, check_whole
from waldelta.lake import Fence
from waldelta.lake.layout import empty_value
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.pipeline import Job
from waldelta.pipeline.task_errors import is_passing
from waldelta.spark import Runner
from waldelta.spark_sql import parquet, quote
from waldelta.types import TargetType

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeylessTarget:
    """The columns of a target without a key: those that the source has, by name, and the others.

    ``truncated`` are the oids of leaves whose rows are removed first.
    """

    columns: Sequence[tuple[str, TargetType]]
    metadata_columns: bool
    others: Sequence[str] = ()
    truncated: Sequence[int] = ()

    @classmethod
    def of(cls, job: Job, plan: TargetPlan) -> KeylessTarget:
        """Returns the target of a plan, with the columns that only its Delta table has."""
        columns, metadata = plan.decode.columns, job.pipeline.target.metadata_columns
        ours = {name for name, _ in columns} | ({LSN, COMMIT_TS, RAW} if metadata else set())
        names = job.lake.target(plan.state.table_name).open().schema.names
        others = [name for name in names if name not in ours]
        return cls(columns, metadata, others, plan.truncated_leaves)

    @property
    def names(self) -> list[str]:
        """The columns, quoted."""
        metadata = [LSN, COMMIT_TS, RAW] if self.metadata_columns else []
        return [quote(name) for name in (*dict(self.columns), *metadata, *self.others)]

    @property
    def aliases(self) -> list[str]:
        """The columns' names in statements, since a source's column may have any name."""
        return [*self._prefix_columns("v"), *self._others]

    @property
    def staged(self) -> list[str]:
        """Values of new rows, in the order of the aliases; the others have none."""
        return [
            *(f"r.{name}" for name in self._prefix_columns("c")),
            *(["null"] * len(self.others)),
        ]

    @property
    def changed(self) -> list[str]:
        """Values of changed rows, in the order of the aliases; the others stay."""
        return [
            *(f"r.{name}" for name in self._prefix_columns("c")),
            *(f"t.{x}" for x in self._others),
        ]

    def renamed(self) -> str:
        """Returns the columns under their aliases, as a list of a SELECT."""
        return ", ".join(
            f"{name} as {alias}" for name, alias in zip(self.names, self.aliases, strict=True)
        )

    @property
    def _others(self) -> list[str]:
        return [f"x{i}" for i in range(len(self.others))]

    def _prefix_columns(self, prefix: str) -> list[str]:
        metadata = ["lsn", "commit_ts", "raw"] if self.metadata_columns else []
        return [f"{prefix}{i}" for i in range(len(self.columns))] + metadata


def count_statement(target: str, source: str, table: KeylessTarget) -> str:
    """Returns the query of how many staged updates and deletes find their row.

    It returns a row ``action, rows`` for each action that has any.
    """
    return (
        f"with {_match_ctes(target, source, table)}\n"
        "select r.action, count(*) as rows\n"
        "from chosen as t\n"
        "join numbered as r on t.alike = r.alike and t.n = r.n\n"
        "group by r.action"
    )


def rewrite_statement(target: str, source: str, table: KeylessTarget) -> str:
    """Returns the INSERT OVERWRITE that applies net changes (as in collapse() without a key) from
    ``source``.
    """
    stored = ", ".join(f"t.{alias}" for alias in table.aliases)
    changed = ", ".join(
        f"case when r.action is null then t.{alias} else {value} end"
        for alias, value in zip(table.aliases, table.changed, strict=True)
    )
    return (
        f"insert overwrite {target} ({', '.join(table.names)})\n"
        f"with {_match_ctes(target, source, table)}\n"
        f"select {stored}\n"
        "from held as t\n"
        "left anti join wanted as w on t.alike = w.alike\n"
        "union all\n"
        f"select {changed}\n"
        "from chosen as t\n"
        "left join numbered as r on t.alike = r.alike and t.n = r.n\n"
        f"where r.action is null or r.action = '{ACTION_UPDATE}'\n"
        "union all\n"
        f"select {', '.join(table.staged)}\n"
        f"from {source} as r\n"
        f"where r.action = '{ACTION_INSERT}'"
    )


def _match_ctes(target: str, source: str, table: KeylessTarget) -> str:
    """Returns CTEs of the staged removals and the matching target rows, numbered within equal rows.

    Comparing structs, nulls are equal and floats compare by value; ``exact`` distinguishes equal
    values that are written differently.
    """
    cut = table.truncated
    there = f" as o where not coalesce({of_leaves('o', cut)}, false)" if cut else ""
    raws = ("raw", "base_raw") if table.metadata_columns else (None, None)
    return (
        f"plain as (select {table.renamed()} from {target}{there}),\nheld as (select * from plain"
        f" {_forms('v', table.columns, raws[0])}),\nremovals as (select * from {source}"
        f" {_forms('b', table.columns, raws[1])} where action in ('{ACTION_UPDATE}',"
        f" '{ACTION_DELETE}')),\nnumbered as (select *, row_number() over (partition by alike order"
        f" by {PLACE}) as n from removals),\nwanted as (select distinct alike from"
        " removals),\nwanted_exact as (select exact, count(*) as copies from removals group by"
        " exact),\ncandidates as (select t.*, row_number() over (partition by t.exact order by"
        " t.exact) as copy\n  from held as t left semi join wanted as w on t.alike ="
        " w.alike),\nchosen as (select t.*, row_number() over (partition by t.alike order by"
        " coalesce(t.copy <= x.copies, false) desc) as n\n  from candidates as t left join"
        " wanted_exact as x on t.exact = x.exact)"
    )


def _forms(prefix: str, columns: Sequence[tuple[str, TargetType]], raw: str | None) -> str:
    """Returns the LATERAL VIEW that adds ``alike`` and ``exact`` to rows with these columns."""
    values = [f"{prefix}{i}" for i in range(len(columns))]
    alike = [kind.equal_sql(value) for value, (_, kind) in zip(values, columns, strict=True)]
    exact = [kind.exact_sql(value) for value, (_, kind) in zip(values, columns, strict=True)]
    if raw is not None:
        alike.append(raw_entries(raw))
        exact.append(raw_entries(raw))
    forms = f"struct(struct({', '.join(alike)}), struct({', '.join(exact)}))"
    return f"lateral view inline(array({forms})) forms as alike, exact"


# The most times that a MERGE is run, when concurrent commits conflict with it.
_ATTEMPTS = 3


def merge_staged(
    runner: Runner,
    job: Job,
    staged: Staged,
    plan: TargetPlan,
    tag: CommitTag,
    fence: Fence,
) -> CommitTag:
    """Commit the net changes file by file with Arrow, else by Spark.

    Returns the tag of the commit. The target's partitions are removed first where they can't have a
    value of the changes.
    """
    name = plan.state.table_name
    merge = partial(_merge_staged, runner, job, staged, plan, tag, fence)
    return without_partitions(runner, job.lake.target(name).open, name, merge)


def _merge_staged(
    runner: Runner,
    job: Job,
    staged: Staged,
    plan: TargetPlan,
    tag: CommitTag,
    fence: Fence,
) -> CommitTag:
    if plan.truncated_leaves:
        staged = replace(staged, ending=ending_of_leaves(plan.truncated_leaves))
    changes = NetChanges.of(job, plan, staged, tag)
    done = merge_files(runner, job, plan.state.table_name, changes, tag, fence)
    if done is not None:
        return done
    # Another run may have copied the target again since: Spark would treat that copy as ours. One
    # that copies it later removes these files, and so ends the merge.
    staged = staged.on_disk()
    fence.verify()
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_passing),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        before_sleep=lambda _: log.warning(
            "table=%s another writer committed during the merge: merging again",
            plan.state.table_name,
        ),
        reraise=True,
    )
    check_whole(runner, staged)
    return again(_merge, runner, job, changes, plan, tag, fence)


def _merge(
    runner: Runner,
    job: Job,
    changes: NetChanges,
    plan: TargetPlan,
    tag: CommitTag,
    fence: Fence,
) -> CommitTag:
    """Commit the net changes; returns the tag they were committed under.

    Spark's commit isn't a compare-and-swap. But their files are gone once another run has taken the
    target over (take_over_target).
    """
    place = job.lake.target(plan.state.table_name)
    target, net_columns = place.relation, changes.net_columns
    source = as_stored(parquet(changes.folder), plan.decode.types)
    if texts := place.open_known().layout.texts:  # Spark itself would store null.
        texts_of = [column for name, column in net_columns.sources.items() if name in texts]
        condition = " or ".join(f"{column} = ''" for column in texts_of)
        if runner.spark().sql(f"select 1 from {source} where {condition} limit 1").collect():
            raise empty_value(texts)
    has_leaves = bool(plan.truncated_leaves) and not net_columns.numbering.key
    if changes.duplicates is not None or has_leaves:
        keyless = KeylessTarget.of(job, plan)
        statement = count_statement(target, source, keyless)
        rows = {row["action"]: row["rows"] for row in runner.spark().sql(statement).collect()}
        updates, deletes = rows.get(ACTION_UPDATE, 0), rows.get(ACTION_DELETE, 0)
        tag = replace(tag, counts={**tag.counts, FOUND_UPDATES: updates, FOUND_DELETES: deletes})
        fence.verify()  # Counting may have taken long, and another run may have taken the lock.
        if has_leaves or updates or deletes:
            return commit_statement(runner, tag, rewrite_statement(target, source, keyless))
    clauses = changes.ending.clauses if changes.ending is not None else ()
    statement = net_statement(
        target, source, net_columns, overwrite=plan.is_truncated, others=clauses
    )
    return commit_statement(runner, tag, statement)

"""Merges changes of tables without a key: removes or changes duplicate rows, in one commit.

A MERGE can't take one of two equal rows, so the target is rewritten. Rows are equal where every
published column is, as a PostgreSQL subscriber compares them: nulls are equal, so are -0 and 0, all
NaN, and 1.0 and 1.00. Among equal rows, those written exactly like the source's are removed first,
so that the target keeps what the source keeps.

Both forms of a row are columns of a generator (inline). Had a projection computed them, Spark's
optimizer would know that they equal a struct of all columns. It would derive that equality again
for each column that a later projection renames, with and without each of the earlier names: twice
as many for every column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_INSERT, ACTION_UPDATE
from waldelta.changes.decode.collapse_keyless import PLACE
from waldelta.changes.merge.statements import of_leaves, raw_entries
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.spark_sql import quote
from waldelta.types import TargetType

# The columns of a target by name.
Columns: TypeAlias = Sequence[tuple[str, TargetType]]


def count_statement(
    target: str,
    source: str,
    columns: Columns,
    *,
    metadata_columns: bool,
    truncated: Sequence[int] = (),
) -> str:
    """Return the query of how many staged updates and deletes find their row.

    It returns a row ``action, rows`` for each action that has any.
    """
    return (
        f"with {_chosen(target, source, columns, metadata_columns, truncated)}\n"
        "select r.action, count(*) as rows\n"
        "from chosen as t\n"
        "join numbered as r on t.alike = r.alike and t.n = r.n\n"
        "group by r.action"
    )


def rewrite_statement(
    target: str,
    source: str,
    columns: Columns,
    *,
    metadata_columns: bool,
    truncated: Sequence[int] = (),
) -> str:
    """Return the INSERT OVERWRITE that applies net changes (as in collapse_copies) from ``source``.

    ``truncated`` are the oids of leaves whose rows are removed first.
    """
    names, _ = _named(columns, metadata_columns=metadata_columns)
    rows = rewritten_rows(
        target, source, columns, metadata_columns=metadata_columns, truncated=truncated
    )
    return f"insert overwrite {target} ({', '.join(names)})\n{rows}"


def rewritten_rows(
    base: str,
    source: str,
    columns: Columns,
    *,
    metadata_columns: bool,
    truncated: Sequence[int] = (),
) -> str:
    """Return the SELECT of relation ``base`` with the net changes applied, in the target's column
    order.
    """
    held, staged = [f"v{i}" for i in range(len(columns))], [f"c{i}" for i in range(len(columns))]
    if metadata_columns:
        held, staged = [*held, "lsn", "commit_ts", "raw"], [*staged, "lsn", "commit_ts", "raw"]
    changed = [
        f"case when r.action is null then t.{v} else r.{c} end"
        for v, c in zip(held, staged, strict=True)
    ]
    return (
        f"with {_chosen(base, source, columns, metadata_columns, truncated)}\n"
        f"select {', '.join(f't.{v}' for v in held)}\n"
        "from held as t\n"
        "left anti join wanted as w on t.alike = w.alike\n"
        "union all\n"
        f"select {', '.join(changed)}\n"
        "from chosen as t\n"
        "left join numbered as r on t.alike = r.alike and t.n = r.n\n"
        f"where r.action is null or r.action = '{ACTION_UPDATE}'\n"
        "union all\n"
        f"select {', '.join(f's.{c}' for c in staged)}\n"
        f"from {source} as s\n"
        f"where s.action = '{ACTION_INSERT}'"
    )


def different_rows(target: str, rows: str, columns: Columns, *, metadata_columns: bool) -> str:
    """Return the query of how many rows of ``rows`` the target lacks, and how many it has too many.

    ``rows`` is a relation as rewritten_rows() returns it.
    """
    names, aliases = _named(columns, metadata_columns=metadata_columns)
    held = ", ".join(f"{name} as {alias}" for name, alias in zip(names, aliases, strict=True))
    forms = _forms("v", columns, "raw" if metadata_columns else None)
    moment = ", lsn, commit_ts" if metadata_columns else ""
    return (
        f"with both as (select {', '.join(aliases)}, 1 as n from {rows} union all select {held}, -1"
        f" as n from {target}),\ncounted as (select sum(n) as n from both {forms} group by"
        f" exact{moment})\nselect coalesce(sum(case when n > 0 then n end), 0) as lacking,"
        " coalesce(-sum(case when n < 0 then n end), 0) as many\nfrom counted"
    )


def replace_statement(target: str, rows: str, columns: Columns, *, metadata_columns: bool) -> str:
    """Return the INSERT OVERWRITE with relation ``rows``, as rewritten_rows() returns it."""
    names, aliases = _named(columns, metadata_columns=metadata_columns)
    return (
        f"insert overwrite {target} ({', '.join(names)})\nselect {', '.join(aliases)} from {rows}"
    )


def _named(columns: Columns, *, metadata_columns: bool) -> tuple[list[str], list[str]]:
    """Return the target's column names, and their aliases in statements."""
    own = ([LSN, COMMIT_TS, RAW], ["lsn", "commit_ts", "raw"]) if metadata_columns else ([], [])
    return [quote(name) for name, _ in columns] + own[0], [
        f"v{i}" for i in range(len(columns))
    ] + own[1]


def _chosen(
    base: str,
    source: str,
    columns: Columns,
    metadata_columns: bool,
    truncated: Sequence[int],
) -> str:
    """Return CTEs of the staged removals and the matching target rows, numbered within equal rows.

    The target's columns are renamed by position, since a source's column may have any name.
    Comparing structs, nulls are equal and floats compare by value; ``exact`` distinguishes equal
    values that are written differently.
    """
    held = [f"{quote(name)} as v{i}" for i, (name, _) in enumerate(columns)]
    if metadata_columns:
        held += [f"{LSN} as lsn", f"{COMMIT_TS} as commit_ts", f"{RAW} as raw"]
    there = f" as o where not coalesce({of_leaves('o', truncated)}, false)" if truncated else ""
    raws = ("raw", "base_raw") if metadata_columns else (None, None)
    return (
        f"plain as (select {', '.join(held)} from {base}{there}),\nheld as (select * from plain"
        f" {_forms('v', columns, raws[0])}),\nremovals as (select * from {source}"
        f" {_forms('b', columns, raws[1])} where action in ('{ACTION_UPDATE}',"
        f" '{ACTION_DELETE}')),\nnumbered as (select *, row_number() over (partition by alike order"
        f" by {PLACE}) as n from removals),\nwanted as (select distinct alike from"
        " removals),\nwanted_exact as (select exact, count(*) as copies from removals group by"
        " exact),\ncandidates as (select t.*, row_number() over (partition by t.exact order by"
        " t.exact) as copy\n  from held as t left semi join wanted as w on t.alike ="
        " w.alike),\nchosen as (select t.*, row_number() over (partition by t.alike order by"
        " coalesce(t.copy <= x.copies, false) desc) as n\n  from candidates as t left join"
        " wanted_exact as x on t.exact = x.exact)"
    )


def _forms(prefix: str, columns: Columns, raw: str | None) -> str:
    """Return the LATERAL VIEW that adds ``alike`` and ``exact`` to rows with these columns."""
    values = [f"{prefix}{i}" for i in range(len(columns))]
    alike = [kind.equal_sql(value) for value, (_, kind) in zip(values, columns, strict=True)]
    exact = [kind.exact_sql(value) for value, (_, kind) in zip(values, columns, strict=True)]
    if raw is not None:
        alike.append(raw_entries(raw))
        exact.append(raw_entries(raw))
    forms = f"struct(struct({', '.join(alike)}), struct({', '.join(exact)}))"
    return f"lateral view inline(array({forms})) forms as alike, exact"

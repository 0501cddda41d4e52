"""Finds partitions that the role may not read: SELECT on a partitioned table covers partitions only
when that table itself is read.

Copies, repairs and comparisons then read through the table above
(waldelta.snapshot.exported_snapshot). Preflight, status and runs report such partitions: one that
the application adds next month won't have today's grants.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import psycopg

from waldelta.config import Source
from waldelta.grants import DefaultGrant, Grant, Need, sql_name, statements
from waldelta.postgres.catalog import READ_THROUGH, Leaf, TableId, Through
from waldelta.postgres.published_tables import MEMBERS
from waldelta.postgres.type_catalog import fetch
from waldelta.quantities import MOST_NAMED, first_of


def read_unreadable(connection: psycopg.Connection[Any], source: Source) -> list[str]:
    """Return a warning for each partitioned table with published partitions that the role may not
    read.

    This is one query, without locks.
    """
    rows = fetch(connection, _UNREADABLE, {"publications": list(source.publication_names)})
    found = []
    for (role, schema, name), of in groupby(
        rows, lambda row: (row.role, row.root_schema, row.root_name)
    ):
        leaves = [
            Leaf(
                TableId(row.schema, row.name),
                row.oid,
                0,
                0,
                0,
                owner=row.owner,
                readable=row.readable,
                through=Through.of(row.through),
            )
            for row in of
        ]
        found.append(f"{TableId(schema, name)}: {describe_unreadable(sql_name(role), leaves)}")
    return found


def describe_unreadable(role: str, leaves: Sequence[Leaf]) -> str | None:
    """Return a warning about those ``leaves`` of a table that ``role`` may not read; None without
    any.

    ``role`` is written as in SQL.
    """
    hidden = [leaf for leaf in leaves if leaf.through is not None or not leaf.readable]
    if not hidden:
        return None
    named = first_of([str(leaf.id) for leaf in hidden])
    lost = [leaf for leaf in hidden if not leaf.readable]
    through = ", ".join(
        sorted({str(leaf.through.id) for leaf in hidden if leaf.through is not None})
    )
    reads = (
        f"copies and repairs read them through {through}"
        if not lost
        else "copies and repairs that need them fail"
    )
    if lost and through:
        reads = (
            f"copies and repairs read them through {through}, and fail for"
            f" {', '.join(str(leaf.id) for leaf in lost[:MOST_NAMED])}"
        )
    listed = "\n".join(f"    {line}" for line in statements(role, needs_of(hidden)))
    return (
        f"role {role} may not read partition {named} directly, so {reads}; to grant it these, and"
        f" future partitions of their owner:\n{listed}"
    )


def needs_of(leaves: Sequence[Leaf]) -> list[Need]:
    """Return what a role needs to read partitions directly, and future ones of their owners."""
    stored = [leaf for leaf in leaves if leaf.relkind == "r"]
    schemas = dict.fromkeys(sql_name(leaf.id.schema) for leaf in stored)
    return [
        *(Grant("usage on schema", schema) for schema in schemas),
        *(Grant("select on", sql_name(leaf.id.schema, leaf.id.name)) for leaf in stored),
        *dict.fromkeys(
            DefaultGrant(sql_name(leaf.owner), sql_name(leaf.id.schema)) for leaf in stored
        ),
    ]


# Only leaves that the role may not read directly, by the topmost table above them.
_UNREADABLE = f"""{MEMBERS},
tree (oid) as (
    select distinct relid from member
    union
    select i.inhrelid
    from tree t
    join pg_class p on p.oid = t.oid and p.relkind = 'p'
    join pg_inherits i on i.inhparent = t.oid and not i.inhdetachpending
)
select current_user::text as role, rn.nspname as root_schema, root.relname as root_name,
       c.oid, n.nspname as schema, c.relname as name, pg_get_userbyid(c.relowner)::text as owner,
       w.through, w.readable is true as readable
from tree t
join pg_class c on c.oid = t.oid and c.relkind = 'r' and c.relispartition
join pg_namespace n on n.oid = c.relnamespace
join pg_class root on root.oid = pg_partition_root(c.oid)
join pg_namespace rn on rn.oid = root.relnamespace
left join lateral ({READ_THROUGH}) w on true
where w.through is not null or w.readable is not true
order by rn.nspname, root.relname, n.nspname, c.relname
"""  # noqa: S608 - no value in it

"""CHECK constraints of source tables: every row of a table meets them, so every row of its target
must as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from waldelta.config import split_table_name
from waldelta.lake.ledger import TableState


@dataclass(frozen=True, slots=True)
class CheckConstraint:
    """A constraint's name and its expression as PostgreSQL prints it.

    A row meets it where the expression is true or null.
    """

    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class ChecksRead:
    """By target: the constraints that hold for all rows of its source table.

    ``unread`` are the targets whose constraints weren't read. ``not_landed`` are, by target, the
    names of constraints made by a transaction that may not have landed: the target may still have
    rows from before it.
    """

    found: Mapping[str, tuple[CheckConstraint, ...]] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    not_landed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_check_constraints(
    connection: psycopg.Connection[Any],
    states: Sequence[TableState],
    landed_as_of: int | None,
    locked: Collection[int] = (),
) -> ChecksRead:
    """Read the check constraints of these targets' source tables.

    Reading takes a lock on the source tables, so tables (by oid) that are ``locked`` are skipped.
    Changes of transactions from ``landed_as_of`` (xid8) on may not have landed; None ignores this.
    Constraints on columns whose collation treats different texts as equal are left out.
    """
    fed_by = {
        state.table_name: split_table_name(state.fed_by or state.table_name) for state in states
    }
    if not fed_by:
        return ChecksRead()
    schemas, names = (list(part) for part in zip(*fed_by.values(), strict=True))
    found: dict[tuple[str, str], list[CheckConstraint]] = {}
    not_landed: dict[tuple[str, str], list[str]] = {}
    unread = set()
    asked = {"schemas": schemas, "names": names, "locked": list(locked)}
    for schema, table, name, expression, xmin in connection.execute(_CHECKS, asked):
        if landed_as_of is not None and not is_before(xmin, landed_as_of):
            not_landed.setdefault((schema, table), []).append(name)
        elif expression is None:
            unread.add((schema, table))
        else:
            found.setdefault((schema, table), []).append(CheckConstraint(name, expression))
    return ChecksRead(
        {target: tuple(found[table]) for target, table in fed_by.items() if table in found},
        frozenset(target for target, table in fed_by.items() if table in unread),
        {
            target: tuple(not_landed[table])
            for target, table in fed_by.items()
            if table in not_landed
        },
    )


def is_before(xmin: int, xid8: int) -> bool:
    """Returns whether a 32-bit xmin is of a transaction before ``xid8``, as PostgreSQL compares
    them.

    >>> is_before(5, 9), is_before(9, 9), is_before(2, 2**31 + 9)
    (True, False, True)
    >>> is_before(2**32 - 3, 2**32 + 9), is_before(12, 2**32 + 9)
    (True, False)
    """
    return xmin <= _FROZEN or 0 < (xid8 - xmin) % (1 << 32) < 1 << 31


_FROZEN = 2
_CHECKS = """
select n.nspname, c.relname, k.conname,
       case when c.oid <> all(%(locked)s::oid[]) then pg_get_expr(k.conbin, k.conrelid) end,
       k.xmin::text::bigint
from pg_constraint k
join pg_class c on c.oid = k.conrelid
join pg_namespace n on n.oid = c.relnamespace
where k.contype = 'c'
  and k.convalidated
  and (n.nspname, c.relname) in (select * from unnest(%(schemas)s::text[], %(names)s::text[]))
  and not exists (
      select from pg_attribute a
      join pg_collation l on l.oid = a.attcollation
      where a.attrelid = c.oid
        and a.attnum = any (k.conkey)
        and not l.collisdeterministic
  )
order by 1, 2, 3
"""

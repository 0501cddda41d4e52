"""Declared types: what the types of source columns guarantee beyond their types in the lake.

They are a domain's constraints, and lengths and precisions: ``varchar(n)``, ``char(n)``,
``bit(n)``, ``numeric(p,s)``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from waldelta.lake.ledger import ColumnState, TableState
from waldelta.postgres.type_catalog import (
    BIT_OID,
    BPCHAR_OID,
    NUMERIC_OID,
    VARBIT_OID,
    VARCHAR_OID,
    VARHDRSZ,
    fetch,
)
from waldelta.stages.check.constraints.check_constraints import CheckConstraint, is_before
from waldelta.types.numeric import precision_and_scale

_LIMITED = (BPCHAR_OID, VARCHAR_OID, BIT_OID, VARBIT_OID, NUMERIC_OID)


@dataclass(frozen=True, slots=True)
class DeclaredType:
    """What the type of a column guarantees.

    ``base_type`` is as PostgreSQL prints it (of a domain, its base type), with ``base_oid`` and the
    ``typmod`` that limits it (-1: no limit). ``checks`` are the domains' CHECK constraints on
    VALUE, ``not_null`` the domains that are NOT NULL.
    """

    column: str
    base_type: str
    base_oid: int
    typmod: int = -1
    checks: tuple[CheckConstraint, ...] = ()
    not_null: tuple[str, ...] = ()

    @property
    def length(self) -> int | None:
        """Returns the maximum number of characters or bits (of ``bit``: the exact number), or
        None.
        """
        if self.typmod < 0 or self.base_oid not in (BPCHAR_OID, VARCHAR_OID, BIT_OID, VARBIT_OID):
            return None
        return self.typmod - (VARHDRSZ if self.base_oid in (BPCHAR_OID, VARCHAR_OID) else 0)

    @property
    def precision(self) -> tuple[int, int] | None:
        """Returns a numeric's digits and its scale, which may be negative or exceed the digits."""
        return precision_and_scale(self.typmod) if self.base_oid == NUMERIC_OID else None


def read_declared_types(
    connection: psycopg.Connection[Any], states: Sequence[TableState], landed_as_of: int
) -> dict[str, tuple[DeclaredType, ...]]:
    """Returns by target what the declared types of its columns guarantee; other columns are left
    out.

    Only validated constraints of transactions that have landed count (all below this xid8 have). Of
    a changed length limit the wider one counts, because the target follows with the next change.
    """
    sources = {
        state.table_name: state.root_id or next(iter(state.relation_ids), 0) for state in states
    }
    rows = fetch(
        connection, _TYPES, {"oids": sorted({*sources.values()} - {0}), "limited": list(_LIMITED)}
    )
    by_relation: dict[int, list[Any]] = {}
    for row in rows:
        by_relation.setdefault(row.relation_id, []).append(row)
    found = {}
    for state in states:
        of = (
            _declared(state, row, landed_as_of)
            for row in by_relation.get(sources[state.table_name], ())
        )
        if declared := tuple(one for one in of if one is not None):
            found[state.table_name] = declared
    return found


def _declared(state: TableState, row: Any, landed_as_of: int) -> DeclaredType | None:
    # Number and type are compared too: another column may have the name by now, and the target
    # follows a change of type with the next change.
    column = next((c for c in state.columns if c.name == row.name), None)
    if column is None or column.attnum not in (0, row.attnum) or column.type_oid != row.type_oid:
        return None
    domains = [domain for domain in row.domains or () if is_before(domain["xmin"], landed_as_of)]
    checks = [
        CheckConstraint(check["name"], check["expression"])
        for domain in row.domains or ()
        for check in domain["checks"] or ()
        if not row.is_loose and is_before(check["xmin"], landed_as_of)
    ]
    not_null = tuple(domain["name"] for domain in domains if domain["not_null"])
    typmod = row.typmod if row.domains else _wider(column, row)
    if typmod < 0 and not checks and not not_null:
        return None
    return DeclaredType(row.name, row.base_type, row.base_oid, typmod, tuple(checks), not_null)


def _wider(column: ColumnState, row: Any) -> int:
    if column.typmod < 0 or row.typmod < 0:
        return -1
    if row.base_oid in (NUMERIC_OID, BIT_OID):  # Another scale or length changes the values.
        return column.typmod if column.typmod == row.typmod else -1
    return max(column.typmod, int(row.typmod))


def base_columns(state: TableState, declared: Collection[DeclaredType]) -> list[ColumnState]:
    """Returns the target's columns with the base type's name for domains, as expressions see
    them.
    """
    bases = {one.column: one.base_type for one in declared}
    return [
        replace(column, type_name=bases.get(column.name, column.type_name))
        for column in state.columns
    ]


# A domain may be based on another domain; only the innermost can have a type modifier.
_TYPES = """
with recursive part (relation_id, attnum, attname, type_oid, oid, typmod, kind, below,
                     below_typmod, depth) as (
    select a.attrelid, a.attnum, a.attname, a.atttypid, a.atttypid, a.atttypmod, t.typtype,
      t.typbasetype, t.typtypmod, 0
    from pg_attribute a
    join pg_type t on t.oid = a.atttypid
    where a.attrelid = any(%(oids)s::oid[])
      and a.attnum > 0
      and not a.attisdropped
      and (t.typtype = 'd' or (a.atttypid = any(%(limited)s::oid[]) and a.atttypmod >= 0))
    union all
    select p.relation_id, p.attnum, p.attname, p.type_oid, t.oid, p.below_typmod, t.typtype,
      t.typbasetype, t.typtypmod, p.depth + 1
    from part p
    join pg_type t on t.oid = p.below
    where p.kind = 'd'
)
select b.relation_id::bigint,
       b.attnum::int,
       b.attname as name,
       b.type_oid::bigint,
       b.oid::bigint as base_oid,
       b.typmod,
       format_type(b.oid, b.typmod) as base_type,
       exists (
           select from pg_attribute a
           join pg_collation l on l.oid = a.attcollation
           where a.attrelid = b.relation_id and a.attnum = b.attnum and not l.collisdeterministic
       ) as is_loose,
       (
           select json_agg(json_build_object(
               'name', format_type(d.oid, null),
               'not_null', t.typnotnull,
               'xmin', t.xmin::text::bigint,
               'checks', (
                   select json_agg(json_build_object(
                       'name', k.conname, 'expression', pg_get_expr(k.conbin, 0), 'xmin',
                         k.xmin::text::bigint
                   ) order by k.conname)
                   from pg_constraint k
                   where k.contypid = d.oid and k.contype = 'c' and k.convalidated
               )
           ) order by d.depth)
           from part d
           join pg_type t on t.oid = d.oid
           where d.relation_id = b.relation_id and d.attnum = b.attnum and d.kind = 'd'
       ) as domains
from part b
where b.kind <> 'd'
order by 1, 2
"""

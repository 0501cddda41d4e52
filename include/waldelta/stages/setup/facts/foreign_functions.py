"""Reads which functions of other roles PostgreSQL may call for tables that a role reads.

PostgreSQL calls the functions of indexes, statistics and constraints while a SELECT is planned, as
the role that runs it. A domain's constraint is called by each cast to it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from waldelta.postgres import Connection
from waldelta.postgres.type_catalog import PARTS_OF_TYPE, fetch


@dataclass(frozen=True, slots=True)
class ForeignFunction:
    """A function of another role (``owner``), and the object of a table that uses it.

    >>> str(ForeignFunction("index public.i", "public.f(integer)", "app"))
    'index public.i uses public.f(integer) of role app'
    """

    used_by: str
    name: str
    owner: str

    def __str__(self) -> str:
        return f"{self.used_by} uses {self.name} of role {self.owner}"


def read_foreign_functions(
    conn: Connection, oids: Collection[int]
) -> dict[int, tuple[ForeignFunction, ...]]:
    """Return by table the functions that belong neither to the current role nor to a superuser.

    Those of a table's partitions count as its own. This reads catalogs only, and no definition, so
    it plans nothing of these tables.
    """
    found: dict[int, list[ForeignFunction]] = {oid: [] for oid in oids}
    for row in fetch(conn, _FUNCTIONS, {"oids": list(oids)}):
        found[row.root].append(ForeignFunction(row.used_by, row.name, row.owner))
    return {oid: tuple(functions) for oid, functions in found.items()}


# A function that PostgreSQL's own code or operators call has no entry in pg_depend.
_FUNCTIONS = f"""
with recursive tree (root, oid) as (
    select t, t from unnest(%(oids)s::oid[]) as t
    union
    select t.root, i.inhrelid from tree t join pg_inherits i on i.inhparent = t.oid
),
types (root, oid) as (
    select t.root, a.atttypid
    from tree t
    join pg_attribute a on a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped
    union
    select y.root, v.oid
    from types y
    join pg_type t on t.oid = y.oid
    cross join lateral (
        {PARTS_OF_TYPE}
    ) as v (oid)
    where v.oid <> 0
),
used (root, class, oid, used_by) as (
    select t.root, 'pg_class'::regclass, i.indexrelid, 'index ' || i.indexrelid::regclass
    from tree t
    join pg_index i on i.indrelid = t.oid
    union all
    select t.root, 'pg_statistic_ext'::regclass, s.oid,
           format('statistics %%I.%%I', s.stxnamespace::regnamespace, s.stxname)
    from tree t
    join pg_statistic_ext s on s.stxrelid = t.oid
    union all
    select t.root, 'pg_class'::regclass, p.partrelid, 'partition key of ' || t.oid::regclass
    from tree t
    join pg_partitioned_table p on p.partrelid = t.oid
    union all
    select t.root, 'pg_constraint'::regclass, c.oid, format('constraint %%I', c.conname)
    from tree t
    join pg_constraint c on c.conrelid = t.oid and c.contype = 'c'
    union all
    select y.root, 'pg_constraint'::regclass, c.oid, 'domain ' || format_type(c.contypid, null)
    from types y
    join pg_constraint c on c.contypid = y.oid
    union all
    select t.root, 'pg_attrdef'::regclass, d.oid, format('generated column %%I', a.attname)
    from tree t
    join pg_attrdef d on d.adrelid = t.oid
    join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum and a.attgenerated <> ''
    union all
    select t.root, 'pg_policy'::regclass, p.oid, format('policy %%I', p.polname)
    from tree t
    join pg_policy p on p.polrelid = t.oid
)
select distinct u.root::bigint as root, u.used_by, f.oid::regprocedure::text as name,
       r.rolname::text as owner
from used u
join pg_depend d on d.classid = u.class and d.objid = u.oid
left join pg_operator o on d.refclassid = 'pg_operator'::regclass and o.oid = d.refobjid
join pg_proc f on f.oid = o.oprcode
               or (d.refclassid = 'pg_proc'::regclass and f.oid = d.refobjid)
join pg_roles r on r.oid = f.proowner
where not r.rolsuper and r.rolname <> current_user
order by 1, 2, 3
"""  # noqa: S608 - no value in it

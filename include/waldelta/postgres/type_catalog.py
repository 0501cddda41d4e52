"""Reads types from the source's catalogs: their kinds, base and element types, and printed
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

from psycopg.rows import namedtuple_row

from waldelta.postgres.connection import Connection

# Oids of built-in types, from pg_type.dat.
INT8, TEXT_OID, BPCHAR_OID, VARCHAR_OID = 20, 25, 1042, 1043
BIT_OID, VARBIT_OID, NUMERIC_OID = 1560, 1562, 1700
VARHDRSZ = 4  # The typmod of texts and numerics includes this.
TypeKind = Literal["base", "enum", "domain", "composite", "range", "multirange", "array"]

_KINDS: dict[str, TypeKind] = {
    "b": "base",
    "p": "base",
    "e": "enum",
    "d": "domain",
    "c": "composite",
    "r": "range",
    "m": "multirange",
}


@dataclass(frozen=True, slots=True)
class PgType:
    """A type with its modifier; ``name`` is what PostgreSQL prints: ``numeric(10,2)``, ``text[]``.

    For a domain, ``base`` is the innermost type that isn't a domain. For an array, ``element`` is
    its element's type with the array's typmod. ``type_name`` and ``type_schema`` are the bare
    names, by which extensions are recognised. ``has_domains``: an element, field or bound of it is
    of a domain.
    """

    oid: int
    typmod: int
    name: str
    kind: TypeKind = "base"
    type_name: str = ""
    type_schema: str = "pg_catalog"
    base: PgType | None = None
    element: PgType | None = None
    has_domains: bool = False

    @property
    def unchecked_name(self) -> str | None:
        """The name of the type as which a text is read without calling a domain's CHECK.

        A domain's owner writes that constraint, and its functions run as the role that casts. None
        where every cast checks a domain: then only texts can be compared.

        >>> PgType(1, -1, "d", kind="domain", base=PgType(23, -1, "integer")).unchecked_name
        'integer'
        """
        base = self.base or self
        return None if base.has_domains else base.name


def read_types(conn: Connection, types: Iterable[tuple[int, int]]) -> dict[tuple[int, int], PgType]:
    """Describe types given as (oid, typmod), with their base and element types."""
    pairs = set(types)
    rows = {r.oid: r for r in fetch(conn, _TYPES, {"oids": [oid for oid, _ in pairs]})}
    all_pairs = pairs | {pair for w in pairs for pair in _parts(rows, w)}
    names = {
        (r.oid, r.typmod): r.name
        for r in fetch(
            conn,
            _TYPE_NAMES,
            {"oids": [o for o, _ in all_pairs], "typmods": [t for _, t in all_pairs]},
        )
    }
    return {pair: _type(rows, names, pair) for pair in pairs}


class KnownTypes:
    """Describes types for several callers, also in threads, with one query per type.

    ``connected`` returns the connection for that.
    """

    def __init__(self, connected: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._connected = connected
        self._known: dict[tuple[int, int], PgType] = {}
        self._lock = Lock()

    def __call__(self, types: Iterable[tuple[int, int]]) -> dict[tuple[int, int], PgType]:
        """Describe types as ``read_types`` does, as they were when first read."""
        pairs = set(types)
        with self._lock:
            if unknown := pairs - self._known.keys():
                with self._connected() as connection:
                    self._known |= read_types(connection, unknown)
        return {pair: self._known[pair] for pair in pairs}


def fetch(conn: Connection, query: str, params: dict[str, Any]) -> list[Any]:
    """Returns rows as named tuples."""
    with conn.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(query.encode(), params).fetchall()


def _parts(rows: dict[int, Any], pair: tuple[int, int]) -> Iterable[tuple[int, int]]:
    """Yields the (oid, typmod) of the types of which a type is made."""
    oid, typmod = pair
    row = rows[oid]
    if row.typtype == "d":
        base = _innermost(rows, oid)
        yield base
        yield from _parts(rows, base)
    elif row.element_oid:
        yield (row.element_oid, typmod)
        yield from _parts(rows, (row.element_oid, typmod))


def _innermost(rows: dict[int, Any], oid: int) -> tuple[int, int]:
    # Only the innermost domain can have a modifier, as in getBaseTypeAndTypmod.
    typmod = -1
    while rows[oid].typtype == "d":
        typmod = rows[oid].typtypmod
        oid = rows[oid].typbasetype
    return oid, typmod


def _type(rows: dict[int, Any], names: dict[tuple[int, int], str], pair: tuple[int, int]) -> PgType:
    oid, typmod = pair
    row = rows[oid]
    is_domain = row.typtype == "d"
    base = _type(rows, names, _innermost(rows, oid)) if is_domain else None
    element = (
        _type(rows, names, (row.element_oid, typmod)) if row.element_oid and not is_domain else None
    )
    return PgType(
        oid=oid,
        typmod=typmod,
        name=names[pair],
        kind="array" if element else _KINDS[row.typtype],
        type_name=row.type_name,
        type_schema=row.type_schema,
        base=base,
        element=element,
        has_domains=row.has_domains,
    )


# A lateral query of the types that a row t of pg_type consists of: the base type of a domain, the
# element of an array, the columns of a composite type, the subtype of a range. 0 is none.
PARTS_OF_TYPE = """values (t.typbasetype), (t.typelem)
        union all
        select a.atttypid
        from pg_attribute a
        where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
        union all
        select r.rngsubtype from pg_range r where t.oid in (r.rngtypid, r.rngmultitypid)"""

# int2vector (22) and oidvector (30) subscript like arrays but print as '1 2 3'.
_TYPES = f"""
with recursive reachable (oid) as (
    select unnest(%(oids)s::oid[])
    union
    select v.oid
    from reachable r
    join pg_type t on t.oid = r.oid
    cross join lateral (values (t.typbasetype), (t.typelem)) as v (oid)
    where v.oid <> 0
),
parts (whole, oid) as (
    select oid, oid from reachable
    union
    select p.whole, v.oid
    from parts p
    join pg_type t on t.oid = p.oid
    cross join lateral (
        {PARTS_OF_TYPE}
    ) as v (oid)
    where v.oid <> 0
)
select t.oid,
       t.typname as type_name,
       n.nspname as type_schema,
       t.typtype::text,
       t.typbasetype,
       t.typtypmod,
       case
           when t.typsubscript = 'array_subscript_handler'::regproc and t.oid not in (22, 30)
             then t.typelem
           else 0
       end::int8 as element_oid,
       exists (
           select
           from parts p
           join pg_type part on part.oid = p.oid
           where p.whole = t.oid and p.oid <> t.oid and part.typtype = 'd'
       ) as has_domains
from reachable r
join pg_type t on t.oid = r.oid
join pg_namespace n on n.oid = t.typnamespace
"""  # noqa: S608 - no value in it

_TYPE_NAMES = """
select w.oid, w.typmod, format_type(w.oid, w.typmod) as name
from unnest(%(oids)s::oid[], %(typmods)s::int4[]) as w (oid, typmod)
"""

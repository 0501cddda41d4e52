"""What the source's catalogs say now of the tables that targets hold: their columns, and how their rows are stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import psycopg

from waldelta.ledger import AttributeState, FileState, StorageState
from waldelta.type_catalog import fetch


@dataclass(frozen=True, slots=True)
class PresentColumn:
    """A column as the source's catalogs have it now.

    ``missing`` is what rows older than the column show (pg_attribute.attmissingval, as text); ``unsure`` when such rows
    may hold values that no catalog tells: a default or NOT NULL without a missing value, or a generated column.
    """

    attnum: int
    missing: str | None
    unsure: bool
    # The highest number below this one's of a column that was dropped.
    last_dropped: int = 0


@dataclass(frozen=True, slots=True)
class PresentTable:
    """A table as the source's catalogs have it now: its columns by name, and how its rows are stored."""

    columns: dict[str, PresentColumn] = field(default_factory=dict)
    storage: StorageState | None = None


def read_present_tables(connection: psycopg.Connection[Any], relation_ids: Iterable[int]) -> dict[int, PresentTable]:
    """Those of these relations that exist, by oid; of a partitioned one, with what its leaves' old rows show.

    One statement for all of them: files and columns that are compared with earlier ones must be of one moment.
    """
    rows = fetch(connection, _TABLES, {"oids": list(relation_ids)})
    return {row.oid: _table(row) for row in rows}


def _table(row: Any) -> PresentTable:
    columns = {
        c["name"]: PresentColumn(
            c["attnum"], c["missing"][0] if c["missing"] else None, _is_unsure(c), c["last_dropped"] or 0
        )
        for c in row.columns
    }
    attributes = [AttributeState(c["attnum"], c["xmin"], c["has_missing"], c["default_oid"]) for c in row.columns]
    return PresentTable(columns, StorageState([FileState(*file) for file in row.files], attributes))


def _is_unsure(column: dict[str, Any]) -> bool:
    if column["missing"] is not None:
        return len(column["missing"]) > 1
    return bool(column["has_default"] or column["not_null"] or column["is_generated"])


# A partitioned table has no rows, so what old rows show stands with its leaves. pg_relation_filenode() would show
# another moment than the rows of pg_attribute.
_TABLES = """
with relation as (
    select c.oid, c.relkind from pg_class c where c.oid = any(%(oids)s::oid[])
),
leaf as (
    select r.oid as root, l.oid, l.relfilenode
    from relation r
    left join lateral pg_partition_tree(r.oid) t on t.isleaf and r.relkind = 'p'
    join pg_class l on l.oid = coalesce(t.relid, r.oid)
),
attribute as (
    select leaf.root,
           a.attname as name,
           min(a.attnum)::int as attnum,
           min(a.xmin::text::bigint) as xmin,
           bool_or(a.atthasmissing) as has_missing,
           min(d.oid::bigint) as default_oid,
           bool_or(a.atthasdef or coalesce(l.atthasdef, false)) as has_default,
           bool_or(a.attnotnull) as not_null,
           max((select max(d.attnum) from pg_attribute d
                where d.attrelid = a.attrelid and d.attisdropped and d.attnum < a.attnum)) as last_dropped,
           bool_or(a.attgenerated <> '' or a.attidentity <> '') as is_generated,
           array_agg(distinct (l.attmissingval::text::text[])[1]) filter (where l.atthasmissing) as missing
    from leaf
    join pg_attribute a on a.attrelid = leaf.root and a.attnum > 0 and not a.attisdropped
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    left join pg_attribute l on l.attrelid = leaf.oid and l.attname = a.attname and not l.attisdropped
    group by leaf.root, a.attname
)
select r.oid,
       (select json_agg(json_build_array(l.oid::bigint, l.relfilenode::bigint) order by l.oid)
        from leaf l where l.root = r.oid) as files,
       (select json_agg(row_to_json(a) order by a.attnum) from attribute a where a.root = r.oid) as columns
from relation r
where exists (select from attribute a where a.root = r.oid)
"""

"""Labels of enum columns: the values that a column of an enum type can have on the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from waldelta.lake.ledger import TableState


def read_enum_labels(
    connection: psycopg.Connection[Any], states: Sequence[TableState]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Returns the current labels by target and column, for columns of an enum or a domain over one.

    A label added later does no harm; a renamed label requires a resync of the table.
    """
    types = {column.type_oid for state in states for column in state.columns}
    if not types:
        return {}
    labels = {oid: tuple(found) for oid, found in connection.execute(_LABELS, (sorted(types),))}
    return {
        state.table_name: held
        for state in states
        if (held := {c.name: labels[c.type_oid] for c in state.columns if c.type_oid in labels})
    }


# A domain may be based on another domain.
_LABELS = """
with recursive base as (
    select t.oid as asked, t.oid, t.typtype, t.typbasetype from pg_type t
      where t.oid = any (%s::oid[])
    union all
    select b.asked, t.oid, t.typtype, t.typbasetype from base b join pg_type t
      on t.oid = b.typbasetype where b.typtype = 'd'
)
select b.asked::bigint, array_agg(e.enumlabel::text order by e.enumsortorder)
from base b
join pg_enum e on e.enumtypid = b.oid
where b.typtype = 'e'
group by 1
"""

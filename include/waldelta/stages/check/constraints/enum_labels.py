"""Labels of enum columns: what a column of such a type can hold on the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from waldelta.lake.ledger import TableState


def read_enum_labels(
    connection: psycopg.Connection[Any], states: Sequence[TableState]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """The labels there are by now, by target and column; of columns of an enum, or of a domain over
    one.

    A label that was added since is no trouble; one that was renamed has the table copied again.
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


# Domains may be of domains.
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

"""Ensures that all transactions from before the last change of the publications have ended.

Only then may a table's snapshot be taken. Changes from before an ALTER PUBLICATION are decoded by
the rules of that moment, though they commit later. A snapshot taken while their transaction is open
doesn't see them either, so they would be in neither. A publication may be altered at any time, so
the version that each snapshot sees is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from waldelta.errors import SnapshotLost, without_values
from waldelta.snapshot.exported_snapshot import SnapshotHolder, wait_for_old_transactions


@dataclass(frozen=True, slots=True)
class PublicationVersion:
    """Publications, their version whose older transactions have ended, and the timeout for waiting
    again.
    """

    publications: tuple[str, ...]
    version: str
    timeout_s: float


def wait_for_version(
    connection: psycopg.Connection[Any], publications: Sequence[str], timeout_s: float
) -> PublicationVersion:
    """Wait for transactions that may have written under an earlier version of the publications.

    Raises TransactionsStillOpen.
    """
    version = read_version(
        connection, publications
    )  # Read before the wait, so that a later ALTER changes the version.
    wait_for_old_transactions(connection, timeout_s)
    return PublicationVersion(tuple(publications), version, timeout_s)


def wait_for_version_again(
    connection: psycopg.Connection[Any], drained: PublicationVersion
) -> PublicationVersion:
    """Wait again, for a copy that starts again, only when the publications were altered since."""
    if read_version(connection, drained.publications) == drained.version:
        return drained
    return wait_for_version(connection, drained.publications, drained.timeout_s)


def check_version(holder: SnapshotHolder, drained: PublicationVersion) -> None:
    """Raise SnapshotLost when the snapshot sees publications that were altered after the wait."""
    if read_version_as_of(holder, drained) != drained.version:
        raise SnapshotLost(
            "the publications were altered before the snapshot was taken: the copy starts again"
        )


def read_version_as_of(
    holder: SnapshotHolder, drained: PublicationVersion, oids: Sequence[int] | None = None
) -> str:
    """Return read_version() as the snapshot sees it; raises SnapshotLost when its session has
    ended.
    """
    try:
        return read_version(holder.connection, drained.publications, oids)
    except psycopg.Error as err:
        raise SnapshotLost(
            f"the publications can't be read in the snapshot ({without_values(err)}): the copy"
            " starts again"
        ) from None


def read_version(
    connection: psycopg.Connection[Any],
    publications: Sequence[str],
    oids: Sequence[int] | None = None,
) -> str:
    """Return a text that changes with every change of the publications, even after one that was
    reverted.

    With the ``oids`` of tables, it changes only with how these are published; setting publication
    options doesn't count.
    """
    params = {"publications": list(publications), "oids": None if oids is None else list(oids)}
    ((version,),) = connection.execute(_VERSION.encode(), params).fetchall()
    return str(version)


# ALTER PUBLICATION replaces a row, or removes it and adds another one: oid and xmin never come
# back.
_VERSION = """
with publication as (
    select oid, xmin from pg_publication where pubname = any(%(publications)s::name[])
),
named as (
    select w.oid from unnest(%(oids)s::oid[]) as w (oid)
    union
    select a.relid from unnest(%(oids)s::oid[]) as w (oid), pg_partition_ancestors(w.oid) a
)
select md5(coalesce(string_agg(version, ' ' order by version), ''))
from (
    select format('p %%s %%s', oid, case when %(oids)s::oid[] is null then xmin::text end)
      as version
    from publication
    union all
    select format('r %%s %%s', r.oid, r.xmin)
    from pg_publication_rel r
    join publication p on p.oid = r.prpubid
    where %(oids)s::oid[] is null or r.prrelid in (select oid from named)
    union all
    select format('n %%s %%s', n.oid, n.xmin)
    from pg_publication_namespace n
    join publication p on p.oid = n.pnpubid
    where %(oids)s::oid[] is null
       or n.pnnspid in (select relnamespace from pg_class where oid in (select oid from named))
) as v
"""

"""Decides whether a slot may be read in pgoutput's binary format when changes are only counted.

Printing values takes a tenth of decoding. But a send function may refuse a value that an output
function prints, and an error during decoding is dangerous: before PostgreSQL 15.15, 16.11, 17.7 and
18.1 the next decoding in the same session may crash the server ("Fix access-to-already-freed-memory
issue in pgoutput"). So the catalogs are checked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from waldelta.postgres.publication_tables import MEMBERS

# For fewer changes, the check and the extra session don't pay.
BINARY_COUNT_FROM = 100_000


def is_plain(connection: psycopg.Connection[Any], publication_names: Sequence[str]) -> bool:
    """Return whether all published columns have types whose binary form comes from PostgreSQL
    itself.

    Types without a binary form are fine, too: their values are sent as text. Arrays, rows and
    ranges are excluded, because they may contain other types.
    """
    row = connection.execute(_OTHERS.encode(), {"publications": list(publication_names)}).fetchone()
    return row == (False,)


def is_refused(err: psycopg.Error) -> bool:
    """Return whether an error is about values, for example of a column that was dropped since.

    Errors about the server, the slot or privileges aren't.
    """
    others = (
        psycopg.OperationalError
        | psycopg.errors.InsufficientPrivilege
        | psycopg.errors.UndefinedObject
    )
    return not isinstance(err, others)


# PostgreSQL's own functions have oids below 16384 (FirstNormalObjectId). Domains and enums use
# those of their base types.
_OTHERS = (
    MEMBERS
    + """
select exists (
    select
    from member m
    join pg_attribute a on a.attrelid = m.relid and a.attnum > 0 and not a.attisdropped
    join pg_type t on t.oid = a.atttypid
    where t.typsend::oid >= 16384
       or t.typsend::oid in (
           'pg_catalog.array_send'::regproc, 'pg_catalog.record_send'::regproc,
           'pg_catalog.range_send'::regproc,
           'pg_catalog.multirange_send'::regproc
       )
)
"""
)

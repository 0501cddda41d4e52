"""Binary count: whether what a slot gives may be asked for in pgoutput's binary format where it is
only counted.

To print values is a tenth of a decode. But a send function may refuse what an output function
prints, and an error in the middle of decoding is nothing to provoke: before PostgreSQL 15.15,
16.11, 17.7 and 18.1 the next decoding in the same session may crash the server ("Fix
access-to-already-freed-memory issue in pgoutput"). So the catalogs are asked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from waldelta.postgres.publication_tables import MEMBERS

# Fewer changes aren't worth the question, and a session for the call.
BINARY_COUNT_FROM = 100_000


def is_plain(connection: psycopg.Connection[Any], publication_names: Sequence[str]) -> bool:
    """Whether all columns of the published tables are of types whose binary form comes from
    PostgreSQL itself.

    Or have none at all: those are sent as text. What is made of other types (arrays, rows, ranges)
    may be made of such.
    """
    row = connection.execute(_OTHERS.encode(), {"publications": list(publication_names)}).fetchone()
    return row == (False,)


def is_refused(err: psycopg.Error) -> bool:
    """Whether an error is about values, as of a column that was dropped since, not about the
    server, the slot or privileges.
    """
    others = (
        psycopg.OperationalError
        | psycopg.errors.InsufficientPrivilege
        | psycopg.errors.UndefinedObject
    )
    return not isinstance(err, others)


# Functions of PostgreSQL's own have oids below 16384 (FirstNormalObjectId); domains and enums have
# those of what they are made of.
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

"""Relation messages, which describe the columns of later row messages, and Truncate messages.

The types' names come from the catalog, not from Type messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from waldelta.pgoutput.byte_readers import MessageReader
from waldelta.quantities import counted

REPLICA_IDENTITIES = frozenset("dnfi")
_KEY_FLAG = 1
_CASCADE, _RESTART_IDENTITY = 1, 2


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A published column; ``is_key``: it is part of the replica identity."""

    name: str
    type_oid: int
    typmod: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """One version of a table's shape; ``replica_identity`` is pg_class.relreplident."""

    relation_id: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


def read_relation(data: bytes, *, streamed: bool = False) -> Relation:
    """Read a Relation message; ``streamed`` as in MessageReader."""
    # https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
    reader = MessageReader(data, "Relation", "R", streamed=streamed)
    relation_id = reader.integer(4, "relation_id")
    # An empty namespace stands for pg_catalog.
    schema, name = reader.text("schema") or "pg_catalog", reader.text("name")
    identity = chr(reader.integer(1, "replica_identity"))
    if identity not in REPLICA_IDENTITIES:
        raise reader.error("replica_identity", reader.position - 1, f"unknown setting {identity!r}")
    count = reader.integer(2, "column_count")
    columns = tuple(_read_column(reader, f"columns[{k}]") for k in range(count))
    reader.finish()
    return Relation(relation_id, schema, name, identity, columns)


def _read_column(reader: MessageReader, field: str) -> RelationColumn:
    flags = reader.integer(1, f"{field}.flags")
    name = reader.text(f"{field}.name")
    type_oid = reader.integer(4, f"{field}.type_oid")
    typmod = reader.integer(4, f"{field}.typmod", signed=True)
    return RelationColumn(name, type_oid, typmod, bool(flags & _KEY_FLAG))


def read_truncate(data: bytes, *, streamed: bool = False) -> tuple[int, ...]:
    """Return the relations that a Truncate message names; ``streamed`` as in MessageReader."""
    reader = MessageReader(data, "Truncate", "T", streamed=streamed)
    count = reader.integer(4, "relation_count")
    flags = reader.integer(1, "flags")
    if flags & ~(_CASCADE | _RESTART_IDENTITY):
        raise reader.error("flags", reader.position - 1, f"unknown flags {flags:#x}")
    # Checked before the loop: a flipped byte may claim four billion relations.
    if count * 4 != len(data) - reader.position:
        claimed = counted(count, "relation doesn't", "relations don't")
        raise reader.error("relation_count", 1, f"{claimed} fit the message's length")
    return tuple(reader.integer(4, f"relation_ids[{k}]") for k in range(count))

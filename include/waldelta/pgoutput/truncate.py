"""Truncate messages: which relations were truncated."""

from __future__ import annotations

from dataclasses import dataclass

from waldelta.pgoutput.byte_readers import MessageReader
from waldelta.quantities import counted

_CASCADE, _RESTART_IDENTITY = 1, 2


@dataclass(frozen=True, slots=True)
class Truncate:
    """One TRUNCATE of one or more relations."""

    relation_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


def read_truncate(data: bytes, *, streamed: bool = False) -> Truncate:
    """Read a Truncate message; ``streamed`` as in MessageReader."""
    reader = MessageReader(data, "Truncate", "T", streamed=streamed)
    count = reader.integer(4, "relation_count")
    flags = reader.integer(1, "flags")
    if flags & ~(_CASCADE | _RESTART_IDENTITY):
        raise reader.error("flags", reader.position - 1, f"unknown flags {flags:#x}")
    # Checked before the loop: a flipped byte may claim four billion relations.
    if count * 4 != len(data) - reader.position:
        claimed = counted(count, "relation doesn't", "relations don't")
        raise reader.error("relation_count", 1, f"{claimed} fit the message's length")
    relation_ids = tuple(reader.integer(4, f"relation_ids[{k}]") for k in range(count))
    reader.finish()
    return Truncate(relation_ids, bool(flags & _CASCADE), bool(flags & _RESTART_IDENTITY))

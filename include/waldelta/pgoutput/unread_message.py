"""A message that isn't decoded: its bytes, and the slot function's columns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Self

# The prefix of the kind of a message that landed without being read. No reader requests such a
# kind.
MARK = "!"
# A longer message is stored with its beginning only until it lands, which stores all of it.
MOST_MESSAGE_BYTES = 1 << 20
ID_LETTERS = 16


@dataclass(frozen=True, slots=True)
class UnreadMessage:
    """A message that can't be decoded; ``xid`` has 32 bits.

    People name it by ``id``, which is the same in every call that returns it, and after it has
    landed. ``batch`` and ``seq`` are its position in the change log, None before it has landed.
    ``streamed``: whether it is between Stream Start and Stop, where an xid follows the first byte;
    None where that isn't known.
    """

    id: str
    lsn: int
    xid: int
    raw: bytes
    batch: int | None = None
    seq: int | None = None
    streamed: bool | None = None

    @classmethod
    def of(cls, lsn: int, xid: int, raw: bytes, streamed: bool | None = None) -> Self:
        """Create a complete message that hasn't landed."""
        return cls(message_id(lsn, xid, raw), lsn, xid, raw, streamed=streamed)

    @property
    def kind(self) -> str:
        """The message's first byte as a letter; empty for an empty message."""
        return self.raw[:1].decode("latin-1")

    def landed(self, batch: int, seq: int) -> Self:
        """Return the message with its position in the change log."""
        return replace(self, batch=batch, seq=seq)

    def shortened(self) -> Self:
        """Return the message with at most the first MOST_MESSAGE_BYTES of its bytes."""
        return replace(self, raw=self.raw[:MOST_MESSAGE_BYTES])


def message_id(lsn: int, xid: int, raw: bytes) -> str:
    """Return the ``id`` of a complete message."""
    return hashlib.sha256(b"%d %d " % (lsn, xid) + raw).hexdigest()[:ID_LETTERS]

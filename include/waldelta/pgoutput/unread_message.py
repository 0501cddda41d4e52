"""Unread: a message as it came, which nothing reads: its bytes, and what the slot function says of
it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Self

# In front of the first byte, as the kind of a message that landed without being read: no reader
# asks for such a kind.
MARK = "!"
# A longer message is known by its beginning until it lands, which keeps all of it.
MOST_MESSAGE_BYTES = 1 << 20
ID_LETTERS = 16


@dataclass(frozen=True, slots=True)
class UnreadMessage:
    """A message that can't be read; ``xid`` has 32 bits.

    ``id`` is what people name it by: the same in every call that brings it, and once it has landed.
    ``batch`` and ``seq`` are its place in the change log, None before it has landed. ``streamed``
    says whether it lies between Stream Start and Stop, where an xid follows the first byte; None
    where that isn't known.
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
        """A whole message that hasn't landed."""
        return cls(message_id(lsn, xid, raw), lsn, xid, raw, streamed=streamed)

    @property
    def kind(self) -> str:
        """Its first byte as a letter; empty when it has none."""
        return self.raw[:1].decode("latin-1")

    def landed(self, batch: int, seq: int) -> Self:
        """The same at its place in the change log."""
        return replace(self, batch=batch, seq=seq)

    def shortened(self) -> Self:
        """The same with no more than the first MOST_MESSAGE_BYTES of its bytes."""
        return replace(self, raw=self.raw[:MOST_MESSAGE_BYTES])


def message_id(lsn: int, xid: int, raw: bytes) -> str:
    """The ``id`` of a whole message."""
    return hashlib.sha256(b"%d %d " % (lsn, xid) + raw).hexdigest()[:ID_LETTERS]

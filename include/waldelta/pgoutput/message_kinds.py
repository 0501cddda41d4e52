"""The kinds of pgoutput's messages: a new one is a row of KINDS.

PostgreSQL's chapter "Logical Replication Message Formats" describes each. The fields of control
messages are in ``messages``, and the tuples of rows in ``rows``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from waldelta.config.source import Options


class ScopeRole(Enum):
    """How a message relates to scopes: transactions, prepared ones, and streamed chunks.

    Scopes never nest.
    """

    OPENS = auto()
    CLOSES = auto()
    INSIDE = auto()
    OUTSIDE = auto()
    # Describes later messages, in a scope or before one.
    DESCRIBES = auto()
    ANYWHERE = auto()


@dataclass(frozen=True, slots=True)
class MessageKind:
    """A message's first byte, the protocol version that introduced it, and its least size in bytes.

    A message of an ``is_exact`` kind has no other size. ``pair`` is the kind that closes or opens
    the scope that this one opens or closes. With ``has_relation`` it begins with a relation's OID,
    and with ``has_xid`` it has its transaction's xid before that in a streamed chunk. ``end_at`` is
    the offset of the position where the transaction's WAL ends. ``commit_at`` has the offsets of
    commit position and time, in a message that decides a streamed or prepared transaction.
    """

    letter: str
    name: str
    version: int
    least_bytes: int
    role: ScopeRole
    pair: str = ""
    is_exact: bool = False
    has_relation: bool = False
    has_xid: bool = False
    end_at: int | None = None
    commit_at: tuple[int, int] | None = None

    @property
    def code(self) -> int:
        """The first byte as a number."""
        return ord(self.letter)


# fmt: off
KINDS = (
    MessageKind("B", "Begin", 1, 21, ScopeRole.OPENS, pair="C", is_exact=True),
    MessageKind("C", "Commit", 1, 26, ScopeRole.CLOSES, pair="B", is_exact=True, end_at=10),
    MessageKind("O", "Origin", 1, 10, ScopeRole.DESCRIBES),
    MessageKind("R", "Relation", 1, 9, ScopeRole.DESCRIBES, has_relation=True, has_xid=True),
    MessageKind("Y", "Type", 1, 7, ScopeRole.DESCRIBES, has_xid=True),
    MessageKind("I", "Insert", 1, 8, ScopeRole.INSIDE, has_relation=True, has_xid=True),
    MessageKind("U", "Update", 1, 8, ScopeRole.INSIDE, has_relation=True, has_xid=True),
    MessageKind("D", "Delete", 1, 8, ScopeRole.INSIDE, has_relation=True, has_xid=True),
    MessageKind("T", "Truncate", 1, 6, ScopeRole.INSIDE, has_xid=True),
    MessageKind("M", "Message", 1, 15, ScopeRole.ANYWHERE, has_xid=True),
    MessageKind("S", "Stream Start", 2, 6, ScopeRole.OPENS, pair="E", is_exact=True),
    MessageKind("E", "Stream Stop", 2, 1, ScopeRole.CLOSES, pair="S", is_exact=True),
    # It may have 16 bytes more: see ABORT_SIZES.
    MessageKind("A", "Stream Abort", 2, 9, ScopeRole.OUTSIDE),
    MessageKind("c", "Stream Commit", 2, 30, ScopeRole.OUTSIDE, is_exact=True, end_at=14,
                commit_at=(6, 22)),
    MessageKind("b", "Begin Prepare", 3, 30, ScopeRole.OPENS, pair="P"),
    MessageKind("P", "Prepare", 3, 31, ScopeRole.CLOSES, pair="b", end_at=10),
    MessageKind("p", "Stream Prepare", 3, 31, ScopeRole.OUTSIDE, end_at=10),
    MessageKind("K", "Commit Prepared", 3, 31, ScopeRole.OUTSIDE, end_at=10, commit_at=(2, 18)),
    MessageKind("r", "Rollback Prepared", 3, 39, ScopeRole.OUTSIDE, end_at=10),
)
# fmt: on
BY_LETTER = {kind.letter: kind for kind in KINDS}
# The first bytes as numbers, by names such as stream_start, for queries on the slot; and those of
# the kinds that end a transaction.
CODES = {kind.name.lower().replace(" ", "_"): kind.code for kind in KINDS}
END_CODES = ", ".join(str(kind.code) for kind in KINDS if kind.end_at is not None)
# Messages that decide which rows count, and when: none of version 1, whose rows count anyway, and
# none within a transaction.
_SCOPES = (ScopeRole.OPENS, ScopeRole.CLOSES, ScopeRole.OUTSIDE)
CONTROL_KINDS = tuple(k.letter for k in KINDS if k.version > 1 and k.role in _SCOPES)
ROW_KINDS = ("I", "U", "D")
# What a transaction consists of; the other kinds begin, end or describe.
CHANGE_KINDS = (*ROW_KINDS, "T", "M")
CHANGE_CODES = ", ".join(str(BY_LETTER[letter].code) for letter in CHANGE_KINDS)
# Messages that describe the columns of later messages, or decide which messages count.
TIMELINE_KINDS = ("R", "Y", "T", *CONTROL_KINDS)
STREAM_ABORT = CODES["stream_abort"]
# The protocol version of streaming 'parallel': a Stream Abort has its position and time then.
PARALLEL_VERSION = 4
ABORT_SIZES = (BY_LETTER["A"].least_bytes, BY_LETTER["A"].least_bytes + 16)


def protocol_version(options: Options) -> int:
    """Returns the lowest protocol version that supports the options."""
    if options.streaming == "parallel":
        return PARALLEL_VERSION
    if options.two_phase:
        return 3
    return 2 if options.streaming == "on" else 1


def name_of(first: str) -> str | None:
    """Returns the name of the kind of messages with this first byte; None for any other byte."""
    kind = BY_LETTER.get(first)
    return None if kind is None else kind.name

"""PostgreSQL's logical replication messages (the output plugin pgoutput), read column by column."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.pgoutput.relation import Relation, read_relation, read_truncate
    from waldelta.pgoutput.transactions import Segments
    from waldelta.pgoutput.unread_message import UnreadMessage

__all__ = ["Relation", "Segments", "UnreadMessage", "read_relation", "read_truncate"]
__getattr__ = lazy_exports(
    __name__,
    relation="Relation read_relation read_truncate",
    transactions="Segments",
    unread_message="UnreadMessage",
)

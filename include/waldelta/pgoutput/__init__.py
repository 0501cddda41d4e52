"""PostgreSQL's logical replication messages (the output plugin pgoutput), read column by column."""

from waldelta.pgoutput.messages import Relation, UnreadMessage, read_relation, read_truncate
from waldelta.pgoutput.transactions import Segments

__all__ = ["Relation", "Segments", "UnreadMessage", "read_relation", "read_truncate"]

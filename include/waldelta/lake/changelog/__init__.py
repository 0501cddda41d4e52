"""The change log: raw pgoutput messages as landed, and their ranges, order and counts."""

from waldelta.lake.changelog.batch_range import BatchNumbers, BatchRange, BatchRanges
from waldelta.lake.changelog.change_log import ChangeLog
from waldelta.lake.changelog.commit_order import Snapshot, Stream, last_truncates, place_columns
from waldelta.lake.changelog.row_messages import RowMessages
from waldelta.lake.changelog.transaction_counts import Landed, Transactions

__all__ = [
    "BatchNumbers",
    "BatchRange",
    "BatchRanges",
    "ChangeLog",
    "Landed",
    "RowMessages",
    "Snapshot",
    "Stream",
    "Transactions",
    "last_truncates",
    "place_columns",
]

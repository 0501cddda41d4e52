"""The change log: raw pgoutput messages as landed, and their ranges, order and counts."""

from waldelta.lake.changelog.batch_file import Landed, Transactions
from waldelta.lake.changelog.batch_range import BatchNumbers, BatchRange, BatchRanges
from waldelta.lake.changelog.change_log import ChangeLog
from waldelta.lake.changelog.row_messages import (
    RowMessages,
    Snapshot,
    Stream,
    last_truncates,
    place_columns,
)

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

"""The change log: raw pgoutput messages as landed, and their ranges, order and counts."""

from waldelta.lake.changelog.batch_range import BatchNumbers, BatchRanges
from waldelta.lake.changelog.change_log import ChangeLog
from waldelta.lake.changelog.commit_order import Snapshot, Stream

__all__ = ["BatchNumbers", "BatchRanges", "ChangeLog", "Snapshot", "Stream"]

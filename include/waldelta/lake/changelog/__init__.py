"""The change log: raw pgoutput messages as landed, and their ranges, order and counts."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.lake.changelog.batch_range import BatchNumbers, BatchRanges
    from waldelta.lake.changelog.change_log import ChangeLog
    from waldelta.lake.changelog.commit_order import Stream
    from waldelta.lake.changelog.snapshot_visibility import Snapshot

__all__ = ["BatchNumbers", "BatchRanges", "ChangeLog", "Snapshot", "Stream"]
__getattr__ = lazy_exports(
    __name__,
    batch_range="BatchNumbers BatchRanges",
    change_log="ChangeLog",
    commit_order="Stream",
    snapshot_visibility="Snapshot",
)

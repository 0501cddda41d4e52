"""Stages net changes of a batch range as Parquet files, in the driver or in Spark's tasks."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.changes.stage.folders import staged_in
    from waldelta.changes.stage.read_changes import read_row_changes
    from waldelta.changes.stage.stage import Staged

__all__ = ["Staged", "read_row_changes", "staged_in"]
__getattr__ = lazy_exports(
    __name__, folders="staged_in", read_changes="read_row_changes", stage="Staged"
)

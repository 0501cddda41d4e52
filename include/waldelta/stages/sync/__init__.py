"""Stage sync: copies the initial snapshot of tables that need it."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.sync.copied_table import SyncResult
    from waldelta.stages.sync.unfinished_repairs import end_killed_repairs

__all__ = ["SyncResult", "end_killed_repairs"]
__getattr__ = lazy_exports(
    __name__, copied_table="SyncResult", unfinished_repairs="end_killed_repairs"
)

"""Stage sync: copies the initial snapshot of tables that need it."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.sync.copied_table import SyncResult

__all__ = ["SyncResult"]
__getattr__ = lazy_exports(__name__, copied_table="SyncResult")

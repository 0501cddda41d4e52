"""Rows of the source as one exported snapshot sees them."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.snapshot.exported_snapshot import SnapshotHolder
    from waldelta.snapshot.read_selected import Choice
    from waldelta.snapshot.read_table import TableCopy, plan_copy

__all__ = ["Choice", "SnapshotHolder", "TableCopy", "plan_copy"]
__getattr__ = lazy_exports(
    __name__,
    exported_snapshot="SnapshotHolder",
    read_selected="Choice",
    read_table="TableCopy plan_copy",
)

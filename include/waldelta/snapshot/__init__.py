"""Rows of the source as one exported snapshot sees them."""

from waldelta.snapshot.exported_snapshot import SnapshotHolder
from waldelta.snapshot.read_selected import Choice
from waldelta.snapshot.read_table import TableCopy, plan_copy

__all__ = ["Choice", "SnapshotHolder", "TableCopy", "plan_copy"]

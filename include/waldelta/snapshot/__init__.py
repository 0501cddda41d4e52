"""Rows of the source as one exported snapshot sees them."""

from waldelta.snapshot.chunks import Chunk, plan_chunks
from waldelta.snapshot.exported_snapshot import SnapshotHolder, reader_name
from waldelta.snapshot.read_selected import Choice, whole_table
from waldelta.snapshot.read_table import TableCopy, plan_copy
from waldelta.snapshot.source_columns import KeyAttribute

__all__ = [
    "Choice",
    "Chunk",
    "KeyAttribute",
    "SnapshotHolder",
    "TableCopy",
    "plan_chunks",
    "plan_copy",
    "reader_name",
    "whole_table",
]

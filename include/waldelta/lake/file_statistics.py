"""Collects Delta's statistics of a data file part by part while the file is written.

Which columns have bounds, and how these are written, is a matter of their types.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.types.bounds import Order, order_of

# The number of columns with bounds that is Spark's default.
MOST_COLUMNS = 32


class FileStatistics:
    """The number of rows; for some columns also the nulls, and the least and greatest values."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.rows = 0
        self._nulls = dict.fromkeys(columns, 0)
        self._least: dict[str, Any] = {}
        self._most: dict[str, Any] = {}
        self._orders: dict[str, Order] = {}

    def add(self, part: pa.RecordBatch | pa.Table) -> None:
        """Count the rows of a part."""
        self.rows += len(part)
        for name in self._nulls:
            column = part[name]
            self._nulls[name] += column.null_count
            order = order_of(column.type)
            if order is not None and (counted := order.comparable(column)) is not None:
                self._orders[name] = order
                self._widen(name, pc.min_max(counted).as_py())

    def _widen(self, name: str, bounds: dict[str, Any]) -> None:
        least, most = bounds["min"], bounds["max"]
        if least is not None:
            self._least[name] = min(least, self._least.get(name, least))
            self._most[name] = max(most, self._most.get(name, most))

    def text(self) -> str:
        """Return the statistics as the text in an ``add`` action."""
        told = {
            name: order
            for name, order in self._orders.items()
            if name in self._least and order.has_bounds(self._least[name], self._most[name])
        }
        statistics = {
            "numRecords": self.rows,
            "minValues": {n: order.least_text(self._least[n]) for n, order in told.items()},
            "maxValues": {n: order.most_text(self._most[n]) for n, order in told.items()},
            "nullCount": self._nulls,
        }
        # delta-rs (arrow-json) loses half of an escaped character beyond 16 bits, and then skips
        # files that contain the value it searches.
        return json.dumps(statistics, ensure_ascii=False)


def bounded_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that get statistics: of Spark's first ones, those with single values."""
    return [
        field.name for field in list(schema)[:MOST_COLUMNS] if not pa.types.is_nested(field.type)
    ]

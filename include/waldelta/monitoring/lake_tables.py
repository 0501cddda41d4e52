"""The bookkeeping tables of one lake, read by columns and from a time on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.config import PipelineFile
from waldelta.lake import bookkeeping_uri
from waldelta.lake.ledger import Ledger
from waldelta.lake.ledger.expectation_results import ExpectationResult, expectations_table
from waldelta.lake.ledger.table import LedgerTable
from waldelta.pipeline.job import storage_options_of


class _Kind(Protocol):
    """A class of rows."""

    table: ClassVar[str]
    schema: ClassVar[pa.Schema]


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """A lake by its root; ``storage_options`` are an object store's credentials, else None."""

    root: str
    storage_options: dict[str, str] | None = None

    @property
    def ledger(self) -> Ledger:
        """Returns the same tables as runs read them: all rows."""
        return Ledger(self.root, self.storage_options)

    def scan(
        self,
        kind: type[_Kind],
        columns: Sequence[str],
        since: datetime | None = None,
        chosen: pc.Expression | None = None,
    ) -> pa.Table:
        """Returns columns of a table's rows from ``since`` on, oldest first; raises the store's
        errors.
        """
        if kind.table == ExpectationResult.table:
            return expectations_table(self.root, self.storage_options).scan(columns, since, chosen)
        uri = bookkeeping_uri(self.root, kind.table)
        return LedgerTable(uri, kind.schema, self.storage_options).scan(columns, since, chosen)


def last_rows(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Returns the last row of each group, in the rows' order."""
    numbered = rows.select(list(keys)).append_column("n", pa.array(np.arange(rows.num_rows)))
    return rows.take(
        numbered.group_by(list(keys)).aggregate([("n", "max")])["n_max"].combine_chunks().sort()
    )


def bookkeeping_of(pipeline: PipelineFile) -> Bookkeeping:
    """Returns the lake of a pipeline.

    An object store's credentials come from this process's environment, as in a run.
    """
    root = pipeline.target.root
    return Bookkeeping(root, storage_options_of(root))

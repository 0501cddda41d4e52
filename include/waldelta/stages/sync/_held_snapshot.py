"""Keeps a copy's snapshot until all its rows are read, and measures its cost for the source. Part
of sync.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import psycopg

from waldelta.errors import WaldeltaError
from waldelta.pipeline import Job
from waldelta.pipeline.source_load import SourceBill, xmin_age
from waldelta.snapshot import SnapshotHolder


@dataclass
class CopySnapshot:
    """A snapshot that is open since ``began``; ``resources`` use its connection as long.

    ``bill`` is measured at the end.
    """

    job: Job
    holder: SnapshotHolder
    began: float
    resources: ExitStack
    bill: SourceBill = field(default_factory=SourceBill)

    def end(self) -> None:
        """Release the snapshot, unless that is done."""
        if self.bill.snapshot_seconds:
            return
        self.resources.close()
        self.holder.end()
        self.bill = SourceBill(snapshot_seconds=time.monotonic() - self.began, xmin_age=self._age())

    def _age(self) -> int:
        """Returns the age for the bill; an error returns 0, because it must not fail a copy."""
        with suppress(WaldeltaError, psycopg.Error), self.job.source.connect("sync") as connection:
            return xmin_age(connection, self.holder.snapshot)
        return 0

"""Held snapshot: a copy's snapshot until all its rows are read, and what that cost the source. A
part of sync.
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
    """A snapshot that is held since ``began``; ``beside`` is what goes on on the holder's
    connection as long. ``bill`` is told at the end.
    """

    job: Job
    holder: SnapshotHolder
    began: float
    resources: ExitStack
    bill: SourceBill = field(default_factory=SourceBill)

    def end(self) -> None:
        """Let go of it, if that hasn't been done."""
        if self.bill.snapshot_seconds:
            return
        self.resources.close()
        self.holder.end()
        self.bill = SourceBill(snapshot_seconds=time.monotonic() - self.began, xmin_age=self._age())

    def _age(self) -> int:
        """For the bill alone, which isn't worth a copy."""
        with suppress(WaldeltaError, psycopg.Error), self.job.connect("sync") as connection:
            return xmin_age(connection, self.holder.snapshot)
        return 0

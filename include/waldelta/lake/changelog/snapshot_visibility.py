"""Which transactions a snapshot sees: what a copy already holds must not be applied again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ``pg_snapshot``: ``xmin:xmax:xip_list``, all 64-bit top-level transaction ids.

    >>> Snapshot.parse("10:20:12,15").sees(np.array([9, 12, 13, 20])).tolist()
    [True, False, True, False]
    """

    xmin: int
    xmax: int
    running: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read PostgreSQL's text form; raises ValueError on anything else."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid8: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each transaction id is visible, as ``pg_visible_in_snapshot`` does."""
        visible: NDArray[np.bool_] = xid8 < self.xmax
        if self.running:
            visible &= ~np.isin(xid8, np.array(self.running, np.int64))
        return visible

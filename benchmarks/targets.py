"""The targets: what must be reached, and what is aimed at.

They are medians on two cores, and ratios to the baseline of the same run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Target:
    """Limits of the scores whose names match; ``least`` where too little would be as wrong as too
    much.
    """

    what: str
    scores: str
    must: float
    aim: float | None = None
    least: float | None = None

    @property
    def limits(self) -> str:
        """The limits, as tables show them."""
        return f"≤ {self.must:g}" if self.least is None else f"{self.least:g}–{self.must:g}"

    def verdict(self, value: float) -> str:
        """Returns ``aim``, ``must`` or ``missed``: the best that a value reaches."""
        if self.excess(value) > 1:
            return "missed"
        return "aim" if self.aim is None or value <= self.aim else "must"

    def excess(self, value: float) -> float:
        """Returns how many times the limit a value is, on the side where it is farther off.

        More than 1 misses the must. Nothing costs nothing: a value that isn't above 0 was measured
        or computed wrong.
        """
        if value <= 0:
            return math.inf
        return max(value / self.must, self.least / value if self.least is not None else 0.0)


TARGETS = (
    Target(
        "1,000,000 changes landed, merged and checked, warm",
        "backlog-1m-*/warm ÷ pg_recvlogical",
        4,
        2.5,
    ),
    # This score depends on the machine: pg_recvlogical may be twice as fast on one where everything
    # else isn't. Both limits equal those above on a machine where PostgreSQL's own subscriber takes
    # 1.7 times the drain.
    Target(
        "the same, beside PostgreSQL's own subscriber",
        "backlog-1m-*/warm ÷ native subscriber",
        2.4,
        1.5,
    ),
    Target("the same, fresh JVM, from process start", "backlog-1m-*/fresh ÷ pg_recvlogical", 8, 5),
    Target("their check's share", "backlog-1m-*/warm: check's share", 0.25),
    Target("initial sync of 2,000,000 rows, warm", "sync/warm, unchecked ÷ COPY binary", 6, 4.3),
    Target(
        "initial sync of 2,000,000 rows, fresh JVM", "sync/fresh, unchecked ÷ COPY binary", 16, 10
    ),
    Target(
        "one transaction of 1,000,000 changes against small ones",
        "one-transaction: one ÷ small",
        1.5,
        1.2,
    ),
    Target(
        "10,000 changes into 2,000,000 rows, apply job, warm (no Airflow)",
        "small/tasks: apply",
        6,
        4,
    ),
    Target(
        "10,000 changes into 2,000,000 rows, fresh JVM until applied (no Airflow)",
        "small/fresh: applied",
        18,
        12,
    ),
    Target(
        "a backlog into 50,000,000 rows against 1,000,000", "clustered keys: 50m ÷ 1m", 1.5, 1.2
    ),
    Target("1,000,000 changes on S3 with 30 ms for each request", "S3 ÷ folder", 1.5, 1.2),
    Target(
        "200 tables with 50 changes each, applied (no Airflow)", "tables-200/tasks: applied", 90, 45
    ),
    Target("200 such tables, checked", "tables-200/tasks: check", 120),
    Target("20 such tables, checked", "tables-20/tasks: check", 12),
    Target(
        "a small batch checked, for each of many tables", "tables-*/tasks: check, per table", 0.6
    ),
    Target("20 such tables, applied (no Airflow)", "tables-20/tasks: applied", 12, 6),
    Target(
        "cost per change, 5,000,000 against 500,000",
        "growth: 5,000,000 ÷ 500,000, per change",
        1.15,
    ),
    Target(
        "what check estimates for an initial sync, against it",
        "estimate*/fresh: *, estimated ÷ copied",
        1.3,
        least=0.7,
    ),
    Target("idle run (no Airflow)", "idle/idle: seconds", 3, 1.5),
    Target("memory of the reader (MB)", "reader's memory", 500),
    # Other memory of Python's workers: a bucket of 128 MB in memory three times, and as much for
    # the merge.
    Target("memory of a worker that decodes, collapses or merges (MB)", "a worker's memory", 1024),
    Target("memory of the job's own process (MB)", "job's memory", 1024),
    Target("memory of the JVM (MB): its heap is less", "JVM's memory", 4096),
    Target(
        "CPU of the source, in decodes",
        "backlog-1m-*/warm, CPU of the source ÷ COPY of a peek",
        2,
        1.2,
    ),
)


def target_of(score: str) -> Target | None:
    """Returns the target by which a score is judged, if any."""
    return next((target for target in TARGETS if fnmatchcase(score, target.scores)), None)

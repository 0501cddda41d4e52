"""Which of a target's commits some run's result has; mostly the run's own, after a kill
perhaps a later one's.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cached_property

from waldelta.lake.ledger import Ledger
from waldelta.lake.ledger.records import Run
from waldelta.pipeline.run_result import RunResult

# By so much the clock of whoever tells may be behind that of whoever committed.
_SKEW = timedelta(hours=1)
# The version of each target that a run has told.
_Versions = dict[str, int]


class ReportedCommits:
    """What runs tell of targets; each result is read once, and none that was told before the
    commits in question.
    """

    def __init__(self, ledger: Ledger, forgotten_before: datetime) -> None:
        """``forgotten_before``: as far back as maintenance leaves results; a run of later has none
        because it told none.
        """
        self._ledger, self._forgotten_before = ledger, forgotten_before
        self._of_runs: dict[str, _Versions | None] = {}
        self._since: datetime | None = None
        self._rows: list[tuple[datetime, _Versions]] = []

    def has(
        self,
        run_id: str,
        table_name: str,
        version: int,
        committed_at: datetime,
        copied_at: Callable[[], datetime],
    ) -> bool:
        """Whether a run tells of a version of a target, which ``run_id`` committed.

        ``copied_at`` says when its copy was begun, by the ledger: asked only where its own run
        doesn't tell, which is seldom.
        """
        own = self._of_run(run_id)
        if own is not None and own.get(table_name, -1) >= version:
            return True
        # What is older than all that are left was told long ago.
        is_forgotten = own is None and committed_at < self._forgotten_before
        if is_forgotten and self._first is not None and committed_at < self._first:
            return True
        # An earlier row's may be of another table in the same place, whose versions had come
        # further.
        since = max(committed_at - _SKEW, copied_at())
        return any(
            at >= since and told.get(table_name, -1) >= version
            for at, told in self._rows_since(since)
        )

    def _of_run(self, run_id: str) -> _Versions | None:
        if run_id not in self._of_runs:
            run = self._ledger.run_result(run_id, "consume")
            self._of_runs[run_id] = None if run is None else _versions(run)
        return self._of_runs[run_id]

    def _rows_since(self, since: datetime) -> list[tuple[datetime, _Versions]]:
        if self._since is None or since < self._since:
            self._rows = [
                (run.at, _versions(run))
                for run in self._ledger.runs(since)
                if run.verb == "consume"
            ]
            self._since = since
        return self._rows

    @cached_property
    def _first(self) -> datetime | None:
        return self._ledger.first_run_at()


def _versions(run: Run) -> _Versions:
    tables = RunResult.from_json(run.result).tables
    return {name: table.version for name, table in tables.items() if table.version is not None}

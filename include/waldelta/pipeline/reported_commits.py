"""Finds out which of a target's commits a run's result contains.

Usually that is the result of the run that committed; after a crash it may be a later run's.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cached_property

from waldelta.lake.ledger import Ledger, Run
from waldelta.pipeline.run_result import RunResult

# Maximum difference between the clocks of the run that reports and the run that committed.
_SKEW = timedelta(hours=1)
# The latest version of each target in a run's result.
_Versions = dict[str, int]


class ReportedCommits:
    """The versions of targets that run results contain.

    Each result is read once, and only results that are newer than the commits in question are read.
    """

    def __init__(self, ledger: Ledger, forgotten_before: datetime) -> None:
        """``forgotten_before`` is the age up to which maintenance keeps results.

        A newer run without a result has reported nothing.
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
        """Returns whether a run's result contains a version of a target, which ``run_id``
        committed.

        ``copied_at`` returns the start of the target's copy, from the ledger. It is called only
        where the run's own result doesn't contain the version, which is rare.
        """
        commits = self._of_run(run_id)
        if commits is not None and commits.get(table_name, -1) >= version:
            return True
        # A commit older than all results still kept was reported long ago.
        is_forgotten = commits is None and committed_at < self._forgotten_before
        if is_forgotten and self._first is not None and committed_at < self._first:
            return True
        # An earlier result may be about another table at the same location, whose versions were
        # higher.
        since = max(committed_at - _SKEW, copied_at())
        return any(
            at >= since and versions.get(table_name, -1) >= version
            for at, versions in self._rows_since(since)
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
        return min(self._ledger.table(Run).scan(["at"])["at"].to_pylist(), default=None)


def _versions(run: Run) -> _Versions:
    tables = RunResult.from_json(run.result).tables
    return {name: table.version for name, table in tables.items() if table.version is not None}

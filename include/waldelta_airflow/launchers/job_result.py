"""A job's result, and its failure as Airflow's: retried or not, with the whole message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waldelta.errors import WaldeltaError
from waldelta_airflow._airflow_versions import AirflowException, AirflowFailException

USAGE_ERROR = 2


class _OfClass(Exception):
    """A failure with the classes of its errors, for notifications.

    See ``waldelta_airflow.reporting.notify``.
    """

    def __init__(self, text: str, kinds: Sequence[str] = (), message: str | None = None) -> None:
        super().__init__(text)
        self.kinds = tuple(kinds)
        self.message = text if message is None else message


class TaskFailed(_OfClass, AirflowException):
    """A task's failure that may disappear by itself: Airflow retries."""


class TaskFailedForGood(_OfClass, AirflowFailException):
    """A task's failure that a retry doesn't help."""


_DONE = ("succeeded", "skipped")
_WRITING_REPORTS = ("check", "reconcile")
# What later tasks need: names, counts and positions, never rows.
_SUMMARY = (
    "verb",
    "run_id",
    "changes",
    "start_lsn",
    "end_lsn",
    "lag_bytes",
    "tables",
    "not_applied",
    "needs_sync",
    "never_copied",
    "passed",
    "corrected",
    "report",
    "failed_expectations",
)


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's result document, as ``--result`` writes it and the ledger stores it."""

    document: dict[str, Any]

    @classmethod
    def read(cls, path: Path, exit_code: int) -> JobResult:
        """Returns a job's result; raises when the job left none."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            pass
        if exit_code == USAGE_ERROR:
            raise AirflowFailException(
                "the job refused its arguments: the usage is in the log above"
            )
        how = (
            f"was ended by signal {-exit_code}"
            if exit_code < 0
            else f"ended with exit code {exit_code}"
        )
        raise AirflowException(
            f"the job {how} before it could report: its last lines are in the log above"
        )

    def summary(self) -> dict[str, Any]:
        """Returns the part that is passed to later tasks."""
        return {key: self.document[key] for key in _SUMMARY if key in self.document}

    def knows(self, stage: str) -> bool:
        """Returns whether the job reached this stage."""
        return stage in self._stages

    def require(self, stage: str | None = None) -> None:
        """Raise when the job, or this stage of it, failed."""
        if (failure := self.failure(stage)) is not None:
            raise failure

    def failure(self, stage: str | None = None) -> TaskFailed | TaskFailedForGood | None:
        """Returns the failure of the job, or of this stage; None when it didn't fail."""
        outcome = self._stages.get(stage or "", self.document)
        if outcome.get("status") in _DONE:
            return None
        error = self._stages.get(stage or "", {}).get("error") or self.document.get("error") or {}
        kinds = [error["class"], *error.get("causes", ())] if error else []
        kind = TaskFailed if error.get("retryable") else TaskFailedForGood
        return kind(self._failure_text(stage, error), kinds, error.get("message"))

    @property
    def _stages(self) -> dict[str, Any]:
        return self.document.get("stages") or {}

    def _failure_text(self, stage: str | None, error: dict[str, Any]) -> str:
        what = stage or self.document.get("verb", "the job")
        lines = [
            (
                f"{error['class']}: {error['message']}"
                if error
                else f"{what} failed without naming an error"
            )
        ]
        # The stages that write the run's report; after another's failure it is about other tables.
        writers = (self._stages.get(name, {}) for name in _WRITING_REPORTS)
        if not any(error == stage["error"] for stage in writers if stage.get("error")):
            return lines[0]
        failed = self.document.get("failed_expectations") or []
        names = [item if isinstance(item, str) else json.dumps(item) for item in failed]
        lines += [f"  failed: {name}" for name in names if name not in lines[0]]
        report = self.document.get("report")
        if report and "\nreport: " not in lines[0]:
            lines.append(f"report: {report}")
        return "\n".join(lines)


@contextmanager
def named_failures() -> Iterator[None]:
    """Turn waldelta's named errors into Airflow's: only those that may disappear are retried."""
    try:
        yield
    except WaldeltaError as err:
        kinds = [type(each).__name__ for each in (err, *err.causes)]
        raised = TaskFailed if err.retryable else TaskFailedForGood
        # Not chained, because the log would repeat the message below a useless traceback.
        raise raised(f"{kinds[0]}: {err}", kinds, str(err)) from None

"""Notifications: calls the notifiers of a pipeline file for failed tasks, by the class of the
error.

With class SlotCritical it also reports a critical slot while no task fails, so that the DBA knows
before the slot is lost.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from airflow.sdk import BaseNotifier, Context

from waldelta.config import PipelineFile
from waldelta.config.pipeline_file import Notification
from waldelta.error_catalog import ERRORS, REMEDIES, is_kind
from waldelta.errors import ConfigError, SlotCritical, stack_without_values
from waldelta_airflow import settings

log = logging.getLogger(__name__)

# The tasks that check the slot's health, and the XCom with the time of the last notification.
IDLE_CHECK, LAND = "slot_has_changes", "land"
_NOTIFIED_AT = "slot_critical_told"
# The reason that Airflow gives for a run that dagrun_timeout ended.
_TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class NotifyOn:
    """An ``on_failure_callback``: passes failures of some classes to a notifier.

    Airflow calls it in the task's process after the last retry has failed, and in the DAG processor
    for a task that was killed from outside. A new notifier is created for each failure, because it
    renders its templates in place.
    """

    pipeline: str
    entry: Notification

    def __call__(self, context: Context) -> None:
        """Notify about a failure of the entry's classes; templates find it as ``failure``."""
        failure, kinds = describe_failure(self.pipeline, context)
        if self.is_for(*kinds):
            self.notify(context, failure)

    def is_for(self, *kinds: str) -> bool:
        """Returns whether one of these classes is among the entry's classes."""
        return any(is_kind(kind, of) for kind in kinds for of in self.entry.errors)

    def notify(self, context: Context, failure: Mapping[str, str]) -> None:
        """Pass a failure, as of describe_failure(), to the notifier."""
        self.notifier()({**context, "failure": failure})

    def notifier(self) -> BaseNotifier:
        """Returns the notifier; raises ConfigError for a missing class or wrong arguments."""
        name = self.entry.notifier
        module, _, attribute = name.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as err:
            raise ConfigError(
                f"notifier {name} can't be imported ({err}): correct it, or install its provider"
                " where Airflow is installed"
            ) from err
        if not (isinstance(kind, type) and issubclass(kind, BaseNotifier)):
            raise ConfigError(
                f"notifier {name} is not an Airflow notifier: name a class that extends"
                " BaseNotifier"
            )
        try:
            return kind(**self.entry.arguments)
        except Exception as err:
            raise ConfigError(
                f"notifier {name} refuses its arguments ({err}): correct them"
            ) from err


@dataclass(frozen=True, slots=True)
class NotifyTimeout:
    """An ``on_failure_callback`` of a DAG: passes it to a notifier that a run didn't end in time.

    No task of such a run has failed. Airflow calls it for every failed run, so it asks for the
    reason.
    """

    callback: NotifyOn

    def __call__(self, context: Context) -> None:
        """Notify about a run that ended by dagrun_timeout; its tasks may wait for a pool."""
        if context.get("reason") != _TIMED_OUT:
            return
        text = (
            f"the run {context.get('run_id')} did not end within its DAG's dagrun_timeout: its"
            " tasks wait for workers, or for a pool that Airflow lacks"
        )
        remedy = "run `waldelta airflow setup`, which creates missing pools"
        failure = _notification_fields(self.callback.pipeline, "TimedOut", text) | {
            "remedy": remedy
        }
        self.callback.notify(context, failure)


def failure_callbacks(path: Path, pipeline: PipelineFile) -> list[NotifyOn]:
    """Returns the callbacks of a pipeline file's tasks.

    Raises ConfigError when one of its notifiers can't be created.
    """
    callbacks = [NotifyOn(pipeline.pipeline, entry) for entry in pipeline.notify]
    for number, callback in enumerate(callbacks):
        try:
            callback.notifier()
        except ConfigError as err:
            raise ConfigError(
                f"pipeline file {path} is refused:\n  - notify[{number}]: {err}"
            ) from err
    return callbacks


def notify_critical(pipeline: PipelineFile, texts: Sequence[str], context: Context) -> None:
    """Pass a critical slot's warnings to the notifiers for SlotCritical, once an hour while it
    lasts.

    Errors of notifiers don't stop the task, because landing is what helps the slot.
    """
    kind = SlotCritical.__name__
    callbacks = [NotifyOn(pipeline.pipeline, entry) for entry in pipeline.notify]
    concerned = [callback for callback in callbacks if callback.is_for(kind)]
    if not texts or not concerned or _notified_lately(context):
        return
    failure = _notification_fields(pipeline.pipeline, kind, "\n".join(texts))
    for callback in concerned:
        with _going_on(f"notifier {callback.entry.notifier}"):
            callback.notify(context, failure)
    with _going_on("XCom"):
        context["ti"].xcom_push(_NOTIFIED_AT, datetime.now(UTC).isoformat())


def _notified_lately(context: Context) -> bool:
    with _going_on("XCom"):
        earliest = datetime.now(UTC) - settings.NOTIFY_CRITICAL_AGAIN
        times = (
            context["ti"].xcom_pull(
                task_ids=task_id, key=_NOTIFIED_AT, map_indexes=-1, include_prior_dates=True
            )
            for task_id in (IDLE_CHECK, LAND)
        )
        return any(at and datetime.fromisoformat(at) > earliest for at in times)
    return False


@contextmanager
def _going_on(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as err:
        log.error("%s failed, and the run goes on: %s", what, stack_without_values(err))


def describe_failure(pipeline: str, context: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Returns what templates see of a failure, and all classes of it.

    Templates see ``pipeline``, ``error_class``, ``message`` and ``remedy``.
    """
    error = context.get("exception")
    kinds = list(getattr(error, "kinds", ())) or [
        type(error).__name__ if isinstance(error, BaseException) else "Killed"
    ]
    # Other errors' texts may contain secrets from Spark or a driver; only in the log does Airflow
    # mask them.
    message = (
        "the error is not one of waldelta's own; the log has its message"
        if isinstance(error, BaseException)
        else "the task was killed"
    )
    if kinds[0] in ERRORS:
        message = getattr(error, "message", None) or str(error)
    return _notification_fields(pipeline, kinds[0], message), kinds


def _notification_fields(pipeline: str, kind: str, message: str) -> dict[str, str]:
    remedy = REMEDIES.get(kind, "look at the task's log")
    return {"pipeline": pipeline, "error_class": kind, "message": message, "remedy": remedy}

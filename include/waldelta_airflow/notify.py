"""Whom a failure is told to: the notifiers of a pipeline file, by the class of the error that made a task fail."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseNotifier

from waldelta.errors import ConfigError
from waldelta.failure import ERRORS, REMEDIES, is_kind
from waldelta.pipeline_file import Notification, PipelineFile

if TYPE_CHECKING:
    from airflow.sdk import Context


@dataclass(frozen=True, slots=True)
class NotifyOn:
    """An ``on_failure_callback``: hands failures of some classes to a notifier.

    Airflow calls it in the task's process once the last retry has failed, and in the DAG processor for a task that was
    killed from outside. The notifier is made anew for each failure, since it renders its templates in place.
    """

    pipeline: str
    entry: Notification

    def __call__(self, context: Context) -> None:
        """Notify when the failure is of one of the entry's classes; templates find it as ``failure``."""
        failure, kinds = describe_failure(self.pipeline, context)
        if any(is_kind(kind, of) for kind in kinds for of in self.entry.errors):
            self.notifier()({**context, "failure": failure})

    def notifier(self) -> BaseNotifier:
        """The notifier; raises ConfigError when there is no such class, or its arguments don't fit."""
        name = self.entry.notifier
        module, _, attribute = name.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as err:
            raise ConfigError(
                f"notifier {name} can't be imported ({err}): correct it, or install its provider beside Airflow"
            ) from err
        if not (isinstance(kind, type) and issubclass(kind, BaseNotifier)):
            raise ConfigError(f"notifier {name} is no notifier of Airflow's: name a class that extends BaseNotifier")
        try:
            return kind(**self.entry.arguments)
        except Exception as err:
            raise ConfigError(f"notifier {name} refuses its arguments ({err}): correct them") from err


def failure_callbacks(path: Path, pipeline: PipelineFile) -> list[NotifyOn]:
    """The callbacks of the tasks of a pipeline file; raises ConfigError when one of its notifiers can't be made."""
    callbacks = [NotifyOn(pipeline.pipeline, entry) for entry in pipeline.notify]
    for number, callback in enumerate(callbacks):
        try:
            callback.notifier()
        except ConfigError as err:
            raise ConfigError(f"pipeline file {path} is refused:\n  - notify[{number}]: {err}") from err
    return callbacks


def describe_failure(pipeline: str, context: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """What templates see of a failure (``pipeline``, ``error_class``, ``message``, ``remedy``), and all classes it is of."""
    error = context.get("exception")
    kinds = list(getattr(error, "kinds", ())) or [
        type(error).__name__ if isinstance(error, BaseException) else "Killed"
    ]
    # Texts of other errors may hold whatever Spark or a driver was given; in the log Airflow masks secrets.
    message = "it has no class of its own" if isinstance(error, BaseException) else "the task was killed"
    if kinds[0] in ERRORS:
        message = getattr(error, "message", None) or str(error)
    remedy = REMEDIES.get(kinds[0], "look at the task's log")
    return {"pipeline": pipeline, "error_class": kinds[0], "message": message, "remedy": remedy}, kinds

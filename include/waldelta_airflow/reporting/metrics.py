"""Metrics: a run's counts and the lake's lag, sent through Airflow's own channel (StatsD, Datadog,
OpenTelemetry).

Airflow's section ``[metrics]`` says where they go; without it nothing is sent.
docs/reference/metrics.md lists every name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Literal

from waldelta.errors import stack_without_values
from waldelta.pipeline.after_commit import targets_of
from waldelta.pipeline.lag import Lag

log = logging.getLogger(__name__)

# Every name with its kind and meaning, as docs/reference/metrics.md lists them.
METRICS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "waldelta.<pipeline>.lag_bytes": ("gauge", "WAL that the lake doesn't have yet"),
        "waldelta.<pipeline>.lag_seconds": (
            "gauge",
            (
                "age of the newest source commit time up to which the targets are complete;"
                " not sent while a target is behind"
            ),
        ),
        "waldelta.<pipeline>.retained_wal_bytes": (
            "gauge",
            "WAL that the server keeps for the slot",
        ),
        "waldelta.<pipeline>.differing_rows.<table>": (
            "gauge",
            ("rows that a reconciliation found to differ and did not repair, or a lower bound"),
        ),
        "waldelta.<pipeline>.<verb>.changes": ("counter", "changes that the run landed"),
        "waldelta.<pipeline>.<verb>.seconds.<stage>": (
            "gauge",
            ("duration of a stage, such as land, apply or check"),
        ),
        "waldelta.<pipeline>.<verb>.rows.<table>.<operation>": (
            "counter",
            "rows that were inserted, updated, deleted, skipped, quarantined or copied",
        ),
        "waldelta.<pipeline>.<verb>.failed_expectations": (
            "gauge",
            "critical expectations that failed in the run's check",
        ),
        "waldelta.<pipeline>.<verb>.warned_expectations": (
            "gauge",
            "expectations of severity warning that failed",
        ),
        "waldelta.<pipeline>.<verb>.store_requests": (
            "gauge",
            "requests of the run's processes to the object store, without Spark's",
        ),
        "waldelta.<pipeline>.<verb>.not_applied": ("gauge", "targets that lack landed changes"),
    }
)
# The keys of a table's result, by the names of the metrics.
_OPERATIONS = {
    **{name: name for name in ("inserted", "updated", "deleted", "skipped", "quarantined")},
    "copied": "rows",
}
# StatsD splits names at dots, and Airflow allows only these characters.
_UNFIT = re.compile(r"[^a-zA-Z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Metric:
    """One measurement; a counter's value is added to the earlier ones."""

    name: str
    value: float
    kind: Literal["gauge", "counter"] = "gauge"
    tags: Mapping[str, str] = field(default_factory=dict)


def metrics_of(pipeline: str, document: Mapping[str, Any], at: datetime) -> Iterator[Metric]:
    """Yields the metrics of a run's result document, at a time after the run.

    >>> next(metrics_of("shop", {"verb": "consume", "changes": 7}, datetime.now(UTC))).name
    'waldelta.shop.consume.changes'
    """
    verb, tags = _part(str(document.get("verb") or "run")), {"pipeline": pipeline}
    tags["verb"] = verb
    base = f"waldelta.{_part(pipeline)}"
    if "changes" in document:
        yield Metric(f"{base}.{verb}.changes", document["changes"], "counter", tags)
    yield from _lag(base, document, at, {"pipeline": pipeline})
    for stage, outcome in (document.get("stages") or {}).items():
        name = f"{base}.{verb}.seconds.{_part(stage)}"
        yield Metric(name, float(outcome.get("seconds") or 0), "gauge", {**tags, "stage": stage})
    for commit in targets_of(document):
        for operation, key in _OPERATIONS.items():
            name = f"{base}.{verb}.rows.{_part(commit.table)}.{operation}"
            of = {**tags, "table": commit.table, "operation": operation}
            yield Metric(name, commit.count(key), "counter", of)
    yield from differing_rows(pipeline, document, at)
    if requests := document.get("store_requests"):
        yield Metric(f"{base}.{verb}.store_requests", requests, "gauge", tags)
    for what in ("failed_expectations", "warned_expectations", "not_applied"):
        yield Metric(f"{base}.{verb}.{what}", len(document.get(what) or ()), "gauge", tags)


def gauges_of(pipeline: str, document: Mapping[str, Any], at: datetime) -> Iterator[Metric]:
    """Yields the metrics without counters, which would count a run twice when its report is
    retried.
    """
    return (metric for metric in metrics_of(pipeline, document, at) if metric.kind == "gauge")


def differing_rows(pipeline: str, document: Mapping[str, Any], _: datetime) -> Iterator[Metric]:
    """Yields for each compared target the rows that differ from the source and weren't repaired."""
    for table, result in (document.get("tables") or {}).items():
        if (rows := result.get("differing")) is not None:
            differing = 0 if table in (document.get("passed") or ()) else rows
            name = f"waldelta.{_part(pipeline)}.differing_rows.{_part(table)}"
            yield Metric(name, differing, "gauge", {"pipeline": pipeline, "table": table})


def _lag(
    base: str, document: Mapping[str, Any], at: datetime, tags: Mapping[str, str]
) -> Iterator[Metric]:
    slot = document.get("slot_after") or {}
    if not slot:
        return  # The run didn't reach its report, so the lag is unknown.
    yield Metric(f"{base}.lag_bytes", document.get("lag_bytes") or 0, "gauge", tags)
    if slot.get("retained_bytes") is not None:
        yield Metric(f"{base}.retained_wal_bytes", slot["retained_bytes"], "gauge", tags)
    if document.get("as_of") and not document.get("not_applied"):
        lag = Lag.since(datetime.fromisoformat(document["as_of"]), at)
        yield Metric(f"{base}.lag_seconds", lag.seconds or 0.0, "gauge", tags)


def emit(
    pipeline: str,
    document: Mapping[str, Any],
    measured: Callable[[str, Mapping[str, Any], datetime], Iterator[Metric]] = metrics_of,
) -> None:
    """Send a run's metrics; an error of the channel doesn't fail the run."""
    from waldelta_airflow._airflow_versions import stats

    try:
        channel = stats()
        for metric in measured(pipeline, document, datetime.now(UTC)):
            if metric.kind == "gauge":
                channel.gauge(metric.name, metric.value, tags=dict(metric.tags))
            elif metric.value:
                channel.incr(metric.name, int(metric.value), tags=dict(metric.tags))
    except Exception as err:
        log.warning("metrics of this run weren't sent: %s", stack_without_values(err))


def _part(name: str) -> str:
    """Returns one part of a name: ``public.flights`` becomes ``public_flights``."""
    return _UNFIT.sub("_", name)

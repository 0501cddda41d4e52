"""Compares what needs attention now with what a channel was sent: what began, lasts or ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from waldelta.monitoring.attention import Attention, shortened
from waldelta_airflow import settings

AlertState = Literal["new", "lasting", "recovered"]

# A copy that is in progress is no problem; one that was killed is started again by the next run.
# Nor is an attempt at a run that goes on.
_NO_ALERT = frozenset({"copying", "failed_attempt"})
# Airflow stores what was sent, and warns above 64 KB.
_MOST_STORED = 120


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to report; ``since`` is when the alerts saw it first."""

    state: AlertState
    attention: Attention
    since: datetime


@dataclass(frozen=True, slots=True)
class Changes:
    """What to send to a channel, and what to store as sent afterwards: JSON by kind and object."""

    alerts: tuple[Alert, ...]
    sent: dict[str, Any]


def compare(
    found: Sequence[Attention], known: frozenset[str], sent: Mapping[str, Any], at: datetime
) -> Changes:
    """Returns what a channel must be sent.

    ``known`` are the kinds that could be evaluated; alerts of the others neither begin nor end.
    """
    now: dict[str, Any] = {}
    alerts: list[Alert] = []
    for item in _merged(found):
        due: dict[AlertState, dict[str, datetime]] = {"new": {}, "lasting": {}}
        for name in item.objects or ("",):
            before = sent.get(_key(item.kind, name))
            state = _state(item, before, at)
            since = datetime.fromisoformat(before["since"]) if before else at
            if state is not None:
                due[state][name] = since
            now[_key(item.kind, name)] = {
                "since": since.isoformat(),
                "at": before["at"] if before and state is None else at.isoformat(),
                "severity": item.severity,
                "cause": item.cause,
                "text": shortened(item.only([name] if name else []).text, _MOST_STORED),
            }
        alerts += [
            Alert(state, item.only(list(filter(None, times))), min(times.values()))
            for state, times in due.items()
            if times
        ]
    alerts += _ended(
        {k: v for k, v in sent.items() if k not in now and k.partition(":")[0] in known}
    )
    unknown = {k: v for k, v in sent.items() if k not in now and k.partition(":")[0] not in known}
    return Changes(tuple(alerts), now | unknown)


def _merged(found: Sequence[Attention]) -> Iterator[Attention]:
    """Yields each kind once, unless its items are about different tables."""
    alone: dict[str, Attention] = {}
    for item in found:
        if item.kind in _NO_ALERT:
            continue
        if item.objects:
            yield item
        elif (other := alone.get(item.kind)) is None:
            alone[item.kind] = item
        else:
            worse = item if item.severity == "failed" else other
            alone[item.kind] = replace(
                other,
                severity=worse.severity,
                text=f"{other.text}; {item.text}",
                cause=",".join(filter(None, (other.cause, item.cause))),
            )
    yield from alone.values()


def _state(item: Attention, before: Mapping[str, Any] | None, at: datetime) -> AlertState | None:
    """Returns why an object of the item must be reported now; None if it was lately."""
    if (
        before is None
        or before["cause"] != item.cause
        or (item.severity == "failed" and before["severity"] != "failed")
    ):
        return "new"
    is_due = at - datetime.fromisoformat(before["at"]) >= settings.ALERT_AGAIN
    return "lasting" if is_due else None


def _key(kind: str, name: str) -> str:
    return f"{kind}:{name}"


def _ended(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[Alert]:
    """Yields an alert for each kind that ended; tables of one kind together."""
    by_kind: dict[str, dict[str, Mapping[str, Any]]] = {}
    for key, before in entries.items():
        kind, _, name = key.partition(":")
        by_kind.setdefault(kind, {})[name] = before
    for kind, of in by_kind.items():
        first, objects = next(iter(of.values())), tuple(filter(None, of))
        attention = Attention(first["severity"], kind, first["text"], objects=objects[:1])
        since = min(datetime.fromisoformat(before["since"]) for before in of.values())
        yield Alert("recovered", attention.only(objects), since)

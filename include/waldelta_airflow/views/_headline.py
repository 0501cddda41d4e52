"""The state of a pipeline in one sentence: its cause, since when, what happens next by itself, and
the one button of a person who is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import Any, get_args

from markupsafe import Markup

from waldelta.config import DagKind, dag_id_of
from waldelta.decision_kinds import WAITING_KINDS
from waldelta.error_catalog import ERROR_CATALOG, ERRORS
from waldelta.errors import QualityFailed
from waldelta.lake.ledger.decisions import FAILS
from waldelta.monitoring.attention import KINDS, Attention, names
from waldelta.monitoring.check_results import FailedExpectation
from waldelta.monitoring.overview import Glance
from waldelta.quantities import counted, first_of, size
from waldelta_airflow.views._installed_pipelines import DagState
from waldelta_airflow.views._next_steps import (
    OVERDUE,
    NextStep,
    is_lost,
    is_read,
    next_step,
    setup_steps,
)
from waldelta_airflow.views._render import duration, moment_name, run_name
from waldelta_airflow.views._situation import Situation

# Whether the state ends without a person.
HEALS = {
    "behind": "no, as long as the latest run fails",
    "copying": "yes: the next run restarts a killed copy",
    "data_gap": "no: runs fail until the slot is recreated",
    "different": "no: the rows differ until they are repaired",
    "failed_attempt": "yes: Airflow tries again",
    "failed_copy": "no: the copy fails again until its cause is corrected",
    "failed_expectations": "no: the target has these rows until the source corrects them",
    "needs_copy": "yes: the copy is automatic",
    "never_copied": "no",
    "lacks": "no: runs need it",
    "new_tables": "no",
    "paused": "no: runs start once the DAG is unpaused",
    "paused_maintenance": "no",
    "paused_reconcile": "no",
    "unchecked": "yes: the next run that changes the table checks it",
    "unpublished": "no",
}
# Why the latest run succeeded although something is the matter that waits for no decision.
_JOINTS = {
    "overdue": "it is the last run that ended",
    "paused": "it ran before the DAG was paused",
    "slot": "it read its WAL, and the server keeps it nevertheless",
}
# What shows the transactions that have written, which keep the slot's WAL, the oldest first.
_OLDEST = (
    "select pid, xact_start, state, usename, application_name, client_addr, query"
    " from pg_stat_activity where backend_xid is not null order by xact_start limit 5"
)
# What an end without a person needs, since it needs a run.
_NO_SCHEDULER = "no: no run starts until the scheduler works"
_RESTART = "restart the scheduler's service"
_WORDS = {"failed": "problem", "ok": "fine", "unknown": "not set up"}
# A remedy's path into the repository, which a page doesn't lead to.
_PATH = re.compile(r":? \(?docs/\S+")
# A remedy's DAG, which lacks the pipeline's name.
_DAG = re.compile(rf"(?<!\w)_({'|'.join(get_args(DagKind))})\b")


@dataclass(frozen=True, slots=True)
class Headline:
    """The state of a pipeline in a sentence, with its cause and what to do.

    ``since`` is when the state began, or was first seen; ``is_older``: it began earlier than that.
    ``heals`` says what ends the state without a person, ``remedy`` what a person may do, if need be
    by a ``command``. ``joint`` is why the latest run succeeded nevertheless.
    ``under_way`` are unfinished runs, ``next_run`` is what the schedule does next, and ``next_at``
    when. ``status`` replaces the state's usual word.
    """

    state: str
    sentence: str
    cause: str = ""
    since: datetime | None = None
    heals: str = ""
    remedy: str = ""
    command: str = ""
    joint: Markup | str = ""
    succeeded_at: datetime | None = None
    action: NextStep | None = None
    is_of_slot: bool = False
    is_older: bool = False
    status: str = ""
    under_way: tuple[DagState, ...] = ()
    next_run: str = ""
    next_at: datetime | None = None

    @property
    def word(self) -> str:
        """Returns the state as a word."""
        return self.status or _WORDS.get(self.state, self.state)


def read_headline(
    situation: Situation,
    failed: Sequence[FailedExpectation] = (),
    fine: str = "The lake follows its source.",
) -> Headline:
    """Returns the state by the first thing that needs attention, or that all is ``fine``;
    ``failed`` are the expectations that the tables of the first don't meet.
    """
    attention, glance = situation.attention, situation.glance
    if attention:
        headline = _by_first(situation, attention[0], failed)
    else:
        headline = Headline("ok", fine) if glance.is_set_up else _of_steps(situation)
    if attention:
        joint, latest = joint_of(glance, attention[0], situation.at), glance.latest
        headline = replace(headline, joint=joint, succeeded_at=latest.at if latest else None)
    text, at = situation.next_run()
    under_way = situation.schedule.under_way
    return replace(headline, under_way=under_way, next_run=text, next_at=at)


def _of_steps(situation: Situation) -> Headline:
    """Returns which step a pipeline that isn't set up needs next."""
    steps = list(setup_steps(situation))
    number, step = next((n, step) for n, step in enumerate(steps, 1) if step.how)
    verb = {"failed": "failed", "running": "is running"}.get(step.state, "is next")
    text = f"Step {number} of {len(steps)} {verb}: {step.dag_id} {step.does}."
    state = step.state if step.state in ("failed", "running") else "unknown"
    return Headline(
        state,
        f"Not set up yet. {text}",
        remedy=step.how,
        command=step.command,
        action=step.action,
        status="not set up",
    )


def joint_of(glance: Glance, first: Attention, at: datetime) -> Markup | str:
    """Returns what explains that the latest run succeeded although something is the matter."""
    if glance.latest_status != "succeeded":
        return ""
    if first.kind == "different" and glance.compared.different_since is not None:
        text = Markup("the reconciliation {} found the difference, which runs don't look for")
        return text.format(moment_name(glance.compared.different_since, at))
    checks = (line.check for line in glance.tables if line.table_name in first.objects)
    if first.kind == "failed_expectations" and (check := next(checks, None)) is not None:
        text = Markup("the check of the run {} found the rows")
        return text.format(run_name(check.run_id, at))
    if first.kind == "slot" and not is_read(glance):
        return ""
    if first.waiting:
        return WAITING_KINDS[first.waiting].joint
    return _JOINTS.get(first.kind, "")


def _by_first(
    situation: Situation, first: Attention, failed: Sequence[FailedExpectation]
) -> Headline:
    glance = situation.glance
    heals, remedy = heals_of(first, situation), remedy_of(situation.name, first.kind, first.cause)
    if first.kind == "copying" and situation.has_run("initial_sync", "resync"):
        return _of_copy(situation, first)
    sentence, cause, command = first.text, _written(situation, first), ""
    if first.cause and f": {first.cause}: " in first.text:
        sentence, _, cause = first.text.partition(": ")
    if first.kind == "data_gap" and glance.gaps:
        gap = glance.gaps[0]
        cause, remedy = f"{gap.cause}: {gap.detail}", gap.remedy
    if first.kind == "slot" and not first.page:
        cause, remedy, command = _wal(situation, remedy)
    if first.kind in OVERDUE:
        sentence = first.text.partition(": ")[0] if first.kind == "overdue" else first.text
        cause, heals, remedy = _overdue(situation, OVERDUE[first.kind])
    if first.waiting:
        remedy = WAITING_KINDS[first.waiting].remedy
    if first.waiting == "rows":
        count = sum(x.in_quarantine for x in glance.tables if x.table_name in first.objects)
        sentence = f"{names(first.objects)}: {counted(count, 'row')} in quarantine"
        cause = _of_reasons(situation.reasons)
    if first.kind == "failed_expectations" and failed:
        sentence, cause = failed_sentence(failed)
    if " " in sentence.partition(":")[0]:
        sentence = f"{sentence[:1].upper()}{sentence[1:]}"
    limit = situation.pipeline.slot_limits.warn_mb << 20
    since, is_older = _over(glance, limit) if first.kind == "slot" else (None, False)
    # What another program wrote, it wrote before the reconciliation that found it.
    is_older |= first.kind == "different" and bool(cause)
    return Headline(
        first.severity,
        sentence,
        cause,
        since or _since(first, situation),
        heals,
        _with_restart(heals, remedy),
        command,
        action=next_step(situation, first),
        is_of_slot=first.kind == "slot",
        is_older=is_older,
    )


def _with_restart(heals: str, remedy: str) -> str:
    """Returns what a person may do, the scheduler first where everything else waits for it."""
    if not heals.startswith(_NO_SCHEDULER) or remedy.startswith(_RESTART):
        return remedy
    return _RESTART if remedy == "nothing" else f"{_RESTART}; {remedy}"


def _of_reasons(reasons: Sequence[str]) -> str:
    """Returns why rows are in quarantine."""
    expectations = [one.removeprefix(FAILS) for one in reasons if one.startswith(FAILS)]
    if reasons and len(expectations) == len(reasons):
        return f"These rows fail the expectation: {first_of(expectations)}"
    return f"Reason: {first_of(reasons)}" if reasons else ""


def _of_copy(situation: Situation, first: Attention) -> Headline:
    """Returns the state of a copy that is under way."""
    progress = situation.progress
    seconds = progress.remaining_seconds if progress is not None else None
    ends = "the copy ends" if seconds is None else f"the copy ends in about {duration(seconds)}"
    what = _RESTART if situation.is_scheduler_down else "nothing"
    remedy = f"{what}: {dag_id_of(situation.name, 'cdc')} then applies what changed since"
    text = f"{names(first.objects)}: copy in progress"
    return Headline("running", text, heals=f"yes: {ends}", remedy=remedy)


def _written(situation: Situation, item: Attention) -> str:
    """Returns which commits of other programs explain that a target differs, as far as known."""
    if item.kind != "different" and item.waiting != "external_commit":
        return ""
    causes = causes_of(situation.attention)
    lines = [f"{table}: {causes[table]}" for table in item.objects if table in causes]
    return causes[item.objects[0]] if lines and len(item.objects) == 1 else "\n".join(lines)


def causes_of(attention: Sequence[Attention]) -> dict[str, str]:
    """Returns by table what other programs wrote to it."""
    causes: dict[str, list[str]] = {}
    for table, text in (detail for item in attention for detail in item.details):
        causes.setdefault(table, []).append(text)
    return {table: f"Another program wrote {', '.join(texts)}" for table, texts in causes.items()}


def _overdue(situation: Situation, kind: DagKind) -> tuple[str, str, str]:
    """Returns why no run of a DAG starts, what ends that without a person, and the remedy."""
    schedule, at, dag_id = situation.schedule, situation.at, dag_id_of(situation.name, kind)
    state = next((one.run_state for one in schedule.under_way if one.kind == kind), None)
    active = {None: "No run is active", "queued": "A run is queued"}
    what = active.get(state, "An earlier run is still active")
    if not schedule.is_scheduler_alive(at):
        heartbeat = "Airflow's database has no heartbeat of a scheduler"
        if schedule.scheduler_at is not None:
            silent = duration((at - schedule.scheduler_at).total_seconds())
            heartbeat = f"the scheduler's last heartbeat was {silent} ago"
        does = ", which reads everything since the last one" if kind == "cdc" else ""
        heals = f"{_NO_SCHEDULER}. It then starts the overdue run at once{does}"
        return f"{what}: {heartbeat}", heals, _RESTART
    if state is None:
        cause = f"{what}: the scheduler works, but created no run of {dag_id}"
        return cause, "no", f"look at Airflow's import errors and at the limits of {dag_id}"
    if state == "queued":
        cause = f"{what}: the slot's pool or the DAG's limit of active runs is full"
        heals = "yes: the run starts when another one ends"
        return cause, heals, "nothing, or free a place in the pool"
    heals = (
        "yes: the next run starts as soon as this one ends. No, if its process was killed: Airflow"
        " ends such a run only by its timeout"
    )
    stuck = "nothing while its task's log grows; mark the task as failed if it doesn't"
    return what, heals, stuck


def remedy_of(pipeline: str, kind: str, cause: str = "") -> str:
    """Returns what a person may do: about a run's error what the error's class says.

    >>> remedy_of("shop", "different")
    "revoke the other writer's permission, then run shop_reconcile with repair"
    """
    remedy = KINDS[kind].remedy
    if kind == "failed_run" and cause in ERROR_CATALOG:
        remedy = ERROR_CATALOG[cause].remedy
    return _DAG.sub(rf"{pipeline}_\1", _PATH.sub("", remedy).replace("*", ""))


def failed_sentence(failed: Sequence[FailedExpectation]) -> tuple[str, str]:
    """Returns the first expectation that isn't met, in words, and the others."""
    lines = [f"{one.table_name}: {one.meaning}: {_missed(one.finding)}" for one in failed]
    return lines[0], "\n".join(lines[1:])


def _missed(finding: str) -> str:
    """Returns a finding as a predicate.

    >>> _missed("1 row"), _missed("3 rows"), _missed("not met")
    ('1 row fails', '3 rows fail', 'not met')
    """
    number, _, rows = finding.partition(" ")
    return f"{number} {rows} {'fails' if rows == 'row' else 'fail'}" if "row" in rows else finding


def error_sentence(
    error: Mapping[str, Any], failed: Sequence[FailedExpectation]
) -> tuple[str, str]:
    """Returns a run's error as a sentence that stands alone, and the rest of it.

    >>> error_sentence({"class": "SlotLost", "message": "slot 's' is lost; run resync"}, ())
    ("slot 's' is lost", 'SlotLost: run resync')
    >>> error_sentence({"class": "ConfigError", "message": "2 are wrong:\\n- a: b\\n- c: d"}, ())
    ('2 are wrong: a: b', 'ConfigError: - c: d')
    """
    kind, message = str(error.get("class") or ""), str(error.get("message") or "").strip()
    critical = [one for one in failed if one.verdict == "failed"]
    if kind == QualityFailed.__name__ and critical:
        sentence, detail = failed_sentence(critical)
        lines = f"\n{detail}" if detail else ""
        return sentence, f"{kind}: {message.partition(':')[0]}{lines}"
    first, _, detail = message.partition("\n")
    if first.endswith(":") and detail:
        item, _, detail = detail.partition("\n")
        first = f"{first} {item.strip(' -')}"
    elif "; " in first:
        first, _, clause = first.partition("; ")
        detail = "\n".join(filter(None, (clause, detail)))
    return first.rstrip(":") or kind, f"{kind}: {detail.strip()}" if detail.strip() else kind


def heals_of(item: Attention, situation: Situation) -> str:
    """Returns whether a state ends without a person: "yes", "no", and why; empty if unknown."""
    if item.kind in OVERDUE:
        return _overdue(situation, OVERDUE[item.kind])[1]
    text = _by_runs(item, situation.glance)
    return unless_down(text, is_down=situation.is_scheduler_down)


def unless_down(text: str, *, is_down: bool) -> str:
    """Returns what ends a state without a person; without a scheduler no run starts that does."""
    return _NO_SCHEDULER if is_down and text.startswith(("yes", "only")) else text


def _by_runs(item: Attention, glance: Glance) -> str:
    if item.kind == "slot" and not item.page:
        ends = "once that transaction ends" if is_read(glance) else "once runs have read it"
        text = f"yes, {ends}" if _is_measured(glance) else ""
        return "no: its WAL is gone" if is_lost(glance) else text
    if item.waiting:
        return WAITING_KINDS[item.waiting].heals
    if item.kind not in ("failed_run", "failed_dag_run"):
        return HEALS.get(item.kind, "")
    return heals_of_error(item.cause, len(glance.alike))


def heals_of_error(kind: str, times: int = 1) -> str:
    """Returns whether a run's error of this class ends without a person; ``times`` is how many runs
    in a row failed by it.
    """
    again = f"it failed {counted(times, 'time')} the same way" if times > 1 else ""
    error = ERRORS.get(kind)
    if error is None:
        return f"not likely: {again}" if again else ""
    if error.retryable:
        return f"yes, once the cause is gone{f'; so far {again}' if again else ''}"
    return f"no: {again or 'the next run fails the same way'}"


def _is_measured(glance: Glance) -> bool:
    """Returns whether the latest run recorded how much WAL the slot keeps, and how much of it is
    unread.
    """
    run = glance.landing
    return run is not None and run.lag_bytes is not None and bool(run.retained_bytes)


def _wal(situation: Situation, remedy: str) -> tuple[str, str, str]:
    """Returns what keeps the slot's WAL on the server, what to do about it, and its command;
    ``remedy`` if that is unknown.
    """
    glance = situation.glance
    if is_lost(glance):
        return "", f"run {dag_id_of(situation.name, 'resync')}", ""
    if glance.landing is None or not _is_measured(glance):
        return "", remedy, ""
    unread = size(glance.landing.lag_bytes or 0)
    if not is_read(glance):
        return f"{unread} of it is unread", "run the CDC DAG, and more often than now", ""
    cause = (
        f"Only {unread} of it is unread. PostgreSQL keeps the rest, which has been read, for a"
        " transaction that is still open"
    )
    remedy = (
        "on the source's primary, find the transaction with the command, or in pg_prepared_xacts."
        " Ask its owner first: pg_terminate_backend(pid) rolls it back"
    )
    return cause, remedy, _OLDEST


def _since(item: Attention, situation: Situation) -> datetime | None:
    """Returns when the state began or was found, as far as the ledger has it."""
    glance = situation.glance
    finders: dict[str, Callable[[], datetime | None]] = {
        "behind": lambda: min(filter(None, _of(item, glance, "complete_upto")), default=None),
        "data_gap": lambda: min((gap.at for gap in glance.gaps), default=None),
        "different": lambda: glance.compared.different_since,
        "failed_run": partial(_of_failures, glance),
        "failed_expectations": partial(_of_checks, item, glance),
        "overdue": lambda: situation.schedule.next_run_at,
        "silent_run": lambda: glance.latest.at if glance.latest is not None else None,
    }
    return finders[item.kind]() if item.kind in finders else None


def _of(item: Attention, glance: Glance, field: str) -> list[datetime | None]:
    return [getattr(line, field) for line in glance.tables if line.table_name in item.objects]


def _of_checks(item: Attention, glance: Glance) -> datetime | None:
    checks = (line.check for line in glance.tables if line.table_name in item.objects)
    return min((check.at for check in checks if check is not None), default=None)


def _over(glance: Glance, limit: int) -> tuple[datetime | None, bool]:
    """Returns since when the slot has kept more WAL than its limit, and whether it did before the
    runs that the glance has.
    """
    read = [run for run in glance.runs if run.retained_bytes is not None]
    over = list(takewhile(lambda run: (run.retained_bytes or 0) > limit, read))
    return (over[-1].at if over else None), len(over) == len(read)


def _of_failures(glance: Glance) -> datetime | None:
    """Returns the first of the runs that failed without one in between that succeeded."""
    if glance.alike:
        return glance.alike[-1].at
    at = None
    for run in (run for run in glance.runs if run.verb == "consume"):
        if run.status != "failed":
            break
        at = run.at
    return at

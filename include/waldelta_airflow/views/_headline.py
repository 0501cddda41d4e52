"""The state of a pipeline in one sentence: its cause, since when, what happens next by itself, and
the one button of a person who is needed; and the steps of a pipeline that isn't set up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, takewhile
from typing import Any, NamedTuple, get_args

from markupsafe import Markup

from waldelta.config import DagKind, dag_id_of
from waldelta.decision_kinds import WAITING_KINDS
from waldelta.error_catalog import ERROR_CATALOG, ERRORS
from waldelta.errors import QualityFailed, SchemaChanged
from waldelta.lake.ledger.decisions import FAILS
from waldelta.monitoring.attention import KINDS, Attention, names
from waldelta.monitoring.check_results import FailedExpectation
from waldelta.monitoring.overview import Glance
from waldelta.quantities import counted, first_of, size
from waldelta_airflow._dag_attention import WATCHED
from waldelta_airflow.views._installed_pipelines import PIPELINE_DAGS, DagState
from waldelta_airflow.views._render import airflow_url, duration, moment_name, run_name, url
from waldelta_airflow.views._situation import Situation


class Advice(NamedTuple):
    """What pages say of a kind of attention, besides its remedy (KINDS).

    ``heals``: whether it ends without a person. ``dag`` is the DAG that its button runs, or only
    unpauses without a ``label``, where ``{}`` are the tables; without a DAG the label is a link's.
    ``joint``: why the latest run succeeded nevertheless.
    """

    heals: str = ""
    dag: DagKind | None = None
    label: str = ""
    joint: str = ""


ADVICE = {
    "behind": Advice("no, as long as the latest run fails"),
    "copied_since": Advice(dag="reconcile", label="Compare {} again"),
    "copying": Advice("yes: the next run restarts a killed copy"),
    "data_gap": Advice(
        "no: runs fail until the slot is recreated",
        "resync",
        "Recreate the slot and repair the tables",
    ),
    "different": Advice(
        "no: the rows differ until they are repaired", label="See the rows that differ"
    ),
    "drift": Advice(dag="reconcile", label="Compare {} now"),
    "failed_attempt": Advice("yes: Airflow tries again"),
    "failed_comparison": Advice(dag="reconcile", label="Compare {} again"),
    "failed_copy": Advice(
        "no: the copy fails again until its cause is corrected", "initial_sync", "Copy {} again"
    ),
    "failed_expectations": Advice(
        "no: the target has these rows until the source corrects them",
        label="See the rows that fail",
    ),
    "failed_run": Advice(label="Read the error of the run"),
    "lacks": Advice("no: runs need it"),
    "needs_copy": Advice("yes: the copy is automatic", "initial_sync"),
    "never_copied": Advice("no", "initial_sync", "Copy {}"),
    "new_tables": Advice("no", "setup", "Run setup"),
    "overdue": Advice(joint="it is the last run that ended"),
    "paused": Advice(
        "no: runs start once the DAG is unpaused", "cdc", joint="it ran before the DAG was paused"
    ),
    "paused_maintenance": Advice("no", "maintenance"),
    "paused_reconcile": Advice("no", "reconcile"),
    "slot": Advice("yes, once runs have read it", "cdc", "Read the WAL now"),
    "slot_lost": Advice("no: its WAL is gone", "resync", "Recreate the slot and repair the tables"),
    "slot_read": Advice(
        "yes, once that transaction ends",
        joint="it read its WAL, and the server keeps it nevertheless",
    ),
    "unchecked": Advice("yes: the next run that changes the table checks it"),
    "unpublished": Advice("no", "setup", "Run setup"),
}
# The DAG whose next run is overdue, by kind of attention.
_OVERDUE: dict[str, DagKind] = {"overdue": "cdc", **{f"overdue_{kind}": kind for kind in WATCHED}}
# The DAGs of a new pipeline's steps.
_STEPS: tuple[DagKind, ...] = ("setup", "initial_sync", "cdc")
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
class NextStep:
    """A button (``is_form``) or link; ``is_airflow``: it leads to one of Airflow's own pages.

    ``needs_reason``: the form asks for the reason, which is recorded.
    """

    label: str
    address: str
    is_form: bool = False
    is_airflow: bool = False
    needs_reason: bool = False


@dataclass(frozen=True, slots=True)
class Headline:
    """The state of a pipeline, or of a step of its setup, in a sentence, with its cause and what to
    do.

    ``since`` is when the state began, or was first seen; ``is_older``: it began earlier than that.
    ``heals`` says what ends the state without a person, ``remedy`` what a person may do, if need be
    by a ``command``. ``joint`` is why the latest run succeeded nevertheless. ``status`` replaces
    the state's usual word.
    """

    state: str
    sentence: str
    cause: str = ""
    since: datetime | None = None
    heals: str = ""
    remedy: str = ""
    command: str = ""
    joint: Markup | str = ""
    action: NextStep | None = None
    is_older: bool = False
    status: str = ""

    @property
    def word(self) -> str:
        return self.status or _WORDS.get(self.state, self.state)


def read_headline(
    situation: Situation,
    failed: Sequence[FailedExpectation] = (),
    fine: str = "The lake follows its source.",
) -> Headline:
    """Returns the state by the first thing that needs attention, or that all is ``fine``;
    ``failed`` are the expectations that the tables of the first don't meet.
    """
    if not situation.attention:
        return Headline("ok", fine) if situation.glance.is_set_up else _of_steps(situation)
    headline = _by_first(situation, situation.attention[0], failed)
    return replace(headline, joint=joint_of(situation))


def _of_steps(situation: Situation) -> Headline:
    steps = setup_steps(situation)
    number, kind = next((n, kind) for n, kind in enumerate(steps, 1) if steps[kind].remedy)
    step = steps[kind]
    verb = {"failed": "failed", "running": "is running"}.get(step.state)
    dag_id = dag_id_of(situation.name, kind)
    return replace(
        step,
        state=step.state if verb else "unknown",
        sentence=f"Not set up yet. Step {number} of {len(steps)} {verb or 'is next'}: {dag_id}"
        f" {step.sentence}.",
        status="not set up",
    )


def joint_of(situation: Situation) -> Markup | str:
    """Returns what explains that the latest run succeeded although something is the matter."""
    glance, first, at = situation.glance, next(iter(situation.attention), None), situation.at
    if first is None or glance.latest_status != "succeeded":
        return ""
    if first.kind == "different" and glance.compared.different_since is not None:
        text = Markup("the reconciliation {} found the difference, which runs don't look for")
        return text.format(moment_name(glance.compared.different_since, at))
    checks = (line.check for line in glance.tables if line.table_name in first.objects)
    if first.kind == "failed_expectations" and (check := next(checks, None)) is not None:
        text = Markup("the check of the run {} found the rows")
        return text.format(run_name(check.run_id, at))
    return _advice(first, glance).joint


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
    if first.kind in _OVERDUE:
        sentence = first.text.partition(": ")[0] if first.kind == "overdue" else first.text
        cause, heals, remedy = _overdue(situation, _OVERDUE[first.kind])
    if first.waiting:
        remedy = WAITING_KINDS[first.waiting].remedy
    if first.waiting == "rows":
        count = sum(x.in_quarantine for x in glance.tables if x.table_name in first.objects)
        sentence = f"{names(first.objects)}: {counted(count, 'row')} in quarantine"
        waiting = [of for table, of in situation.quarantine.items() if table in first.objects]
        cause = _of_reasons([*dict.fromkeys(chain.from_iterable(of.reasons for of in waiting))])
    if first.kind == "failed_expectations" and (unmet := _unmet(failed)):
        sentence, cause = unmet[0], "\n".join(unmet[1:])
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
        since or _since(first, situation, failed),
        heals,
        _with_restart(heals, remedy),
        command,
        action=next_step(situation, first),
        is_older=is_older,
    )


def _with_restart(heals: str, remedy: str) -> str:
    if not heals.startswith(_NO_SCHEDULER) or remedy.startswith(_RESTART):
        return remedy
    return _RESTART if remedy == "nothing" else f"{_RESTART}; {remedy}"


def _of_reasons(reasons: Sequence[str]) -> str:
    expectations = [one.removeprefix(FAILS) for one in reasons if one.startswith(FAILS)]
    if reasons and len(expectations) == len(reasons):
        return f"These rows fail the expectation: {first_of(expectations)}"
    return f"Reason: {first_of(reasons)}" if reasons else ""


def _of_copy(situation: Situation, first: Attention) -> Headline:
    progress = situation.progress
    seconds = progress.remaining_seconds if progress is not None else None
    ends = "the copy ends" if seconds is None else f"the copy ends in about {duration(seconds)}"
    what = _RESTART if situation.is_scheduler_down else "nothing"
    remedy = f"{what}: {dag_id_of(situation.name, 'cdc')} then applies what changed since"
    text = f"{names(first.objects)}: copy in progress"
    return Headline("running", text, heals=f"yes: {ends}", remedy=remedy)


def _written(situation: Situation, item: Attention) -> str:
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


def _unmet(failed: Sequence[FailedExpectation]) -> list[str]:
    critical = [one for one in failed if one.verdict == "failed"]
    return [f"{one.table_name}: {one.meaning}: {_missed(one.finding)}" for one in critical]


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
    if kind == QualityFailed.__name__ and (unmet := _unmet(failed)):
        return unmet[0], "\n".join((f"{kind}: {message.partition(':')[0]}", *unmet[1:]))
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
    if item.kind in _OVERDUE:
        return _overdue(situation, _OVERDUE[item.kind])[1]
    glance, text = situation.glance, _advice(item, situation.glance).heals
    if item.kind in ("failed_run", "failed_dag_run"):
        text = heals_of_error(item.cause, len(glance.alike))
    if item.kind == "slot" and (item.page or not (is_lost(glance) or _is_measured(glance))):
        return ""
    return unless_down(text, is_down=situation.is_scheduler_down)


def _advice(item: Attention, glance: Glance) -> Advice:
    if item.waiting:
        waiting = WAITING_KINDS[item.waiting]
        return Advice(waiting.heals, None, waiting.label, waiting.joint)
    kind = item.kind
    if kind == "slot" and (is_lost(glance) or is_read(glance)):
        kind = "slot_lost" if is_lost(glance) else "slot_read"
    return ADVICE.get(kind, Advice())


def unless_down(text: str, *, is_down: bool) -> str:
    """Returns what ends a state without a person: ``text``, or that a scheduler is missing.

    Without one (``is_down``), no run starts that would end it.
    """
    return _NO_SCHEDULER if is_down and text.startswith(("yes", "only")) else text


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
    """Returns whether the latest run recorded what the slot keeps, and how much is unread."""
    run = glance.landing
    return run is not None and run.lag_bytes is not None and bool(run.retained_bytes)


def _wal(situation: Situation, remedy: str) -> tuple[str, str, str]:
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


def _since(
    item: Attention, situation: Situation, unmet: Sequence[FailedExpectation]
) -> datetime | None:
    glance, latest = situation.glance, situation.glance.latest
    runs = (run for run in glance.runs if run.verb == "consume")
    failed = glance.alike or tuple(takewhile(lambda run: run.status == "failed", runs))
    lines = [line for line in glance.tables if line.table_name in item.objects]
    times: dict[str, list[datetime | None]] = {
        "behind": [line.complete_upto for line in lines],
        "data_gap": [gap.at for gap in glance.gaps],
        "decision": [of.since for name, of in situation.quarantine.items() if name in item.objects],
        "different": [glance.compared.different_since],
        "failed_run": [run.at for run in failed],
        "failed_expectations": [one.since for one in unmet if one.verdict == "failed"],
        "overdue": [situation.schedule.next_run_at],
        "silent_run": [latest.at if latest is not None else None],
    }
    return item.since or min(filter(None, times.get(item.kind, ())), default=None)


def _over(glance: Glance, limit: int) -> tuple[datetime | None, bool]:
    """Returns since when the slot has kept more WAL than this, and whether in all runs."""
    read = [run for run in glance.runs if run.retained_bytes is not None]
    over = list(takewhile(lambda run: (run.retained_bytes or 0) > limit, read))
    return (over[-1].at if over else None), len(over) == len(read)


def next_step(situation: Situation, item: Attention) -> NextStep | None:
    """Returns what a person presses: what ends the state, or the place where a person decides.

    None where the step is outside of Airflow.
    """
    of = _advice(item, situation.glance)
    is_automatic = item.kind == "needs_copy" and not situation.is_paused("initial_sync")
    if is_automatic or of is ADVICE["slot_read"]:
        return None
    if of.dag and not of.label:
        return _unpause(situation, of.dag) or _open(situation, of.dag)
    if step := _run(situation, item, of):
        return step
    if item.kind in _OVERDUE or item.kind in ("failed_dag_run", "silent_run"):
        return _log(situation, item)
    return _lead(situation, item, of)


def is_read(glance: Glance) -> bool:
    """Returns whether most of the WAL that the slot keeps has been read already."""
    run = glance.landing
    return run is not None and 2 * (run.lag_bytes or 0) < (run.retained_bytes or 0)


def is_lost(glance: Glance) -> bool:
    """Returns whether PostgreSQL has removed WAL that the slot needs, by the latest run."""
    return glance.landing is not None and glance.landing.wal_status == "lost"


def setup_steps(situation: Situation) -> dict[DagKind, Headline]:
    """Returns what each step of a pipeline that isn't set up does, by its DAG: those done, the next
    one with its remedy, and later ones.
    """
    steps: dict[DagKind, Headline] = {}
    blocker = ""
    for kind in _STEPS:
        dag, (verb, _, does) = situation.dag(kind), PIPELINE_DAGS[kind]
        if kind == "setup" and (situation.has_slot or (dag and dag.run_state == "success")):
            steps[kind] = Headline("passed", does, status="done")
        elif blocker:
            steps[kind] = Headline("unknown", does, status=f"after {blocker}")
        else:
            blocker, command = (
                dag_id_of(situation.name, kind),
                f"waldelta {verb} {situation.name}.yml",
            )
            steps[kind] = _next_of_steps(situation, dag, blocker, Headline("next", does), command)
    return steps


def _next_of_steps(
    situation: Situation, dag: DagState | None, dag_id: str, step: Headline, command: str
) -> Headline:
    if dag is None and any(state.dag_id == dag_id for state in situation.schedule.dags):
        return replace(step, remedy=f"ask a user who may trigger {dag_id}")
    if dag is None:
        remedy = (
            f"wait until Airflow has read {situation.name}.yml and shows the DAG {dag_id}; the"
            " command does the same without Airflow"
        )
        return replace(step, remedy=remedy, command=command)
    if dag.is_under_way:
        remedy = "nothing: the next step follows when its run ends"
        return replace(step, state="running", remedy=remedy)
    if dag.run_state == "failed":
        remedy = f"read the log of its run, correct the cause, and run {dag_id} again"
        log = replace(_open(situation, dag.kind, dag.run_id), label=f"Read the log of {dag_id}")
        return replace(step, state="failed", status="failed", remedy=remedy, action=log)
    run = "" if dag.kind == "cdc" else f"run {dag_id}"
    remedy = " and ".join(filter(None, (f"unpause {dag_id}" if dag.is_paused else "", run)))
    if dag.is_paused:
        action = _unpause(situation, dag.kind)
    else:
        action = _start(situation, dag.kind, f"Run {dag_id}")
    missing = "" if action is not None else "ask a user who may trigger it: "
    action = action or _open(situation, dag.kind)
    return replace(step, remedy=f"{missing}{remedy}", action=action)


def _run(situation: Situation, item: Attention, of: Advice) -> NextStep | None:
    error, tables = ERRORS.get(item.cause), item.objects
    if item.kind == "failed_run" and error is not None and error.retryable:
        return _start(situation, "cdc", "Try again now")
    if item.kind == "failed_run" and item.cause == SchemaChanged.__name__:
        of, tables = ADVICE["failed_copy"], _objects_of(situation, "behind")
        if not tables:
            return None
    is_written = item.waiting == "external_commit" and len(tables) == 1
    if item.kind == "different" or is_written:
        one = tables if len(tables) == 1 else ()
        return _start(situation, "reconcile", f"Repair {_tables_of(tables)}", (), "repair", *one)
    label = of.label.format(_tables_of(tables))
    return _start(situation, of.dag, label, tables if "{}" in of.label else ()) if of.dag else None


def _objects_of(situation: Situation, kind: str) -> tuple[str, ...]:
    return next((item.objects for item in situation.attention if item.kind == kind), ())


def _tables_of(tables: Sequence[str]) -> str:
    return tables[0] if len(tables) == 1 else counted(len(tables), "table")


def _log(situation: Situation, item: Attention) -> NextStep | None:
    kind, run_id = _OVERDUE.get(item.kind, "cdc"), situation.schedule.failed
    if item.kind in _OVERDUE:
        if not situation.schedule.is_scheduler_alive(situation.at):
            return None
        runs = (dag.run_id for dag in situation.schedule.under_way if dag.kind == kind)
        run_id = next(runs, None)
    elif item.page:
        run_id = item.page[-1]
    return _open(situation, kind, run_id)


def _lead(situation: Situation, item: Attention, of: Advice) -> NextStep | None:
    page = item.page
    anchor = WAITING_KINDS[item.waiting].anchor if item.waiting else item.anchor
    if item.kind.endswith("_expectations") and len(item.objects) == 1:
        page, anchor = ("table", *item.objects), "failed"
    if not page:
        return None
    label = "" if of.dag else of.label.format(_tables_of(item.objects))
    label = label or ("Read the run" if page[0] == "run" else f"See {page[0]}")
    address = url(situation.base, "p", situation.name, *page)
    return NextStep(label, address + (f"#{anchor}" if anchor else ""))


def _open(situation: Situation, kind: DagKind, run_id: str | None = None) -> NextStep:
    dag_id = dag_id_of(situation.name, kind)
    label = "Read the log of the run" if run_id else f"Open {dag_id} in Airflow"
    run = ("runs", run_id) if run_id else ()
    return NextStep(label, airflow_url(situation.base, "dags", dag_id, *run), is_airflow=True)


def _unpause(situation: Situation, kind: DagKind) -> NextStep | None:
    dag = situation.dag(kind)
    if dag is None or not dag.may_unpause:
        return None
    address = url(situation.base, "p", situation.name, "dags", kind, "unpause")
    return NextStep(f"Unpause {dag.dag_id}", address, is_form=True)


def _start(
    situation: Situation, kind: DagKind, label: str, tables: Sequence[str] = (), *page: str
) -> NextStep | None:
    dag = situation.dag(kind)
    if dag is None or not dag.may_trigger or dag.is_under_way:
        return None
    if dag.is_paused:
        return _unpause(situation, kind)
    query = {"table": tables} if tables else {}
    page = page or ("dags", kind, "run")
    address = url(situation.base, "p", situation.name, *page, **query)
    return NextStep(label, address, is_form=True, needs_reason=kind == "resync")

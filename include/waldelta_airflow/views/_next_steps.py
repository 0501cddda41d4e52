"""The one button of a page: what a person presses to end a state; and the steps of a pipeline that
isn't set up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from waldelta.config import DagKind, dag_id_of
from waldelta.decision_kinds import WAITING_KINDS
from waldelta.error_catalog import ERRORS
from waldelta.errors import SchemaChanged
from waldelta.monitoring.attention import Attention
from waldelta.monitoring.overview import Glance
from waldelta.quantities import counted
from waldelta_airflow._dag_attention import WATCHED
from waldelta_airflow.views._access import DagLine
from waldelta_airflow.views._installed_pipelines import DagState, dag_of_verb
from waldelta_airflow.views._render import airflow_url, url
from waldelta_airflow.views._situation import Situation

# What a button starts, by kind of attention, and its label; ``{}`` are the tables concerned.
_RUNS: dict[str, tuple[DagKind, str]] = {
    "copied_since": ("reconcile", "Compare {} again"),
    "data_gap": ("resync", "Recreate the slot and repair the tables"),
    "drift": ("reconcile", "Compare {} now"),
    "failed_comparison": ("reconcile", "Compare {} again"),
    "failed_copy": ("initial_sync", "Copy {} again"),
    "never_copied": ("initial_sync", "Copy {}"),
    "new_tables": ("setup", "Run setup"),
    "slot": ("cdc", "Read the WAL now"),
    "unpublished": ("setup", "Run setup"),
}
_UNPAUSES: dict[str, DagKind] = {
    "needs_copy": "initial_sync",
    "paused": "cdc",
    "paused_maintenance": "maintenance",
    "paused_reconcile": "reconcile",
}
# The DAG whose next run is overdue, by kind of attention.
OVERDUE: dict[str, DagKind] = {"overdue": "cdc", **{f"overdue_{kind}": kind for kind in WATCHED}}


_LINKS = {
    "different": "See the rows that differ",
    "failed_expectations": "See the rows that fail",
    "failed_run": "Read the error of the run",
}
# The steps of a new pipeline, and the command that does the same.
_STEPS: dict[DagKind, tuple[str, str]] = {
    "setup": ("checks the source, and creates publications and the slot", "setup"),
    "initial_sync": ("copies the tables into the lake", "sync"),
    "cdc": ("brings changes by its schedule", "consume"),
}


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
class SetupStep:
    """A step before changes flow: its DAG, what that does, and its state as a class and a word.

    The next step has ``how`` it is done, with a button or a ``command``; others have none.
    """

    dag_id: str
    does: str
    state: str
    word: str
    how: str = ""
    action: NextStep | None = None
    command: str = ""


def next_step(situation: Situation, item: Attention) -> NextStep | None:
    """Returns what a person presses: what ends the state, or the place where a person decides.

    None where the step is outside of Airflow.
    """
    if item.kind == "slot" and is_lost(situation.glance):
        item = replace(item, kind="data_gap")
    is_automatic = item.kind == "needs_copy" and not situation.is_paused("initial_sync")
    if is_automatic or (item.kind == "slot" and is_read(situation.glance)):
        return None
    if kind := _UNPAUSES.get(item.kind):
        return _unpause(situation, kind) or _open(situation, kind)
    if step := _repair(situation, item) or _run(situation, item):
        return step
    if item.kind in OVERDUE:
        return _open_overdue(situation, OVERDUE[item.kind])
    if item.kind in ("failed_dag_run", "silent_run"):
        return _open_run(situation, item)
    return _lead(situation, item)


def is_read(glance: Glance) -> bool:
    """Returns whether most of the WAL that the slot keeps has been read already."""
    run = glance.landing
    return run is not None and 2 * (run.lag_bytes or 0) < (run.retained_bytes or 0)


def is_lost(glance: Glance) -> bool:
    """Returns whether PostgreSQL has removed WAL that the slot needs, by the latest run."""
    return glance.landing is not None and glance.landing.wal_status == "lost"


def setup_steps(situation: Situation) -> Iterator[SetupStep]:
    """Yields the steps of a pipeline that isn't set up: those done, the next one, later ones."""
    blocker = ""
    for kind, (does, verb) in _STEPS.items():
        dag_id, line = dag_id_of(situation.name, kind), situation.line(kind)
        state = line.state if line is not None else DagState(kind, dag_id)
        is_done = kind == "setup" and (situation.has_slot or state.run_state == "success")
        if is_done:
            yield SetupStep(dag_id, does, "passed", "done")
        elif blocker:
            yield SetupStep(dag_id, does, "unknown", f"after {blocker}")
        else:
            command = f"waldelta {verb} {situation.name}.yml"
            yield _next_of_steps(situation, line, SetupStep(dag_id, does, "next", "next"), command)
        blocker = blocker or ("" if is_done else dag_id)


def _next_of_steps(
    situation: Situation, line: DagLine | None, step: SetupStep, command: str
) -> SetupStep:
    dag_id, name = step.dag_id, situation.name
    if line is None and any(state.dag_id == dag_id for state in situation.schedule.dags):
        return replace(step, how=f"ask a user who may trigger {dag_id}")
    if line is None:
        how = (
            f"wait until Airflow has read {name}.yml and shows the DAG {dag_id}; the command does"
            " the same without Airflow"
        )
        return replace(step, how=how, command=command)
    state, kind = line.state, line.state.kind
    if state.is_under_way:
        how = "nothing: the next step follows when its run ends"
        return replace(step, state="running", word="running", how=how)
    if state.run_state == "failed":
        how = f"read the log of its run, correct the cause, and run {dag_id} again"
        address = airflow_url(situation.base, "dags", dag_id, "runs", state.run_id or "")
        log = NextStep(f"Read the log of {dag_id}", address, is_airflow=True)
        return replace(step, state="failed", word="failed", how=how, action=log)
    run = "" if kind == "cdc" else f"run {dag_id}"
    how = " and ".join(filter(None, (f"unpause {dag_id}" if state.is_paused else "", run)))
    action = (
        _unpause(situation, kind) if state.is_paused else _start(situation, kind, f"Run {dag_id}")
    )
    missing = "" if action is not None else "ask a user who may trigger it: "
    return replace(step, how=f"{missing}{how}", action=action or _open(situation, kind))


def _repair(situation: Situation, item: Attention) -> NextStep | None:
    """Returns the button that compares tables that may differ again, and repairs them."""
    is_written = item.waiting == "external_commit" and len(item.objects) == 1
    if item.kind != "different" and not is_written:
        return None
    step = _start(situation, "reconcile", f"Repair {_tables_of(item)}")
    if step is None or not step.address.endswith("/run"):
        return step
    one = item.objects if len(item.objects) == 1 else ()
    return replace(step, address=url(situation.base, "p", situation.name, "repair", *one))


def _run(situation: Situation, item: Attention) -> NextStep | None:
    """Returns the button that starts the run that ends a state."""
    error = ERRORS.get(item.cause)
    if item.kind == "failed_run" and error is not None and error.retryable:
        return _start(situation, "cdc", "Try again now")
    if item.kind == "failed_run" and item.cause == SchemaChanged.__name__:
        late = next((one for one in situation.attention if one.kind == "behind"), None)
        if late is None:
            return None
        label = f"Copy {_tables_of(late)} again"
        return _start(situation, "initial_sync", label, late.objects)
    if item.kind not in _RUNS:
        return None
    kind, label = _RUNS[item.kind]
    tables = item.objects if "{}" in label else ()
    return _start(situation, kind, label.format(_tables_of(item)), tables)


def _tables_of(item: Attention) -> str:
    tables = item.objects
    return tables[0] if len(tables) == 1 else counted(len(tables), "table")


def _open_run(situation: Situation, item: Attention) -> NextStep | None:
    """Returns the link to the log of a run that failed, or that is silent."""
    run_id, verb = situation.schedule.failed, "consume"
    if item.page[:1] == ("run",):
        _, verb, run_id = item.page
    dag_id = dag_of_verb(situation.name, verb)
    return _log(situation, dag_id, run_id) if run_id is not None and dag_id is not None else None


def _open_overdue(situation: Situation, kind: DagKind) -> NextStep | None:
    """Returns the link to the run that keeps the next one waiting, or to their DAG."""
    if not situation.schedule.is_scheduler_alive(situation.at):
        return None
    runs = (state for state in situation.schedule.under_way if state.kind == kind)
    run_id = next((state.run_id for state in runs), None)
    dag_id = dag_id_of(situation.name, kind)
    return _log(situation, dag_id, run_id) if run_id is not None else _open(situation, kind)


def _log(situation: Situation, dag_id: str, run_id: str) -> NextStep:
    address = airflow_url(situation.base, "dags", dag_id, "runs", run_id)
    return NextStep("Read the log of the run", address, is_airflow=True)


def _lead(situation: Situation, item: Attention) -> NextStep | None:
    """Returns the link to the place where a person sees or decides what is the matter."""
    page, anchor = item.page, item.anchor
    if item.kind.endswith("_expectations") and len(item.objects) == 1:
        page, anchor = ("table", *item.objects), "failed"
    label = _LINKS.get(item.kind, "")
    if item.waiting:
        kind = WAITING_KINDS[item.waiting]
        label, anchor = kind.label.format(_tables_of(item)), kind.anchor
    if not page:
        return None
    label = label or ("Read the run" if page[0] == "run" else f"See {page[0]}")
    address = url(situation.base, "p", situation.name, *page)
    return NextStep(label, address + (f"#{anchor}" if anchor else ""))


def _open(situation: Situation, kind: DagKind) -> NextStep:
    """Returns the link to a DAG in Airflow, for a reader who may not do more."""
    dag_id = dag_id_of(situation.name, kind)
    address = airflow_url(situation.base, "dags", dag_id)
    return NextStep(f"Open {dag_id} in Airflow", address, is_airflow=True)


def _unpause(situation: Situation, kind: DagKind) -> NextStep | None:
    """Returns the button that unpauses a DAG, if the reader may."""
    line = situation.line(kind)
    if line is None or not line.may_unpause:
        return None
    address = url(situation.base, "p", situation.name, "dags", kind, "unpause")
    return NextStep(f"Unpause {line.state.dag_id}", address, is_form=True)


def _start(
    situation: Situation, kind: DagKind, label: str, tables: Sequence[str] = ()
) -> NextStep | None:
    """Returns the button that starts a DAG, for these tables or all, or that unpauses it first."""
    line = situation.line(kind)
    if line is None or not line.may_trigger or line.state.is_under_way:
        return None
    if line.state.is_paused:
        return _unpause(situation, kind)
    query = {"table": tables} if tables else {}
    address = url(situation.base, "p", situation.name, "dags", kind, "run", **query)
    return NextStep(label, address, is_form=True, needs_reason=kind == "resync")

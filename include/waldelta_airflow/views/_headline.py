"""The state of a pipeline in one sentence: its cause, since when, what happens next by itself, and
the one button of a person who is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from waldelta.config import DagKind, dag_id_of
from waldelta.lake.ledger import Reconciliation
from waldelta.monitoring.attention import KINDS, Attention, names
from waldelta.monitoring.overview import Glance
from waldelta_airflow.views._access import DagLine
from waldelta_airflow.views._render import airflow_url, url

# What starts when its button is pressed, by kind of attention.
_RUNS: dict[str, DagKind] = {
    "copied_since": "reconcile",
    "drift": "reconcile",
    "failed_comparison": "reconcile",
    "never_copied": "initial_sync",
    "new_tables": "setup",
    "overdue": "cdc",
    "slot": "cdc",
    "unpublished": "setup",
}
_UNPAUSES: dict[str, DagKind] = {
    "paused": "cdc",
    "paused_maintenance": "maintenance",
    "paused_reconcile": "reconcile",
}
# A link of their own instead of the name of the page.
_LINKS = {
    "decision": "Decide",
    "different": "See the rows and repair them",
    "failed_expectations": "See what failed",
    "failed_run": "See the error",
}
_RUN_WORDS: dict[DagKind, str] = {
    "cdc": "Run now",
    "initial_sync": "Copy the tables",
    "reconcile": "Compare now",
    "setup": "Run setup",
}
_COPY = ("initial_sync", "resync")
# What the next run does about it.
_THEN = {
    "behind": "which tries again",
    "data_gap": "which fails again until the slot is recreated",
    "failed_dag_run": "which tries again",
    "failed_run": "which tries again",
    "unchecked": "which checks its own changes",
}
# A remedy's path into the repository, which a page doesn't lead to.
_PATH = re.compile(r":? docs/\S+")


@dataclass(frozen=True, slots=True)
class NextStep:
    """A button (``is_form``) or link."""

    label: str
    address: str
    is_form: bool = False


@dataclass(frozen=True, slots=True)
class Headline:
    """``since`` is when the state began, or was found. ``then`` is what the next run does about it
    by itself, ``remedy`` what a person may do.
    """

    state: str
    sentence: str
    cause: str = ""
    since: datetime | None = None
    then: str = ""
    remedy: str = ""
    action: NextStep | None = None


def read_headline(
    base: str,
    name: str,
    glance: Glance,
    lines: Sequence[DagLine],
    attention: Sequence[Attention],
) -> Headline:
    """Returns the state by the first thing that needs attention; ``lines`` are the DAGs that the
    reader sees.
    """
    if not attention:
        if glance.is_set_up:
            return Headline("ok", "The lake follows its source.")
        return Headline(
            "unknown", "No table has been copied yet.", action=_start(base, name, "setup", lines)
        )
    first = attention[0]
    if first.kind == "copying" and any(
        line.state.kind in _COPY and line.state.is_under_way for line in lines
    ):
        return Headline("running", f"{names(first.objects)}: copy in progress")
    sentence, cause = first.text, ""
    if first.cause and f": {first.cause}: " in first.text:
        sentence, _, cause = first.text.partition(": ")
    return Headline(
        first.severity,
        f"{sentence[:1].upper()}{sentence[1:]}" if " " in sentence.partition(":")[0] else sentence,
        cause,
        _since(first, glance),
        _THEN.get(first.kind, ""),
        _PATH.sub("", KINDS[first.kind].remedy).replace("*", ""),
        _action(base, name, first, lines),
    )


def _action(base: str, name: str, item: Attention, lines: Sequence[DagLine]) -> NextStep | None:
    if kind := _UNPAUSES.get(item.kind):
        may = any(line.state.kind == kind and line.may_unpause for line in lines)
        address = url(base, "p", name, "dags", kind, "unpause")
        return NextStep(f"Unpause {dag_id_of(name, kind)}", address, True) if may else None
    if (kind := _RUNS.get(item.kind)) and (start := _start(base, name, kind, lines)):
        return start
    if item.kind == "data_gap":
        return NextStep("Open the resync DAG", airflow_url(base, "dags", dag_id_of(name, "resync")))
    page = item.page
    if item.kind.endswith("_expectations") and len(item.objects) == 1:
        page = ("table", *item.objects)
    if not page:
        return None
    word = _LINKS.get(item.kind, "Open the run" if page[0] == "run" else f"Open {page[0]}")
    return NextStep(word, url(base, "p", name, *page) + (f"#{item.anchor}" if item.anchor else ""))


def _start(base: str, name: str, kind: DagKind, lines: Sequence[DagLine]) -> NextStep | None:
    """Returns the button that starts a DAG, if it would start now."""
    may = any(
        line.state.kind == kind
        and line.may_run
        and not (line.state.is_paused or line.state.is_under_way)
        for line in lines
    )
    return (
        NextStep(_RUN_WORDS[kind], url(base, "p", name, "dags", kind, "run"), True) if may else None
    )


def _since(item: Attention, glance: Glance) -> datetime | None:
    """Returns when the state began or was found, as far as the ledger has it."""
    finders: dict[str, Callable[[], datetime | None]] = {
        "behind": lambda: min(filter(None, _of(item, glance, "complete_upto")), default=None),
        "data_gap": lambda: min((gap.at for gap in glance.gaps), default=None),
        "different": partial(_of_answers, item, glance),
        "failed_run": partial(_of_failures, glance),
        "failed_expectations": partial(_of_checks, item, glance),
        "paused": lambda: glance.upto,
    }
    return finders[item.kind]() if item.kind in finders else None


def _of(item: Attention, glance: Glance, field: str) -> list[datetime | None]:
    return [getattr(line, field) for line in glance.tables if line.table_name in item.objects]


def _of_checks(item: Attention, glance: Glance) -> datetime | None:
    checks = (line.check for line in glance.tables if line.table_name in item.objects)
    return min((check.at for check in checks if check is not None), default=None)


def _of_answers(item: Attention, glance: Glance) -> datetime | None:
    answers: list[Reconciliation | None] = [glance.compared.answers.get(n) for n in item.objects]
    return min((answer.at for answer in answers if answer is not None), default=None)


def _of_failures(glance: Glance) -> datetime | None:
    """Returns the first of the runs that failed without one in between that succeeded."""
    at = None
    for run in (run for run in glance.runs if run.verb == "consume"):
        if run.status != "failed":
            break
        at = run.at
    return at

"""Content of each page: reads the lake, and passes plain values to a template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import chain
from typing import Any

import pyarrow.compute as pc
from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from waldelta.config import PipelineFile
from waldelta.error_catalog import ERROR_CATALOG
from waldelta.errors import QualityFailed
from waldelta.lake.ledger import DIFFERENT, SYNCED, WAITING, Ledger, Reconciliation, last_rows, now
from waldelta.lake.ledger.check_records import Reconciliations, last_answers
from waldelta.lake.ledger.records import rows_of
from waldelta.monitoring.attention import IN_DOUBT, Attention, concerning, worst_first
from waldelta.monitoring.check_results import (
    FailedExpectation,
    HeatMap,
    HeatRow,
    expectations_map,
    missed_earlier,
    read_failed,
    tables_map,
)
from waldelta.monitoring.decisions import read_decided, read_quarantine
from waldelta.monitoring.overview import (
    LAST_DAY,
    OVERVIEW_AT_ONCE,
    REACH,
    AirflowRuns,
    Glance,
    Scope,
    read_glance,
)
from waldelta.monitoring.run_details import (
    CopyProgress,
    RunDetails,
    read_progress,
    read_run,
    read_work,
)
from waldelta.monitoring.run_history import (
    LANDING,
    lag_points,
    lines_of,
    next_success,
    read_runs,
    scan_runs,
)
from waldelta.monitoring.status import slot_forecast, wal_per_hour
from waldelta.monitoring.stopped_tables import read_failures
from waldelta.monitoring.table_history import read_comparisons, table_events
from waldelta.monitoring.table_list import (
    TableLine,
    read_rows_by_run,
    read_table_details,
    replicated_tables,
)
from waldelta.pipeline.drift.type_change import TypeChange
from waldelta.postgres.publication_checks import listed
from waldelta.stages.check.reports.docs_store import DocsStore
from waldelta.stages.check.reports.entries import CheckedRun, ReportEntry, checked_runs
from waldelta.stages.check.reports.page import parts, table_index
from waldelta_airflow._connections import pipeline_lake
from waldelta_airflow._dag_attention import of_dags, schedule_of
from waldelta_airflow.views._access import (
    READ_ERRORS,
    PageRequestDep,
    PipelineDep,
    PipelineRequest,
    reason,
)
from waldelta_airflow.views._headline import (
    ADVICE,
    Headline,
    NextStep,
    causes_of,
    error_sentence,
    heals_of,
    heals_of_error,
    next_step,
    read_headline,
    remedy_of,
    setup_steps,
    unless_down,
)
from waldelta_airflow.views._installed_pipelines import (
    PIPELINE_DAGS,
    RUN_NOW,
    DagRunTasks,
    Schedule,
    dag_of_verb,
    read_consumers,
    read_dag_run,
    read_schedules,
)
from waldelta_airflow.views._pictures import lag_chart, row_bars, run_bars, wal_chart
from waldelta_airflow.views._render import duration, render, run_name, url
from waldelta_airflow.views._situation import Situation

routes = APIRouter()

HOURS = (24, 168)
# Used in addresses where only the run's id is known.
ANY_VERB = "any"
_RUNS_PER_PAGE = 50
_TABLES_PER_PAGE = 100
_REPORTS_PER_PAGE = 30
_HEAT_MAP_RUNS = 30
_RUNS_OF_TABLE = 50
_COMPARED_PER_PAGE = 50
_ROWS_SHOWN = 100
# How far back the lists of runs and of reconciliations go.
_HISTORY_SHOWN = timedelta(days=30)


def attention_of(
    pipeline: PipelineFile,
    glance: Glance,
    schedule: Schedule,
    at: datetime,
    table: str | None = None,
) -> tuple[Attention, ...]:
    """Returns what needs attention, problems first.

    A run whose check failed is left out where failed expectations are listed, which say more. On
    the page of one ``table`` it is always left out, because that run has applied its changes.
    """
    items = (*schedule.lacks, *of_dags(pipeline, glance, schedule, at), *glance.attention)
    if table is not None or any(item.kind == "failed_expectations" for item in items):
        of_check = ("failed_run", QualityFailed.__name__)
        items = tuple(item for item in items if (item.kind, item.cause) != of_check)
    return worst_first(items)


@routes.get("/p/{name}")
def pipeline_page(request: PipelineDep, hours: int = 24, page: int = 1) -> str:
    """Returns one pipeline's page: its state, runs, lag, slot, a page of its tables, and its DAGs
    with the reader's permissions.
    """
    hours = hours if hours in HOURS else HOURS[0]
    situation = read_situation(request, Scope(hours))
    at, glance, schedule = situation.at, situation.glance, situation.schedule
    forecast = slot_forecast(request.pipeline, request.ledger, glance)
    until = at if situation.is_late else None
    unmet = (item.objects for item in situation.attention[:1] if item.kind == "failed_expectations")
    failed = [one for tables in unmet for one in read_failed(request.ledger, tables)]
    return request.render(
        "pipeline.html",
        situation=situation,
        headline=read_headline(situation, failed),
        steps={} if glance.is_set_up else setup_steps(situation),
        turn=Turning.of(page, glance.tables, _TABLES_PER_PAGE),
        forecast=forecast,
        consumers=list(filter(request.reader.may_read_dag, read_consumers(situation.name))),
        wal_rate=wal_per_hour(glance.runs),
        bars_of_runs=run_bars(glance.recent),
        lag=lag_chart(glance.lag, glance.upto, until),
        wal=wal_chart(glance.runs, forecast, until),
        is_under_way=bool(schedule.under_way),
        run_now=RUN_NOW,
        pipeline_dags=PIPELINE_DAGS,
        schedule_of=schedule_of,
        hours=hours,
        choices=HOURS,
    )


def read_schedule(pipeline: PipelineFile) -> Schedule:
    """Returns what Airflow knows of a pipeline's DAGs; nothing of those that it lacks (yet)."""
    return read_schedules([pipeline]).get(pipeline.pipeline, Schedule())


def read_situation(request: PipelineRequest, scope: Scope = LAST_DAY) -> Situation:
    """Returns a pipeline now, or one table of it."""
    at, pipeline, ledger = now(), request.pipeline, request.ledger
    schedule = read_schedule(pipeline)
    airflow = AirflowRuns(schedule.idle_checked_at, schedule.active)
    glance = read_glance(pipeline, ledger, at, scope, airflow)
    attention = attention_of(pipeline, glance, schedule, at, scope.table)
    first = (attention if scope.table is None else concerning(scope.table, attention))[:1]
    in_quarantine = [item.objects for item in first if item.waiting == "rows"]
    return Situation(
        request.base,
        pipeline,
        glance,
        schedule,
        request.reader.dags(schedule.dags),
        at,
        attention,
        _progress(pipeline, ledger, schedule, at),
        glance.is_set_up
        or any(
            event.event not in ("creating", "dropped")
            for event in ledger.slot_events(pipeline.source.slot)[-1:]
        ),
        read_quarantine(ledger, [*chain.from_iterable(in_quarantine)]),
    )


def _progress(
    pipeline: PipelineFile, ledger: Ledger, schedule: Schedule, at: datetime
) -> CopyProgress | None:
    for state in schedule.under_way:
        if state.kind in ("initial_sync", "resync") and state.run_id and state.run_at:
            tables = {str(table) for _, table in listed(pipeline.source)}
            seconds = (at - state.run_at).total_seconds()
            return read_progress(ledger, state.run_id, seconds, tables)
    return None


@routes.get("/p/{name}/runs")
def runs_page(request: PipelineDep, page: int = 1, *, failed: bool = False) -> str:
    """Returns the page of the runs of the last 30 days, newest first, and their lag."""
    at, ledger, schedule = now(), request.ledger, read_schedule(request.pipeline)
    runs = scan_runs(ledger, at - _HISTORY_SHOWN)
    failures = runs.filter(pc.field("status") == "failed")
    turn = Turning.of(page, failures if failed else runs, _RUNS_PER_PAGE)
    turn = replace(turn, rows=lines_of(turn.rows))
    return request.render(
        "runs.html",
        at,
        work=read_work(ledger, turn.rows),
        turn=turn,
        only_failed=failed,
        failures=failures.num_rows,
        lag=lag_chart(lag_points(runs)),
        active=schedule.active,
        is_under_way=bool(schedule.under_way),
    )


@routes.get("/p/{name}/run/{verb}/{run_id:path}")
def run_page(request: PipelineDep, verb: str, run_id: str) -> HTMLResponse:
    """Returns a run's page by verb and id; 404 if the ledger doesn't know it.

    For ANY_VERB it shows the newest result. It has keys of rows only for readers who may see
    values.
    """
    if verb == ANY_VERB:
        verb = next((run.verb for run in read_runs(request.ledger, run_id=run_id)), "consume")
    details = read_run(request.ledger, verb, run_id)
    dag_id, dag_run = dag_of_verb(request.pipeline.pipeline, verb), None
    if dag_id is not None and request.reader.may_read_dag(dag_id):
        dag_run = read_dag_run(dag_id, run_id)
    text = request.render(
        "run_unknown.html" if details is None else "run.html",
        here="runs",
        verb=verb,
        run_id=run_id,
        run=details,
        headline=None if details is None else _headline_of_run(request, details, dag_run),
        reports=reports_of(request.pipeline, run_id) if details is not None else {},
        dag_id=dag_id,
        dag_run=dag_run,
        is_under_way=dag_run is not None and dag_run.is_under_way,
        LANDING=LANDING,
        WAITING=WAITING,
    )
    return HTMLResponse(text, 404 if details is None else 200)


def _headline_of_run(
    request: PipelineRequest, details: RunDetails, dag_run: DagRunTasks | None
) -> Headline:
    line, kind, name = details.line, details.error.get("class") or "", request.pipeline.pipeline
    sentence, cause = f"{details.work or 'Nothing to do'} in {duration(line.seconds)}", ""
    if details.error:
        sentence, cause = error_sentence(details.error, details.failed)
    if line.status != "failed":
        state = "ok" if line.status == "succeeded" else "running"
        return Headline(state, sentence, cause, status=line.status)
    if dag_run is not None and dag_run.is_under_way:
        return Headline("running", sentence, cause, status="retrying")
    remedy = remedy_of(name, "failed_run", kind) if kind in ERROR_CATALOG else ""
    heals: Markup | str
    since = None
    if details.failed and kind == QualityFailed.__name__:
        since = _failing_since(request.ledger, details.failed)
        heals, remedy = "yes: a later check found them to be met", "nothing"
        if since is not None:
            heals = ADVICE["failed_expectations"].heals
            remedy = remedy_of(name, "failed_expectations")
    elif (later := next_success(request.ledger, line)) is not None:
        heals = Markup("yes: a later run succeeded, {}").format(run_name(later, now()))
    else:
        is_down = read_schedule(request.pipeline).is_scheduler_down(now())
        heals = unless_down(heals_of_error(kind), is_down=is_down)
    action = NextStep("See the rows", "#failed") if details.failed else None
    return Headline("failed", sentence, cause, since, heals, remedy, action=action, status="failed")


def _failing_since(ledger: Ledger, failed: Sequence[FailedExpectation]) -> datetime | None:
    """Returns since when the first of a run's critical expectations fails, if it still does."""
    critical = {(one.table_name, one.meaning) for one in failed if one.verdict == "failed"}
    lasting = read_failed(ledger, {table for table, _ in critical})
    times = [one.since for one in lasting if (one.table_name, one.meaning) in critical]
    return min(times, default=None)


def consuming_verb(ledger: Ledger, run_id: str) -> str:
    """Returns the verb of a run of the CDC DAG: consume or replay."""
    verbs = (run.verb for run in read_runs(ledger, run_id=run_id))
    return next((verb for verb in verbs if verb in ("consume", "replay")), "consume")


@routes.get("/p/{name}/expectations")
def expectations_page(request: PipelineDep) -> str:
    """Returns the page of checks: tables by runs."""
    at, ledger = now(), request.ledger
    heat = tables_map(ledger, at, _HEAT_MAP_RUNS)
    earlier = missed_earlier(ledger, heat, at - REACH, replicated_tables(ledger))
    return request.render("expectations.html", at, heat=heat, earlier=earlier)


@routes.get("/p/{name}/reconciliation")
def reconciliation_page(
    request: PipelineDep,
    page: int = 1,
    earlier: int = 1,
    run: str | None = None,
    refused: str | None = None,
) -> str:
    """Returns the page of each table's last comparison, differing tables first.

    It also shows the errors of later attempts, and all results of 30 days. Both lists have pages.
    """
    dag = request.action_dag("reconcile", run, refused)
    situation, reconciliations = read_situation(request), Reconciliations(request.ledger.lake)
    at, glance = situation.at, situation.glance
    tables = {line.table_name for line in glance.tables}
    results = reconciliations.scan()
    last = rows_of(Reconciliation, last_rows(results, ("table_name", "status")))
    answers, attempts = last_answers(row for row in last if row.table_name in tables)
    order = sorted(answers.values(), key=lambda row: (row.status != DIFFERENT, row.table_name))
    turn = Turning.of(page, order, _COMPARED_PER_PAGE)
    in_full = reconciliations.in_full({row.table_name: row for row in turn.rows})
    latest = [in_full[row.table_name] for row in turn.rows if row.table_name in in_full]
    shown_results = results.filter(pc.field("at") >= at - _HISTORY_SHOWN)
    history = Turning.of(earlier, shown_results[::-1], _COMPARED_PER_PAGE)
    return request.render(
        "reconciliation.html",
        situation=situation,
        turn=turn,
        latest=latest,
        attempts=attempts,
        causes=causes_of(situation.attention),
        outdated={one.table_name for one in glance.tables if situation.of_table(one).is_stale},
        attention=[
            item
            for item in situation.attention
            if not item.objects and replace(situation, attention=[item]).is_stale
        ],
        different=[row for row in order if row.status == DIFFERENT],
        history=replace(history, rows=rows_of(Reconciliation, history.rows)),
        dag=dag,
        is_under_way=dag.is_under_way,
        rows_shown=_ROWS_SHOWN,
    )


@routes.get("/p/{name}/table/{table:path}")
def table_page(request: PipelineDep, table: str) -> HTMLResponse:
    """Returns one table's page; 404 if the ledger doesn't know it.

    It shows what the target has of its source, its columns with their expectations, its runs and
    what happened to it.
    """
    pipeline, ledger = request.pipeline, request.ledger
    situation = read_situation(request, Scope(table=table))
    at, glance, states = situation.at, situation.glance, ledger.table_rows(table)
    heat = expectations_map(ledger, table, at, _HEAT_MAP_RUNS)
    compared = read_comparisons(ledger, table)
    runs = read_rows_by_run(ledger, table, at - REACH, _RUNS_OF_TABLE)
    decisions = read_decided(ledger, table)
    line = next((line for line in glance.tables if line.table_name == table), None)
    details = read_table_details(ledger, table, line)
    beside, others = _by_column(
        heat, [column.name for column in details.columns] if details else ()
    )
    check = line.check if line is not None else None
    failed = read_failed(ledger, [table]) if check is None else check.unmet
    of_table = concerning(table, situation.attention)
    situation = situation.of_table(line) if line else replace(situation, attention=of_table)
    headline = _headline_of_table(situation, ledger, line, failed)
    texts = (headline.sentence, headline.cause, *(item.text for item in situation.attention))
    text = request.render(
        "table.html",
        situation=situation,
        retyped={change.column: change for change in TypeChange.find("\n".join(texts))},
        here="pipeline",
        table=table,
        states=states,
        line=line,
        heat=heat,
        beside=beside,
        others=others,
        details=details,
        compared=compared[-1] if compared else None,
        runs=runs,
        bars_of_rows=row_bars(runs),
        events=table_events(states, decisions, compared),
        failed=failed,
        reports=reports_of(pipeline, failed[0].run_id) if failed else {},
        headline=headline,
        is_in_doubt=any(item.kind in IN_DOUBT for item in situation.attention),
    )
    return HTMLResponse(text, 200 if states else 404)


def _headline_of_table(
    situation: Situation,
    ledger: Ledger,
    line: TableLine | None,
    failed: Sequence[FailedExpectation],
) -> Headline:
    attention = situation.attention
    why = (line.reason if line is not None and line.status != SYNCED else None) or ""
    if not attention and (line is None or line.status != SYNCED):
        return Headline("unknown", "The table is not replicated.", why, status="not replicated")
    headline = read_headline(situation, failed, "The target follows its source.")
    is_behind = bool(attention) and attention[0].kind == "behind"
    failure = _failure(ledger, situation.glance, line.table_name) if line and is_behind else None
    if failure is None:
        return replace(headline, cause=headline.cause or why)
    cause, run_id = failure
    error, page = cause.partition(":")[0], ("run", ANY_VERB, run_id)
    item = replace(attention[0], kind="failed_run", cause=error, page=page, anchor="")
    remedy, action = remedy_of(situation.name, item.kind, error), next_step(situation, item)
    heals = heals_of(item, situation) or headline.heals
    return replace(headline, cause=cause, heals=heals, remedy=remedy, action=action)


def _failure(ledger: Ledger, glance: Glance, table: str) -> tuple[str, str] | None:
    if error := read_failures(ledger).get(table):
        return f"{error['class']}: {error['message']}", str(error["run_id"])
    for item in glance.attention:
        if item.kind in ("failed_run", "failed_attempt"):
            return item.text.partition(": ")[2] or item.text, item.page[-1]
    return None


def _by_column(
    heat: HeatMap, columns: Sequence[str]
) -> tuple[dict[str, list[HeatRow]], list[HeatRow]]:
    """Returns a table's expectations by the column that their words name, and all others."""
    beside: dict[str, list[HeatRow]] = {}
    others = []
    # A wide table has a million pairs of both, few of which need an expression.
    words = {name: re.compile(rf"(?<!\w){re.escape(name)}(?!\w)") for name in columns}
    for row in heat.rows:
        named = [name for name, word in words.items() if name in row[0] and word.search(row[0])]
        if len(named) == 1:
            beside.setdefault(named[0], []).append(row)
        else:
            others.append(row)
    return beside, others


@routes.get("/docs/")
def reports_page(request: PageRequestDep, page: int = 1, *, failed: bool = False) -> str:
    """Returns the page of runs with Data Docs of all pipelines, newest first."""
    pipelines = request.pipelines().values()
    files = [pipeline for pipeline in pipelines if isinstance(pipeline, PipelineFile)]
    with ThreadPoolExecutor(OVERVIEW_AT_ONCE) as pool:
        reports = zip(files, pool.map(_reports_or_reason, files), strict=True)
        answers = {file.pipeline: answer for file, answer in reports}
    return _reports_page(request.base, answers, page, only_failed=failed)


@routes.get("/docs/{name}/")
@routes.get("/docs/{name}/index.html")
def pipeline_reports_page(request: PipelineDep, page: int = 1, *, failed: bool = False) -> str:
    """Returns that page of one pipeline, by table too; raises the errors of its lake's store."""
    name = request.pipeline.pipeline
    answers = {name: read_reports(request.pipeline)}
    return _reports_page(request.base, answers, page, only_failed=failed, name=name)


def _reports_page(
    base: str,
    answers: Mapping[str, list[CheckedRun] | str],
    number: int,
    *,
    only_failed: bool,
    **name: Any,
) -> str:
    """Returns the page of these pipelines' reports, or of why they weren't read; one of a pipeline
    has its ``name``.
    """
    runs = {of: answer for of, answer in answers.items() if not isinstance(answer, str)}
    checked = sorted(chain.from_iterable(runs.values()), key=lambda run: run.at, reverse=True)
    listed = [run for run in checked if run.verdict == "failed"] if only_failed else checked
    turn, link = Turning.of(number, listed, _REPORTS_PER_PAGE), partial(_report_url, base)
    return render(
        "reports.html",
        base,
        here="reports" if name else "docs",
        answers=answers,
        runs=runs,
        tables=table_index(checked, link) if name and checked else "",
        table=parts.run_table(turn.rows, link) if turn.rows else "",
        turn=turn,
        only_failed=only_failed,
        **name,
    )


def _report_url(base: str, entry: ReportEntry) -> str:
    return url(base, "docs", entry.pipeline, *entry.page.split("/"))


def _reports_or_reason(pipeline: PipelineFile) -> list[CheckedRun] | str:
    """Returns a pipeline's reports, or why the lake's store doesn't give them.

    An error of one lake must not hide the reports of others.
    """
    try:
        return read_reports(pipeline)
    except READ_ERRORS as err:
        return reason(err, pipeline)


@dataclass(frozen=True, slots=True)
class Turning:
    """A page of a long list of ``count`` entries, with the ``rows`` of it; pages count from 1."""

    number: int
    last: int
    count: int
    rows: Any

    @classmethod
    def of(cls, number: int, rows: Any, per_page: int) -> Turning:
        """Returns the requested page of a sequence or an Arrow table, or the nearest one."""
        last = max(1, -(-len(rows) // per_page))
        number = min(max(1, number), last)
        return cls(number, last, len(rows), rows[(number - 1) * per_page : number * per_page])


def read_reports(pipeline: PipelineFile, run_id: str | None = None) -> list[CheckedRun]:
    """Returns the runs with reports, newest first, or only those with this id.

    Raises the errors of the store that the lake is in.
    """
    entries = DocsStore(pipeline, pipeline_lake(pipeline)).read_entries(run_id)
    # A folder may serve several pipelines; links contain the pipeline.
    return checked_runs(entry for entry in entries if entry.pipeline == pipeline.pipeline)


def reports_of(pipeline: PipelineFile, run_id: str) -> dict[str, ReportEntry]:
    """Returns a run's latest report of each table; for a retried check its last result."""
    entries = [entry for run in read_reports(pipeline, run_id) for entry in run.entries]
    return {entry.table: entry for entry in reversed(entries)}

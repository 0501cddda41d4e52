"""The command line: one verb on one pipeline file; started by people, Airflow's tasks and
spark-submit.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from waldelta.cli._options import (
    LISTS,
    VERBS,
    check_values,
    completion_script,
    job_options,
    parse,
    run_options,
)
from waldelta.cli._output import (
    Output,
    plan_document,
    plan_text,
    terminal,
    waiting_details,
    waiting_table,
)
from waldelta.config import load_pipeline_file
from waldelta.config.airflow_connection import take_from_airflow
from waldelta.config.pipeline_folder import pipeline_paths
from waldelta.control_characters import as_one_entry
from waldelta.errors import ConfigError, PreflightFailed, WaldeltaError, stack_without_values
from waldelta.jobs import Pipeline
from waldelta.lake.log_copy import remove_copies
from waldelta.pipeline import RunResult, StageResult, describe_error, waiting_for_locks
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.task_errors import last_error
from waldelta.quantities import counted
from waldelta.spark.settings import log_level
from waldelta.stages.repair.replay.interval import REPLAY

if TYPE_CHECKING:
    from waldelta.stages.setup.setup import SetupPlan

log = logging.getLogger("waldelta")

# The exit code of a rehearsal that finds what --fail-on names; an error has another.
_FINDINGS = 3


def run_and_exit(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the process's verb, and exit at once with its code when everything is written.

    Arrow's threads call back into Python, because delta-rs gives it a file system written in
    Python. If one needs the interpreter during shutdown, pthread_exit ends it inside C++, which
    aborts the process after a correct result: "terminate called without an active exception"
    (apache/arrow#45017, delta-io/delta-rs#2184). By now sessions, locks and connections are closed,
    so skipping the shutdown is safe.
    """
    try:
        code = main(arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as err:
        sys.stderr.write(f"{as_one_entry(stack_without_values(err))}\n")
        code = 1
    remove_copies()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # The reader has closed the stream.
            stream.flush()
    os._exit(code)


def run_submitted(*verb: str) -> NoReturn:
    """Run as the application of spark-submit: a launcher's own verb, or that of the arguments."""
    os.environ.setdefault("WALDELTA_LAUNCHER", "SPARK_SUBMIT")
    run_and_exit([*verb, *sys.argv[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns its exit code. A named error's message is the last line of the log."""
    options = parse(arguments)
    output = Output(as_json=getattr(options, "json", False))
    _log_to_stderr()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Airflow ends a task with SIGTERM: exit normally, so that locks and sessions are released.
    signal.signal(signal.SIGTERM, _leave)
    try:
        _set_log_levels()
        check_values(options)
        if (verb := _WITHOUT_FILE.get(options.verb)) is not None:
            code = verb(options, output)
        else:
            _check_rich()
            pipeline = Pipeline.load(options.file)
            if getattr(options, "result", None) is None:  # Airflow's tasks give jobs theirs.
                take_from_airflow(pipeline.file.conn_ids)
            code = waiting_for_locks(
                options.lock_wait_s, partial(_verb(options), pipeline, options, output)
            )
        output.close()
    except WaldeltaError as err:
        _end_with(err, options, output)
        return 1
    except KeyboardInterrupt:
        log.error("interrupted: what was committed stays, and the next run goes on from there")
        return 130
    except Exception as err:
        if (error := last_error(err)) is None:
            raise
        _end_with(error, options, output)
        return 1
    return code or 0


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("great_expectations").setLevel(logging.WARNING)


def _set_log_levels() -> None:
    """Raises ConfigError for a level that logging doesn't have."""
    level = log_level()
    logging.getLogger("waldelta").setLevel(level)
    if level != "DEBUG":
        # A lost JVM is a named error. Py4J logs a stack trace for each call that finds the JVM
        # gone, some by the root logger.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(lambda record: "/py4j/" not in record.pathname)


def _end_with(err: WaldeltaError, options: argparse.Namespace, output: Output) -> None:
    _log_last(err)
    output.fail(describe_error(err))
    output.close()
    _write_result(options, err)


def _check_rich() -> None:
    """Raise ConfigError where the package that prints results isn't installed.

    Airflow brings it. Elsewhere a run would only miss it at its end.
    """
    if importlib.util.find_spec("rich") is None:
        raise ConfigError("the command line needs package rich: run `pip install 'waldelta[cli]'`")


def _init(options: argparse.Namespace, output: Output) -> None:
    from waldelta.cli.init import run_init

    run_init(options, output)


def _jars(options: argparse.Namespace, output: Output) -> None:
    from waldelta.spark.jars import fetch_jars
    from waldelta.spark.settings import jars_folder

    folder = options.folder or jars_folder()
    fetch_jars(folder, options.stores)
    output.show({"folder": str(folder)}, str(folder))


def _connect_server(options: argparse.Namespace, _: Output) -> None:
    from waldelta.spark.connect_server import run_connect_server

    run_connect_server(options.port)


def _list(options: argparse.Namespace, output: Output) -> int:
    from waldelta.cli._status_table import list_pipelines

    _check_rich()
    return int(list_pipelines(options.folder, output))


def _doctor(options: argparse.Namespace, output: Output) -> int:
    from waldelta.cli.doctor import examine

    return int(examine(options.pipeline, output, workers=options.workers))


def _rehearse(options: argparse.Namespace, output: Output) -> int:
    from waldelta.cli.rehearse import run_rehearse

    _check_rich()
    return _FINDINGS if run_rehearse(options, output) else 0


def _completion(options: argparse.Namespace, _: Output) -> None:
    sys.stdout.write(completion_script(options.shell))


def _airflow(options: argparse.Namespace, output: Output) -> int:
    if importlib.util.find_spec("airflow") is None:
        raise ConfigError(
            "Airflow isn't installed for this Python: run the command where Airflow's scheduler"
            " runs, or run `pip install 'waldelta[airflow]'`"
        )
    _check_rich()
    # Airflow sets up its own logging when it is loaded: on stdout, where only the result belongs.
    with redirect_stdout(sys.stderr):
        # This package doesn't import waldelta_airflow, which is loaded by its name as a plugin is.
        setup = importlib.import_module("waldelta_airflow.airflow_entries")
        document, text = setup.set_up_airflow(
            options.place, dry_run=options.dry_run, adds_connections=options.add_connections
        )
    output.show(document, text)
    entries = (*document["pools"], *document["connections"])
    is_complete = not any(entry["state"] == "missing" for entry in entries)
    return 0 if is_complete and not document["refused"] else 1


# Each verb returns the process's exit code; None is 0.
_WITHOUT_FILE: Mapping[str, Callable[[argparse.Namespace, Output], int | None]] = MappingProxyType(
    {
        "init": _init,
        "jars": _jars,
        "connect-server": _connect_server,
        "list": _list,
        "doctor": _doctor,
        "rehearse": _rehearse,
        "airflow": _airflow,
        "completion": _completion,
    }
)
_Verb = Callable[[Pipeline, argparse.Namespace, Output], int | None]


def _verb(options: argparse.Namespace) -> _Verb:
    if options.verb == "decide" and options.action in LISTS:
        return _show_waiting
    verbs: dict[str, _Verb] = {
        "check": _check,
        "setup": _setup,
        "status": _status,
        "dbt-sources": _dbt_sources,
        "teardown": _teardown,
    }
    return verbs.get(options.verb, _spark_verb)


def _check(pipeline: Pipeline, options: argparse.Namespace, output: Output) -> int:
    plan = _show_plan(pipeline, options, output)
    try:
        plan.require()
    except PreflightFailed as err:
        # The plan has just listed the problems.
        log.error("PreflightFailed: %s, listed above", counted(len(err.problems), "problem"))
        output.fail(describe_error(err))
        _write_result(options, err)
        return 1
    return 0


def _setup(pipeline: Pipeline, options: argparse.Namespace, output: Output) -> None:
    if options.dry_run or options.sql:
        _show_plan(pipeline, options, output)
        return
    plan = pipeline.setup(options.run_id, expected=options.expect)
    output.show(plan_document(pipeline.file, plan), plan_text(plan))
    _write_result(options, plan.describe())


def _show_plan(pipeline: Pipeline, options: argparse.Namespace, output: Output) -> SetupPlan:
    plan = pipeline.check(estimate=not options.sql)
    if options.sql:
        plan.require_for_dba()
        # Problems that the SQL solves are left out; a DBA also grants what the pipeline's own role
        # lacks.
        for finding in plan.reported(for_dba=True):
            log.warning("%s", finding)
    text = plan.as_sql() if options.sql else plan.describe()
    output.show(plan_document(pipeline.file, plan), text if options.sql else plan_text(plan))
    _write_result(options, text)
    return plan


def _status(pipeline: Pipeline, options: argparse.Namespace, output: Output) -> None:
    from waldelta.cli._status_table import slot_error, status_table

    status = pipeline.status()
    output.show(status, status_table(status, str(options.file)))
    if (err := slot_error(status)) is not None:
        raise err
    _write_result(options, json.dumps(status, indent=2))


def _show_waiting(pipeline: Pipeline, options: argparse.Namespace, output: Output) -> None:
    items = [
        one
        for one in pipeline.waiting(options.tables)
        if not options.ids or one.get("id") in options.ids
    ]
    text = waiting_table if options.action == "list" else waiting_details
    output.show(items, text(items, str(options.file)))
    _write_result(options, json.dumps(items, indent=2, ensure_ascii=False))


def _dbt_sources(pipeline: Pipeline, _: argparse.Namespace, output: Output) -> None:
    document = pipeline.dbt_sources()
    output.show({"sources.yml": document}, document.rstrip("\n"))


def _teardown(pipeline: Pipeline, options: argparse.Namespace, output: Output) -> None:
    if options.orphans or options.drop:
        # A file that can't be read may name any slot, so it is an error.
        files = pipeline_paths(options.file.absolute().parent)
        slots = [load_pipeline_file(path).source.slot for path in files]
        lines, nothing = (
            pipeline.slots_without_pipeline(slots, options.drop or ()),
            "no slot on the source is without a pipeline file",
        )
        key = "dropped" if options.drop else "slots_without_pipeline"
    else:
        lines, key = pipeline.teardown(options.run_id), "dropped"
        nothing = "nothing to drop: this pipeline made neither slot nor publications"
    text = "\n".join(lines) or nothing
    output.show({"pipeline": pipeline.file.pipeline, key: lines}, text)
    _write_result(options, text)


def _spark_verb(pipeline: Pipeline, options: argparse.Namespace, output: Output) -> int:
    from waldelta.pipeline.targets.lifecycle import check_names
    from waldelta.spark import open_runner

    job = pipeline.job(**run_options(options))
    if options.tables:
        check_names(job, options.tables)
    if options.verb == REPLAY:
        job = replace(job, run_type="backfill")
    name = f"waldelta {options.verb} {pipeline.file.pipeline}"
    # The report reads PostgreSQL and the ledger. With `runner: spark`, a session would cost more
    # than the report does.
    of_job = None if options.stages == ["report"] else job
    module, _, function = VERBS[options.verb].job.partition(":")
    run_job = getattr(importlib.import_module(f"waldelta.jobs.{module}"), function)
    with open_runner(name, of_job, _session_key(pipeline, options)) as runner:
        cause: BaseException | None = None
        try:
            result = run_job(runner, job, **job_options(options))
        except RunFailed as failed:
            result, cause = failed.result, failed.__cause__
    show_run(output, result, options.stages[0] if options.stages else None)
    if options.result is not None:
        result.write(options.result)
    if cause is None:
        return 0
    _log_last(cause)
    output.fail(describe_error(cause))
    return 1


def show_run(output: Output, result: RunResult, stage: str | None = None) -> None:
    """Print a run's summary, of its one ``stage`` if it ran only that."""
    if output.as_json:
        judged = {"expectations": result.expectations()} if result.verb == "validate" else {}
        output.show(result.document() | judged, "")
    else:
        from waldelta.cli._run_summary import print_summary

        print_summary(result, terminal(), stage)


def _session_key(pipeline: Pipeline, options: argparse.Namespace) -> str:
    """Returns the key of a session that may exist only once: a stage of a verb on a slot.

    Several replays may run at once.
    """
    stages = ",".join(options.stages or ["all"])
    replays = options.verb == REPLAY or (
        options.verb == "consume" and options.run_type == "backfill"
    )
    verb = f"{REPLAY}:{options.run_id}" if replays else options.verb
    return f"waldelta:{pipeline.file.target.root}:{pipeline.file.source.slot}:{verb}:{stages}"


def _write_result(options: argparse.Namespace, end: str | WaldeltaError) -> None:
    """Write the result of a verb without stages: the text that it printed, or its error."""
    if options.result is None:
        return
    run_id, verb = options.run_id or "", options.verb
    if isinstance(end, str):
        result = RunResult(verb, run_id, "succeeded", {verb: StageResult("succeeded", 0.0, end)})
    else:
        result = RunResult(verb, run_id, "failed", error=describe_error(end))
    result.write(options.result)


class _Formatter(logging.Formatter):
    """Writes the stack of an error without values of rows, unless the log's level is DEBUG;
    control characters as escapes; and lines after the first one indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        return as_one_entry(super().format(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        if ei[1] is None or log.isEnabledFor(logging.DEBUG):
            return super().formatException(ei)
        return stack_without_values(ei[1])


def _log_last(err: BaseException) -> None:
    """Log the error that ends the process as the last line, with its stack trace at debug level.

    WALDELTA_LOG_LEVEL sets the level.
    """
    log.debug("stack trace of the error:", exc_info=err)
    described = describe_error(err)
    log.error("%s: %s", described["class"], described["message"])


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(143)

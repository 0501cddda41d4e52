"""The checks of ``doctor`` for one pipeline: source, lake, slot, and its entries in Airflow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from waldelta.cli._installation_checks import CHECK_TIMEOUT_S, Check, CheckResult
from waldelta.config.airflow_connection import is_airflow_configured, is_airflow_installed
from waldelta.quantities import size

if TYPE_CHECKING:
    from waldelta.jobs import Pipeline

# The stores whose jars `waldelta jars` fetches, each into a folder of this name.
_WITH_JARS: Final = ("s3", "azure")
# These would only repeat that the source can't be reached.
NEEDS_SOURCE: Final = frozenset({"preflight", "slot"})


def pipeline_checks(pipeline: Pipeline, path: Path) -> dict[str, Check]:
    """Returns the checks by their names, in the order in which they are shown."""
    return {
        "source": partial(_source, pipeline),
        "preflight": partial(_preflight, pipeline),
        "lake": partial(_lake, pipeline),
        "slot": partial(_slot, pipeline, path),
        "airflow": partial(_airflow, path),
    }


def _source(pipeline: Pipeline) -> Iterator[CheckResult]:
    from waldelta.postgres import describe
    from waldelta.stages.setup.facts.source_facts import read_server

    job = pipeline.job()
    with (
        job.source.connect("doctor") as connection,
        job.source.connect_slot("doctor", connection) as slot_connection,
    ):
        server = read_server(connection)
        slots = server if slot_connection is connection else read_server(slot_connection)
    role = server.role + (" (superuser)" if server.superuser else "")
    can = "may" if server.can_replicate else "may not"
    yield CheckResult(
        "source",
        "ok",
        f"{describe(job.source.conninfo)}: PostgreSQL {server.settings['server_version']},"
        f" wal_level {server.settings['wal_level']}; max_replication_slots"
        f" {slots.number('max_replication_slots')}, of which {slots.used_slots} used; role {role}"
        f" {can} use them",
    )


def _preflight(pipeline: Pipeline) -> Iterator[CheckResult]:
    from waldelta.stages.check.judge_suites import judge_names
    from waldelta.stages.setup.setup import Judges, plan_setup

    job = pipeline.job()
    with job.source.connect("doctor") as connection:
        plan = plan_setup(connection, job, Judges(judge_suite=judge_names))
    for finding in plan.reported():
        yield CheckResult("preflight", finding.severity, finding.text)
    if not plan.findings:
        yield CheckResult("preflight", "ok", "setup would be accepted")


def _lake(pipeline: Pipeline) -> Iterator[CheckResult]:
    from waldelta.errors import TargetNotWritable
    from waldelta.lake.ledger import Ledger
    from waldelta.lake.storage import local_path, why_not_writable
    from waldelta.lake.write_errors import named_write_errors
    from waldelta.pipeline.job import lake_of
    from waldelta.stages.setup.preflight.store_probe import probe_commits

    target, root = pipeline.file.target, pipeline.file.target.root
    # Reads the lake without the source's connection.
    lake = lake_of(pipeline.file)
    with named_write_errors(root):
        Ledger(lake).slot_lives()
    if local_path(root) is not None:
        if (why := why_not_writable(root)) is not None:
            raise TargetNotWritable(why)
    else:
        with probe_commits(target, lake):
            pass
        yield from _store_jars(root)
    yield CheckResult("lake", "ok", f"{root} can be read and written")


def _store_jars(root: str) -> Iterator[CheckResult]:
    from waldelta.lake.store_connection import store_of
    from waldelta.spark.settings import jars_folder

    name = store_of(root)
    if name in _WITH_JARS and "SPARK_REMOTE" not in os.environ:
        folder = jars_folder() / name
        if not folder.is_dir():
            text = f"{folder} is missing: a local Spark can't reach {root}"
            yield CheckResult("lake", "warning", text, f"run `waldelta jars --stores {name}`")


def _slot(pipeline: Pipeline, path: Path) -> Iterator[CheckResult]:
    from waldelta.cli._status_table import slot_error
    from waldelta.pipeline.job import ledger_of

    if not ledger_of(pipeline.file).slot_lives():
        text = f"slot {pipeline.file.source.slot} was never set up for this lake"
        yield CheckResult("slot", "warning", text, f"run `waldelta setup {path}`")
        return
    status = pipeline.status()
    slot = status["slot"]
    if (err := slot_error(status)) is not None:
        raise err
    yield from _of_slot(slot)
    for gap in status["gaps"]:
        yield CheckResult("slot", "problem", f"data gap: {gap['cause']}", str(gap["remedy"]))


def _of_slot(slot: dict[str, Any]) -> Iterator[CheckResult]:
    use = "a run reads it now" if slot["active"] else "no run reads it now"
    left = slot["safe_wal_size"]
    limit = "no limit" if left is None else f"{size(left)} left before PostgreSQL may drop it"
    text = f"slot {slot['name']}: {slot['wal_status']}, {use}; keeps {size(slot['retained_bytes'])}"
    yield CheckResult("slot", "ok", f"{text} of WAL, {limit}")
    for warning in slot["warnings"]:
        is_critical = warning.startswith("critical: ")
        yield CheckResult("slot", "problem" if is_critical else "warning", warning)


def _airflow(path: Path) -> Iterator[CheckResult]:
    if not is_airflow_installed():
        yield CheckResult("airflow", "ok", "not checked: this Python has no Airflow")
        return
    if not is_airflow_configured():
        text = "not checked: Airflow is installed, but its folder isn't known here"
        yield CheckResult(
            "airflow", "warning", text, "set AIRFLOW_HOME as Airflow's scheduler has it"
        )
        return
    # Airflow takes seconds to load, and its settings change the whole process.
    command = [sys.executable, "-P", "-m", "waldelta", "airflow", "setup", str(path)]
    remedy = f"run `waldelta airflow setup {path} --dry-run`"
    try:
        done = subprocess.run(
            [*command, "--dry-run", "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=CHECK_TIMEOUT_S - 1,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        yield CheckResult("airflow", "warning", "Airflow's database did not answer", remedy)
        return
    except ValueError:
        yield CheckResult("airflow", "warning", "Airflow gave no answer", remedy)
        return
    if (error := answer.get("error")) is not None:
        text = f"{error['class']}: {error['message']}"
        yield CheckResult("airflow", "warning", text, error["remedy"])
        return
    yield from entries_of(answer)


def entries_of(answer: dict[str, Any]) -> Iterator[CheckResult]:
    """Yields a result for each entry in the answer of ``waldelta airflow setup``."""
    for entry in (*answer["pools"], *answer["connections"]):
        kind = "pool" if "pool" in entry else "connection"
        text = f"{kind} {entry[kind]}: {entry['state']}"
        if entry["state"] == "missing":
            yield CheckResult("airflow", "problem", text, f"run `{entry['command']}`")
        else:
            yield CheckResult("airflow", "ok", text)

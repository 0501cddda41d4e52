"""``doctor``: what an installation, and a pipeline, lack, and what to do about it.

Each check has a time limit, and never shows a stack trace. This module imports no other package:
the checks of the installation also run where one is missing or broken.
"""

from __future__ import annotations

import difflib
import json
import os
import platform
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from waldelta.cli._output import Output, styled
from waldelta.config.airflow_connection import (
    is_airflow_configured,
    is_airflow_installed,
    take_from_airflow,
)
from waldelta.error_catalog import REMEDIES
from waldelta.errors import ConfigError, WaldeltaError
from waldelta.quantities import counted, size

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from waldelta.jobs import Pipeline

_NAME: Final = "waldelta"
# An extra counts as installed where this package is.
_EXTRAS: Final = {"airflow": "apache-airflow", "spark": "pyspark", "cli": "rich"}
# Spark's own tests run with these.
_TESTED_JAVA: Final = (17, 21)
_VARIABLES: Final = frozenset(
    f"WALDELTA_{name}"
    for name in (
        "ALERTS", "ALLOWED_VARIABLES", "DRIVER_MEMORY", "FAULT_SOCKET", "FORK_SERVER", "JARS",
        "LAUNCHER", "LOG_LEVEL", "MASTER", "PIPELINES", "RETRY_DELAY", "UMASK", "UNENCRYPTED_SPARK",
    )
)  # fmt: skip
_REMOTE_TIMEOUT_S: Final = 8.0
CHECK_TIMEOUT_S = 10.0
# A cluster may first have to start executors.
_SESSION_TIMEOUT_S = 300.0
# These would only repeat that the source can't be reached.
NEEDS_SOURCE: Final = frozenset({"preflight", "slot"})

CheckStatus = Literal["ok", "warning", "problem"]
# By status: the mark, the mark where the terminal can't print it, and the colour.
_MARKS: Mapping[CheckStatus, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "warning": ("⚠", "warning", "yellow"),
    "problem": ("✗", "problem", "bold red"),
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found; ``remedy`` says what to do, where the text doesn't."""

    check: str
    status: CheckStatus
    text: str
    remedy: str = ""


Check = Callable[[], Iterable[CheckResult]]


def examine(path: Path | None, output: Output, *, workers: bool) -> bool:
    """Run the checks of the installation, a pipeline, and Spark's ``workers``; returns whether one
    is a problem.
    """
    results = _results(installation_checks())
    if workers:
        results += run_check("workers", check_workers, _SESSION_TIMEOUT_S)
    if path is not None:
        results += _of_pipeline(path)
    count = Counter(one.status for one in results)
    document = {
        "checks": [asdict(one) for one in results],
        "problems": count["problem"],
        "warnings": count["warning"],
    }
    output.show(document, as_text(results))
    return count["problem"] > 0


def _results(checks: Mapping[str, Check]) -> list[CheckResult]:
    return [one for name, check in checks.items() for one in run_check(name, check)]


def _of_pipeline(path: Path) -> list[CheckResult]:
    try:
        from waldelta.jobs import Pipeline

        pipeline = Pipeline.load(path)
        take_from_airflow(pipeline.file.conn_ids, CHECK_TIMEOUT_S)
    except WaldeltaError as err:
        return [problem_of("file", err)]
    loaded = CheckResult("file", "ok", f"pipeline {pipeline.file.pipeline} in {path}")
    checks = pipeline_checks(pipeline, path)
    source = run_check("source", checks.pop("source"))
    if any(one.status == "problem" for one in source):
        checks = {name: check for name, check in checks.items() if name not in NEEDS_SOURCE}
    return [loaded, *source, *_results(checks)]


def as_text(results: Iterable[CheckResult]) -> str:
    """Returns a line for each result, with its remedy below it, and how many need attention."""
    lines, count = [], Counter(one.status for one in results)
    for one in results:
        lines.append(f"{_mark(one.status)} {one.check}: {_indent(one.text)}")
        if one.remedy and one.status != "ok":
            lines.append(f"    {_indent(one.remedy)}")
    lines.append(f"{counted(count['problem'], 'problem')}, {counted(count['warning'], 'warning')}")
    return "\n".join(lines)


def _mark(status: CheckStatus) -> str:
    mark, plain, colour = _MARKS[status]
    is_utf = (sys.stdout.encoding or "ascii").lower().startswith("utf")
    return styled(mark if is_utf else plain, colour)


def _indent(text: str) -> str:
    return text.replace("\n", "\n    ")


def explain_import_error(err: ImportError) -> None:
    """Print which package is missing or broken, in place of a stack trace."""
    sys.stderr.write(f"waldelta can't start: {type(err).__name__}: {err}\n")
    sys.stderr.write(as_text(run_check("packages", check_packages)) + "\n")


def run_check(name: str, check: Check, timeout_s: float = CHECK_TIMEOUT_S) -> list[CheckResult]:
    """Run a check; an error becomes a problem, and so does a check that takes too long.

    A check that takes too long is left to its thread, which ends with the process.
    """
    results: list[CheckResult] = []
    thread = threading.Thread(target=_collect, args=(name, check, results), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not thread.is_alive():
        return results
    late = CheckResult(
        name,
        "problem",
        f"no answer within {timeout_s:g} s",
        "see that host and port are right, and that no firewall drops packets; run doctor again",
    )
    return [*results, late]


def _collect(name: str, check: Check, results: list[CheckResult]) -> None:
    try:
        results.extend(check())
    except WaldeltaError as err:
        results.append(problem_of(name, err))
    except Exception as err:
        # Only the first line: what follows may repeat a request with its signature.
        line = str(err).strip().partition("\n")[0]
        text = f"{type(err).__name__}: {line}" if line else type(err).__name__
        results.append(CheckResult(name, "problem", text))


def problem_of(name: str, err: WaldeltaError) -> CheckResult:
    """Returns a named error as a problem, with its remedy of errors.md."""
    kind = type(err).__name__
    return CheckResult(name, "problem", f"{kind}: {err}", REMEDIES.get(kind, ""))


def installation_checks() -> dict[str, Check]:
    """Returns the checks by their names, in the order in which they are shown."""
    return {
        "python": _python,
        "packages": check_packages,
        "java": _java,
        "jars": _jars,
        "spark": _spark,
        "variables": _variables,
    }


def _python() -> list[CheckResult]:
    version = platform.python_version()
    distribution = _find_distribution(_NAME)
    needs = distribution.metadata["Requires-Python"] if distribution is not None else None
    text = f"Python {version}"
    if needs and not _is_within(version, needs):
        text = f"{text}, and waldelta needs {needs}"
        return [CheckResult("python", "problem", text, "install such a Python")]
    return [CheckResult("python", "ok", text)]


def check_packages() -> list[CheckResult]:
    """Compare the installed packages with the ranges in the wheel's metadata."""
    distribution = _find_distribution(_NAME)
    if distribution is None:
        text = "waldelta is on Python's path but not installed: package versions can't be checked"
        return [CheckResult("packages", "warning", text, "install waldelta's wheel")]
    results = [CheckResult("packages", "ok", f"waldelta {distribution.version}")]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        text = "package packaging is missing, so that versions can't be compared"
        return [*results, CheckResult("packages", "warning", text, "run `pip install packaging`")]
    requirements = [Requirement(text) for text in distribution.requires or ()]
    for extra in ("", *_EXTRAS):
        results += _of_extra(extra, [one for one in requirements if _is_of(one, extra)])
    return results


def _is_of(one: Requirement, extra: str) -> bool:
    if one.marker is None:
        return not extra
    if not one.marker.evaluate({"extra": extra}):
        return False
    return not extra or not one.marker.evaluate({"extra": ""})


def _of_extra(extra: str, requirements: list[Requirement]) -> Iterator[CheckResult]:
    if extra and (not requirements or _find_distribution(_EXTRAS[extra]) is None):
        return
    source = f"{_NAME}[{extra}]" if extra else _NAME
    remedy = f"run `pip install '{source}'`"
    packages = {one: _find_distribution(one.name) for one in requirements}
    versions = {
        one: None if distribution is None else distribution.version
        for one, distribution in packages.items()
    }
    wrong = _out_of_range(versions)
    missing = [one.name for one, version in versions.items() if version is None]
    if wrong:
        yield CheckResult(
            "packages", "problem", f"{source}: {', '.join(wrong)}: other versions fail", remedy
        )
    if missing:
        # The extras' packages serve single functions.
        status: CheckStatus = "warning" if extra else "problem"
        yield CheckResult("packages", status, f"{source} lacks {', '.join(missing)}", remedy)
    if not (wrong or missing):
        yield CheckResult(
            "packages", "ok", f"{source}: {counted(len(versions), 'package')} in range"
        )


def _out_of_range(versions: Mapping[Requirement, str | None]) -> list[str]:
    return [
        f"{one.name} {version} (needs {one.specifier})"
        for one, version in versions.items()
        if version is not None and not one.specifier.contains(version, prereleases=True)
    ]


def check_workers() -> Iterator[CheckResult]:
    """Ask Spark's workers for the packages that tasks need; opens a session."""
    from packaging.requirements import Requirement

    from waldelta.spark.session import borrowed_session
    from waldelta.spark.worker_packages import read_workers

    if (distribution := _find_distribution(_NAME)) is None:
        raise ConfigError("waldelta is on Python's path but not installed: install its wheel")
    requirements = [
        requirement
        for requirement in map(Requirement, distribution.requires or ())
        if _is_of(requirement, "")
    ]
    with borrowed_session(None) as spark:
        answers = read_workers(spark, [requirement.name for requirement in requirements])
    for worker in answers:
        versions = {requirement: worker.versions[requirement.name] for requirement in requirements}
        lacking = [
            *([] if worker.has_waldelta else [_NAME]),
            *(requirement.name for requirement, installed in versions.items() if installed is None),
        ]
        wrong = _out_of_range(versions)
        text = f"host {worker.host}, Python {worker.python}"
        if lacking or wrong:
            parts = [*([f"lacks {', '.join(lacking)}"] if lacking else []), *wrong]
            remedy = f"install `{_NAME}` into the Python of Spark's workers on {worker.host}"
            yield CheckResult("workers", "problem", f"{text}: {'; '.join(parts)}", remedy)
        else:
            packages = counted(len(versions), "package")
            yield CheckResult("workers", "ok", f"{text}: {packages} in range")


def _java() -> list[CheckResult]:
    if _has_no_local_spark():
        return [CheckResult("java", "ok", "not needed: this Python has no local Spark")]
    from waldelta.spark.jars import REMEDY, check_java

    java = check_java()
    if java is None:
        text = "not checked: Spark's own spark-env.sh may set JAVA_HOME"
        return [CheckResult("java", "ok", text)]
    which = f"Java {java.version}" if java.version is not None else "a Java of unknown version"
    text = f"{which}: {java.place}"
    if java.version in _TESTED_JAVA:
        return [CheckResult("java", "ok", text)]
    return [CheckResult("java", "warning", f"{text}; Spark is tested with 17 and 21", REMEDY)]


def _jars() -> Iterator[CheckResult]:
    if _has_no_local_spark():
        yield CheckResult("jars", "ok", "not needed: this Python has no local Spark")
        return
    from waldelta.spark.jars import delta_artifact, has_delta_jars, has_store_jars, stores
    from waldelta.spark.settings import jars_folder

    folder, artifact = jars_folder(), delta_artifact()
    delta = artifact.rpartition(":")[2]
    if has_delta_jars(folder, artifact):
        yield CheckResult("jars", "ok", f"Delta {delta} in {folder}")
    else:
        text = f"{folder} doesn't have all jars of Delta {delta}"
        remedy = "run `waldelta jars`, or set WALDELTA_JARS to the folder that has them"
        yield CheckResult("jars", "problem", text, remedy)
    for name, store in stores().items():
        if (folder / name).is_dir():
            text = f"jars of {name} in {folder / name}"
            if has_store_jars(folder / name, store):
                yield CheckResult("jars", "ok", text)
            else:
                text = f"{text}: incomplete, or of another version"
                yield CheckResult("jars", "problem", text, f"run `waldelta jars --stores {name}`")


def _spark() -> list[CheckResult]:
    remote = os.environ.get("SPARK_REMOTE")
    if not remote:
        where = "none, and no local Spark" if _has_no_local_spark() else "a local session"
        return [CheckResult("spark", "ok", f"SPARK_REMOTE isn't set: {where}")]
    from waldelta.spark.session import check_remote

    check_remote(remote, _REMOTE_TIMEOUT_S)
    # The address may contain a token.
    return [CheckResult("spark", "ok", "the Spark Connect server of SPARK_REMOTE answers")]


def _variables() -> Iterator[CheckResult]:
    from waldelta.config.pipeline_folder import PIPELINES_VARIABLE
    from waldelta.permissions import lake_umask
    from waldelta.spark.settings import log_level

    names = sorted(name for name in os.environ if name.startswith("WALDELTA_"))
    known_names = [name for name in names if name in _VARIABLES]
    log_level()
    lake_umask()
    text = f"{', '.join(known_names)} set" if known_names else "no variable WALDELTA_… is set"
    yield CheckResult("variables", "ok", text)
    folder = os.environ.get(PIPELINES_VARIABLE)
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"{PIPELINES_VARIABLE} is {folder!r}, which is no folder: correct it")
    for name in names:
        if name not in _VARIABLES and (
            close := difflib.get_close_matches(name, _VARIABLES, 1, 0.9)
        ):
            text = f"{name} is set, but waldelta has no such variable"
            yield CheckResult("variables", "warning", text, f"set {close[0]} if you meant that")


def _find_distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _is_within(version: str, specifiers: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True
    return SpecifierSet(specifiers).contains(version, prereleases=True)


def _has_no_local_spark() -> bool:
    """Returns whether only a Spark Connect server can be used."""
    from waldelta.spark.settings import pyspark_folder

    try:
        pyspark_folder()
    except ConfigError:
        return True
    return False


def pipeline_checks(pipeline: Pipeline, path: Path) -> dict[str, Check]:
    """Returns the checks by their names, in the order in which they are shown."""
    return {
        "source": partial(_source, pipeline),
        "preflight": partial(_preflight, pipeline),
        "lake": partial(_lake, pipeline),
        "slot": partial(_slot, pipeline, path),
        "airflow": partial(_airflow, path),
    }


def _source(pipeline: Pipeline) -> list[CheckResult]:
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
    text = (
        f"{describe(job.source.conninfo)}: PostgreSQL {server.settings['server_version']},"
        f" wal_level {server.settings['wal_level']}; max_replication_slots"
        f" {slots.number('max_replication_slots')}, of which {slots.used_slots} used; role {role}"
        f" {can} use them"
    )
    return [CheckResult("source", "ok", text)]


def _preflight(pipeline: Pipeline) -> Iterator[CheckResult]:
    from waldelta.stages.check.judge_suites import judge_names
    from waldelta.stages.setup.setup import plan_setup

    job = pipeline.job()
    with job.source.connect("doctor") as connection:
        plan = plan_setup(connection, job, judge_names)
    for finding in plan.reported():
        yield CheckResult("preflight", finding.severity, finding.text)
    if not plan.findings:
        yield CheckResult("preflight", "ok", "setup would be accepted")


def _lake(pipeline: Pipeline) -> Iterator[CheckResult]:
    from waldelta.errors import TargetNotWritable
    from waldelta.lake import local_path, named_write_errors, why_not_writable
    from waldelta.lake.ledger import Ledger
    from waldelta.pipeline.job import lake_of
    from waldelta.stages.setup.preflight.lake import probe_commits

    target, root = pipeline.file.target, pipeline.file.target.root
    # Reads the lake without the source's connection.
    lake = lake_of(pipeline.file)
    with named_write_errors(root):
        Ledger(lake).slot_events()
    if local_path(root) is not None:
        if (why := why_not_writable(root)) is not None:
            raise TargetNotWritable(why)
    else:
        with probe_commits(target, lake):
            pass
        yield from _store_jars(root)
    yield CheckResult("lake", "ok", f"{root} can be read and written")


def _store_jars(root: str) -> Iterator[CheckResult]:
    from waldelta.config.stores import STORES, store_of
    from waldelta.spark.settings import jars_folder

    name = store_of(root)
    if name is not None and STORES[name].has_jars and "SPARK_REMOTE" not in os.environ:
        folder = jars_folder() / name
        if not folder.is_dir():
            text = f"{folder} is missing: a local Spark can't reach {root}"
            yield CheckResult("lake", "warning", text, f"run `waldelta jars --stores {name}`")


def _slot(pipeline: Pipeline, path: Path) -> Iterator[CheckResult]:
    from waldelta.cli._status_table import slot_error
    from waldelta.pipeline import ledger_of

    if not ledger_of(pipeline.file).slot_events():
        text = f"slot {pipeline.file.source.slot} was never set up for this lake"
        yield CheckResult("slot", "warning", text, f"run `waldelta setup {path}`")
        return
    status = pipeline.status()
    if (err := slot_error(status)) is not None:
        raise err
    yield from _of_slot(status["slot"])
    for gap in status["gaps"]:
        yield CheckResult("slot", "problem", f"data gap: {gap['cause']}", str(gap["remedy"]))


def _of_slot(slot: dict[str, Any]) -> Iterator[CheckResult]:
    use = "a run reads it now" if slot["active"] else "no run reads it now"
    headroom = slot["safe_wal_size"]
    limit = (
        "no limit" if headroom is None else f"{size(headroom)} left before PostgreSQL may drop it"
    )
    text = f"slot {slot['name']}: {slot['wal_status']}, {use}; keeps {size(slot['retained_bytes'])}"
    yield CheckResult("slot", "ok", f"{text} of WAL, {limit}")
    for warning in slot["warnings"]:
        is_critical = warning.startswith("critical: ")
        yield CheckResult("slot", "problem" if is_critical else "warning", warning)


def _airflow(path: Path) -> list[CheckResult]:
    if not is_airflow_installed():
        return [CheckResult("airflow", "ok", "not checked: this Python has no Airflow")]
    if not is_airflow_configured():
        text = "not checked: Airflow is installed, but its folder isn't known here"
        remedy = "set AIRFLOW_HOME as Airflow's scheduler has it"
        return [CheckResult("airflow", "warning", text, remedy)]
    # Airflow takes seconds to load, and its settings change the whole process.
    command = [sys.executable, "-P", "-m", "waldelta", "airflow", "setup", str(path)]
    remedy = f"run `waldelta airflow setup {path} --dry-run`"
    try:
        process = subprocess.run(
            [*command, "--dry-run", "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=CHECK_TIMEOUT_S - 1,
        )
        answer = json.loads(process.stdout)
    except subprocess.TimeoutExpired:
        return [CheckResult("airflow", "warning", "Airflow's database did not answer", remedy)]
    except ValueError:
        return [CheckResult("airflow", "warning", "Airflow gave no answer", remedy)]
    if (error := answer.get("error")) is not None:
        text = f"{error['class']}: {error['message']}"
        return [CheckResult("airflow", "warning", text, error["remedy"])]
    return list(entries_of(answer))


def entries_of(answer: dict[str, Any]) -> Iterator[CheckResult]:
    """Yields a result for each entry in the answer of ``waldelta airflow setup``."""
    for entry in (*answer["pools"], *answer["connections"]):
        kind = "pool" if "pool" in entry else "connection"
        text = f"{kind} {entry[kind]}: {entry['state']}"
        if entry["state"] == "missing":
            yield CheckResult("airflow", "problem", text, f"run `{entry['command']}`")
        else:
            yield CheckResult("airflow", "ok", text)

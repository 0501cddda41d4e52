"""How each check of ``doctor`` is run: with a time limit, and never a stack trace; and the checks
that need no pipeline: packages, Java, jars, Spark, variables.

This module imports no other package: the checks also run where one is missing or broken.
"""

from __future__ import annotations

import difflib
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from waldelta.error_catalog import REMEDIES
from waldelta.errors import ConfigError, WaldeltaError
from waldelta.quantities import counted

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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

CheckStatus = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found; ``remedy`` says what to do, where the text doesn't."""

    check: str
    status: CheckStatus
    text: str
    remedy: str = ""


Check = Callable[[], Iterable[CheckResult]]


def run_check(name: str, check: Check, timeout_s: float = CHECK_TIMEOUT_S) -> list[CheckResult]:
    """Run a check; an error becomes a problem, and so does a check that takes too long.

    A check that takes too long is left to its thread, which ends with the process.
    """
    found: list[CheckResult] = []
    thread = threading.Thread(target=_collect, args=(name, check, found), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not thread.is_alive():
        return found
    late = CheckResult(
        name,
        "problem",
        f"no answer within {timeout_s:g} s",
        "see that host and port are right, and that no firewall drops packets; run doctor again",
    )
    return [*found, late]


def _collect(name: str, check: Check, found: list[CheckResult]) -> None:
    try:
        found.extend(check())
    except WaldeltaError as err:
        found.append(problem_of(name, err))
    except Exception as err:
        # Only the first line: what follows may repeat a request with its signature.
        line = str(err).strip().partition("\n")[0]
        text = f"{type(err).__name__}: {line}" if line else type(err).__name__
        found.append(CheckResult(name, "problem", text))


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


def _python() -> Iterator[CheckResult]:
    found = platform.python_version()
    own = _own_distribution()
    wanted = own.metadata["Requires-Python"] if own is not None else None
    text = f"Python {found}"
    if wanted and not _is_within(found, wanted):
        yield CheckResult(
            "python", "problem", f"{text}, and waldelta needs {wanted}", "install such a Python"
        )
    else:
        yield CheckResult("python", "ok", text)


def check_packages() -> Iterator[CheckResult]:
    """Compare the installed packages with the ranges in the wheel's metadata."""
    own = _own_distribution()
    if own is None:
        text = "waldelta is on Python's path but not installed: package versions can't be checked"
        yield CheckResult("packages", "warning", text, "install waldelta's wheel")
        return
    yield CheckResult("packages", "ok", f"waldelta {own.version}")
    try:
        from packaging.requirements import Requirement
    except ImportError:
        text = "package packaging is missing, so that versions can't be compared"
        yield CheckResult("packages", "warning", text, "run `pip install packaging`")
        return
    requirements = [Requirement(text) for text in own.requires or ()]
    for extra in ("", *_EXTRAS):
        yield from _of_extra(extra, [one for one in requirements if _is_of(one, extra)])


def _is_of(one: Requirement, extra: str) -> bool:
    if one.marker is None:
        return not extra
    if not one.marker.evaluate({"extra": extra}):
        return False
    return not extra or not one.marker.evaluate({"extra": ""})


def _of_extra(extra: str, requirements: list[Requirement]) -> Iterator[CheckResult]:
    if extra and (not requirements or _version_of(_EXTRAS[extra]) is None):
        return
    source = f"{_NAME}[{extra}]" if extra else _NAME
    remedy = f"run `pip install '{source}'`"
    found = {one: _version_of(one.name) for one in requirements}
    wrong = _out_of_range(found)
    missing = [one.name for one, installed in found.items() if installed is None]
    if wrong:
        yield CheckResult(
            "packages", "problem", f"{source}: {', '.join(wrong)}: other versions fail", remedy
        )
    if missing:
        # The extras' packages serve single functions.
        status: CheckStatus = "warning" if extra else "problem"
        yield CheckResult("packages", status, f"{source} lacks {', '.join(missing)}", remedy)
    if not (wrong or missing):
        yield CheckResult("packages", "ok", f"{source}: {counted(len(found), 'package')} in range")


def _out_of_range(found: Mapping[Requirement, str | None]) -> list[str]:
    return [
        f"{one.name} {installed} (needs {one.specifier})"
        for one, installed in found.items()
        if installed is not None and not one.specifier.contains(installed, prereleases=True)
    ]


def check_workers() -> Iterator[CheckResult]:
    """Ask Spark's workers for the packages that tasks need; opens a session."""
    from waldelta.spark.session import borrowed_session
    from waldelta.spark.worker_packages import read_workers

    requirements = _required_by_tasks()
    with borrowed_session(None) as spark:
        answers = read_workers(spark, [one.name for one in requirements])
    for worker in answers:
        found = {one: worker.versions[one.name] for one in requirements}
        lacking = [
            *([] if worker.has_waldelta else [_NAME]),
            *(one.name for one, installed in found.items() if installed is None),
        ]
        wrong = _out_of_range(found)
        text = f"host {worker.host}, Python {worker.python}"
        if lacking or wrong:
            parts = [*([f"lacks {', '.join(lacking)}"] if lacking else []), *wrong]
            remedy = f"install `{_NAME}` into the Python of Spark's workers on {worker.host}"
            yield CheckResult("workers", "problem", f"{text}: {'; '.join(parts)}", remedy)
        else:
            packages = counted(len(found), "package")
            yield CheckResult("workers", "ok", f"{text}: {packages} in range")


def _required_by_tasks() -> list[Requirement]:
    """Returns what the package itself requires, without extras.

    Raises ConfigError where the metadata of the package aren't installed.
    """
    from packaging.requirements import Requirement

    if (own := _own_distribution()) is None:
        raise ConfigError("waldelta is on Python's path but not installed: install its wheel")
    return [one for one in map(Requirement, own.requires or ()) if _is_of(one, "")]


def _java() -> Iterator[CheckResult]:
    if _has_no_local_spark():
        text = "not needed: this Python has no local Spark"
        yield CheckResult("java", "ok", text)
        return
    from waldelta.spark.java import REMEDY, check_java

    found = check_java()
    if found is None:
        text = "not checked: Spark's own spark-env.sh may set JAVA_HOME"
        yield CheckResult("java", "ok", text)
        return
    which = f"Java {found.version}" if found.version is not None else "a Java of unknown version"
    text = f"{which}: {found.place}"
    if found.version in _TESTED_JAVA:
        yield CheckResult("java", "ok", text)
    else:
        yield CheckResult("java", "warning", f"{text}; Spark is tested with 17 and 21", REMEDY)


def _jars() -> Iterator[CheckResult]:
    if _has_no_local_spark():
        text = "not needed: this Python has no local Spark"
        yield CheckResult("jars", "ok", text)
        return
    from waldelta.spark.delta_jars import delta_artifact, has_delta_jars
    from waldelta.spark.settings import jars_folder
    from waldelta.spark.store_jars import has_store_jars, stores

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
            is_current = has_store_jars(folder / name, store)
            text = f"jars of {name} in {folder / name}"
            yield (
                CheckResult("jars", "ok", text)
                if is_current
                else CheckResult(
                    "jars",
                    "problem",
                    f"{text}: incomplete, or of another version",
                    f"run `waldelta jars --stores {name}`",
                )
            )


def _spark() -> Iterator[CheckResult]:
    remote = os.environ.get("SPARK_REMOTE")
    if not remote:
        where = "none, and no local Spark" if _has_no_local_spark() else "a local session"
        text = f"SPARK_REMOTE isn't set: {where}"
        yield CheckResult("spark", "ok", text)
        return
    from waldelta.spark.session import check_remote

    check_remote(remote, _REMOTE_TIMEOUT_S)
    # The address may contain a token.
    yield CheckResult("spark", "ok", "the Spark Connect server of SPARK_REMOTE answers")


def _variables() -> Iterator[CheckResult]:
    from waldelta.config.pipeline_folder import PIPELINES_VARIABLE
    from waldelta.permissions import lake_umask
    from waldelta.spark.settings import log_level

    given = sorted(name for name in os.environ if name.startswith("WALDELTA_"))
    known = [name for name in given if name in _VARIABLES]
    log_level()
    lake_umask()
    text = f"{', '.join(known)} set" if known else "no variable WALDELTA_… is set"
    yield CheckResult("variables", "ok", text)
    folder = os.environ.get(PIPELINES_VARIABLE)
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"{PIPELINES_VARIABLE} is {folder!r}, which is no folder: correct it")
    for name in given:
        if name not in _VARIABLES and (
            close := difflib.get_close_matches(name, _VARIABLES, 1, 0.9)
        ):
            text = f"{name} is set, but waldelta has no such variable"
            yield CheckResult("variables", "warning", text, f"set {close[0]} if you meant that")


def _own_distribution() -> Distribution | None:
    try:
        return distribution(_NAME)
    except PackageNotFoundError:
        return None


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_within(found: str, wanted: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True
    return SpecifierSet(wanted).contains(found, prereleases=True)


def _has_no_local_spark() -> bool:
    """Returns whether only a Spark Connect server can be used."""
    from waldelta.spark.settings import pyspark_folder

    try:
        pyspark_folder()
    except ConfigError:
        return True
    return False

"""requirements.txt is complete and exact: what the code imports is pinned there, and every pin is a
version.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from demo import delta_jars

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = ("include", "spark_jobs", "dags", "plugins", "tests", "tools", "benchmarks")
OWN = {
    "waldelta",
    "waldelta_airflow",
    "demo",
    "spark_jobs",
    "tests",
    "tools",
    "benchmarks",
    "bootstrap",
    "messages",
    "prose",
}
# Parts of a pinned package that are distributions of their own.
PART_OF = {
    "apache-airflow-core": "apache-airflow",
    "apache-airflow-task-sdk": "apache-airflow",
    "pyspark-client": "pyspark",
    "grpcio": "pyspark",
    "markdown": "zensical",
}
# Imported only where somebody has installed it (and by its own test, in a folder of its own).
OPTIONAL = {"include/waldelta_airflow/reporting/lineage.py"}
PIN = re.compile(
    r"\A(?P<name>[A-Za-z0-9._-]+)(\[[a-z,]+\])?==(?P<version>[0-9][A-Za-z0-9.]*)\s+# \S.*\Z"
)


def requirement_lines() -> list[str]:
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pins() -> dict[str, str]:
    found = (PIN.match(line) for line in requirement_lines())
    return {canonical(match["name"]): match["version"] for match in found if match}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def source_files() -> list[Path]:
    return sorted(path for folder in SOURCES for path in (REPOSITORY / folder).rglob("*.py"))


@cache
def distributions_by_package() -> Mapping[str, list[str]]:
    return packages_distributions()


def distributions(module: str) -> set[str]:
    """The pinned names that may have brought a module: several distributions share the packages
    airflow and pyspark.
    """
    found = {
        canonical(name) for name in distributions_by_package().get(module.partition(".")[0], [])
    }
    return found | {PART_OF[name] for name in found if name in PART_OF}


@pytest.mark.parametrize("line", requirement_lines())
def test_every_requirement_is_an_exact_pin_with_its_reason(line):
    assert PIN.match(line), line


@pytest.mark.parametrize("name", sorted(pins()))
def test_the_pinned_version_is_the_installed_one(name):
    assert version(name) == pins()[name]


def test_every_direct_import_is_pinned():
    pinned = pins().keys()
    missing = {
        f"{path.relative_to(REPOSITORY)}: {module}"
        for path in source_files()
        if str(path.relative_to(REPOSITORY)) not in OPTIONAL
        for module in imported_modules(path)
        if (top := module.partition(".")[0]) not in OWN
        and top not in sys.stdlib_module_names
        and not distributions(module) & pinned
    }
    assert not missing


def test_the_build_backend_is_the_pinned_one():
    assert f"hatchling=={pins()['hatchling']}" in (REPOSITORY / "pyproject.toml").read_text()


def test_delta_is_built_for_the_pinned_spark():
    assert f"_{pins()['pyspark'].rpartition('.')[0]}_" in delta_jars.ARTIFACT

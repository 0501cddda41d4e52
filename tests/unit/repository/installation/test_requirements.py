"""requirements.txt is complete and exact: imports are pinned, and pins are versions."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.source_code import ROOT as REPOSITORY
from tests.support.source_code import modules, nodes_of
from waldelta.spark import jars

SOURCES = ("include", "spark_jobs", "dags", "plugins", "tests", "tools", "benchmarks")
OWN = {
    "waldelta", "waldelta_airflow", "demo", "spark_jobs", "tests", "tools", "benchmarks",
    "bootstrap", "licences", "messages", "prose",
}  # fmt: skip
# Parts of a pinned package that are distributions of their own.
PART_OF = {
    "apache-airflow-core": "apache-airflow", "apache-airflow-task-sdk": "apache-airflow",
    "botocore": "boto3", "pyspark-client": "pyspark", "grpcio": "pyspark", "markdown": "zensical",
}  # fmt: skip
# Imported only where somebody has installed it (and by its own test, in a folder of its own).
OPTIONAL = {"include/waldelta_airflow/reporting/lineage.py"}
PIN = re.compile(
    r"\A(?P<name>[A-Za-z0-9._-]+)(\[[a-z0-9,]+\])?==(?P<version>[0-9][A-Za-z0-9.]*)\s+# \S.*\Z"
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
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


# Finds prose too, and is a hundred times faster than parsing.
MAY_BE_IMPORT = re.compile(r"^ *(?:import|from) (\w+)", re.MULTILINE)


@cache
def packages(name: str) -> frozenset[str]:
    """What a distribution has installed, at the top level."""
    paths = (distribution(name).read_text("RECORD") or "").splitlines()
    return frozenset(re.split(r"[/,.]", path, maxsplit=1)[0] for path in paths)


def imports_beyond(known: set[str], folders: Iterable[str]) -> set[str]:
    """The imports of modules that are not of these packages."""
    return {
        f"{path.relative_to(REPOSITORY)}: {module}"
        for folder in folders
        for path in modules(folder)
        if str(path.relative_to(REPOSITORY)) not in OPTIONAL
        and not known.issuperset(MAY_BE_IMPORT.findall(path.read_text()))
        for module in imported_modules(path)
        if module.partition(".")[0] not in known
    }


def test_every_requirement_is_an_exact_pin_with_its_reason():
    assert [line for line in requirement_lines() if not PIN.match(line)] == []


def test_the_pinned_versions_are_the_installed_ones():
    assert {name: version(name) for name in pins()} == pins()


def test_every_direct_import_is_pinned():
    pinned = pins().keys()
    names = {*pinned, *(part for part, whole in PART_OF.items() if whole in pinned)}
    known = OWN.union(sys.stdlib_module_names, *map(packages, names))
    assert imports_beyond(known, SOURCES) == set()


def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def test_what_builds_is_pinned():
    """Setup installs without isolation."""
    wanted = {Requirement(text) for text in project()["build-system"]["requires"]}
    assert {f"{one.name}{one.specifier}" for one in wanted} == {
        f"{one.name}=={pins()[canonical(one.name)]}" for one in wanted
    }


def dependencies(*extras: str) -> dict[str, Requirement]:
    """What the wheel's metadata names, with these extras."""
    metadata = project()["project"]
    listed = [metadata["dependencies"], *(metadata["optional-dependencies"][e] for e in extras)]
    named = [Requirement(text) for texts in listed for text in texts]
    return {canonical(one.name): one for one in named}


EXTRAS = ("airflow", "spark", "cli", "rehearse", "glue", "hive")


def test_the_pinned_versions_are_in_the_wheels_ranges():
    """Which end below a version that no test has seen."""
    for one in dependencies(*EXTRAS).values():
        assert one.specifier.contains(pins()[canonical(one.name)]), one
        assert {"<", ">="} == {part.operator for part in one.specifier}, one


def test_the_clients_range_is_that_of_pyspark():
    """Both have the files of the package pyspark."""
    assert (
        len({dependencies(*EXTRAS)[name].specifier for name in ("pyspark", "pyspark-client")}) == 1
    )


# What an import of the wheel's packages needs: which extras have it, besides the base.
WHEEL = {
    "include/waldelta": ("spark", "cli", "rehearse", "glue", "hive"),
    "include/waldelta_airflow": ("airflow",),
}
# Of pyspark[connect], pyspark-client and boto3.
BROUGHT = {"grpc", "botocore"}


@pytest.mark.parametrize("folder, extras", WHEEL.items())
def test_what_the_wheel_imports_is_in_its_metadata(folder, extras):
    named = {*dependencies(*extras), "apache-airflow-core", "apache-airflow-task-sdk"}
    if "airflow" not in extras:
        named -= {"apache-airflow-core", "apache-airflow-task-sdk"}
    ours = {"waldelta", "waldelta_airflow", *BROUGHT}
    known = ours.union(sys.stdlib_module_names, *map(packages, named))
    assert imports_beyond(known, [folder]) == set()


def test_the_sdk_is_the_one_that_hadoop_is_built_with():
    """A newer Hadoop in pyspark needs another SDK."""
    assert (jars.hadoop_version(), jars.SDK_VERSION) == ("3.5.0", "2.35.4")


def test_delta_is_built_for_the_pinned_spark():
    spark = pins()["pyspark"].rpartition(".")[0]
    assert jars.DELTA_OF_SPARK[spark] == pins()["delta-spark"]

"""The versions that are tried are those that the wheel's metadata allow and the page lists."""

import re
import tomllib
from itertools import combinations

import pytest
from packaging.requirements import Requirement

from tests.soak.versions import COMBINATIONS, PAGE, table
from tests.support.other_python import ROOT
from waldelta.errors import ConfigError
from waldelta.spark.jars import DELTA_OF_SPARK
from waldelta_airflow._airflow_versions import check_alerts_version, check_version

SUPPORTED = [one for one in COMBINATIONS if not one.refused]
FACTORS = ("python", "airflow", "spark", "postgres")


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@pytest.mark.parametrize("first, second", combinations(FACTORS, 2))
def test_every_pair_of_versions_is_tried(first, second):
    values = {name: {getattr(one, name) for one in SUPPORTED} for name in FACTORS}
    tried = {(getattr(one, first), getattr(one, second)) for one in SUPPORTED}
    assert tried == {(a, b) for a in values[first] for b in values[second]}


def test_the_metadata_allow_what_is_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    allowed = {
        (wanted := Requirement(text)).name: wanted.specifier
        for text in extras["airflow"] + extras["spark"]
    }
    for one in COMBINATIONS:
        assert allowed["apache-airflow"].contains(one.airflow) != bool(one.refused), one
        assert allowed["pyspark"].contains(one.spark), one
        assert allowed["pyspark-client"].contains(one.spark), one
    named = {
        text.rpartition(" ")[2]
        for text in project["classifiers"]
        if text.startswith("Programming Language :: Python :: 3.")
    }
    assert named == {one.python for one in SUPPORTED}
    assert set(DELTA_OF_SPARK) == {minor(one.spark) for one in SUPPORTED}


def test_the_page_has_the_result_of_each():
    """``python -m tests.soak.versions`` writes it."""
    page = PAGE.read_text()
    for one in COMBINATIONS:
        result = "refused" if one.refused else "works"
        assert table({one: result}).splitlines()[-1] in page, one


@pytest.mark.parametrize(
    "check, installed, refused",
    [
        (check_version, "3.0.6", True),
        (check_version, "3.1.0", False),
        (check_version, "4.0.0", False),
        (check_alerts_version, "3.2.2", True),
        (check_alerts_version, "3.3.0rc1", False),
    ],
)
def test_an_old_airflow_is_refused(check, installed, refused):
    if not refused:
        check(installed)
        return
    with pytest.raises(ConfigError, match=f"Airflow {re.escape(installed)} is installed"):
        check(installed)

"""The wheel with other versions of Python, Airflow, Spark and PostgreSQL than this repository's."""

from __future__ import annotations

import pytest

from tests.soak.versions import COMBINATIONS, try_versions
from tests.support.other_python import build_distributions

pytestmark = [pytest.mark.e2e, pytest.mark.airflow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_distributions(tmp_path_factory.mktemp("wheel"))[1]


NO_DAGS_TEST = pytest.mark.xfail(
    strict=True,
    reason="`airflow dags test` of 3.2.2 asks the server in its process before that has started",
)


@pytest.mark.soak
@pytest.mark.pg
@pytest.mark.spark
@pytest.mark.parametrize(
    "versions",
    [
        pytest.param(one, id=str(one), marks=NO_DAGS_TEST if one.airflow == "3.2.2" else ())
        for one in COMBINATIONS
    ],
)
def test_it_works_or_is_refused_by_name(versions, wheel, tmp_path):
    try_versions(versions, wheel, tmp_path)

"""The wheel with other versions of Python, Airflow, Spark and PostgreSQL than this repository's."""

from __future__ import annotations

import pytest

from tests.soak.versions import COMBINATIONS, try_versions
from tests.support.other_python import build_distributions

pytestmark = [pytest.mark.e2e, pytest.mark.airflow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_distributions(tmp_path_factory.mktemp("wheel"))[1]


@pytest.mark.soak("other versions of the parts")
@pytest.mark.pg
@pytest.mark.spark
@pytest.mark.parametrize("versions", COMBINATIONS, ids=str)
def test_it_works_or_is_refused_by_name(versions, wheel, tmp_path):
    try_versions(versions, wheel, tmp_path)

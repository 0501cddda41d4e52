"""A Spark session with Delta, one per test session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A classic session on local[2]; nothing is resolved over the network."""
    os.environ.pop("SPARK_REMOTE", None)
    from spark_jobs.session import spark_session

    os.chdir(tmp_path_factory.mktemp("spark"))  # spark-warehouse lands here
    session = spark_session("local[2]", name="tests")
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()

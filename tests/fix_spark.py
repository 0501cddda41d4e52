"""A Spark session with Delta, one per test session, and where it decodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.seeds import is_long

_INTERPRETED = {"spark.sql.codegen.factoryMode": "NO_CODEGEN", "spark.sql.codegen.wholeStage": "false"}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A classic session on local[2]; nothing is resolved over the network.

    It evaluates expressions as they stand, but in a soak and for tests that are marked as ``compiled``: for a few rows, compiling
    them first is a quarter of a run's time.
    """
    os.environ.pop("SPARK_REMOTE", None)
    from waldelta.spark import session as sessions

    # This JVM lives for half an hour, not for one job: within three minutes the second compiler has earned what it costs, and from
    # then on the same statements take a quarter less.
    own = sessions.local_settings()
    own["spark.driver.extraJavaOptions"] += " -XX:TieredStopAtLevel=4"
    # spark-warehouse lands in the working directory of the moment; later tests name files from the project's root.
    with contextlib.chdir(tmp_path_factory.mktemp("spark")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "local_settings", lambda: own)
        session = sessions.spark_session("local[2,4]", name="tests")
    session.sparkContext.setLogLevel("ERROR")
    for name, value in ({} if is_long() else _INTERPRETED).items():
        session.conf.set(name, value)
    yield session
    session.stop()


@pytest.fixture
def compiled(spark) -> Iterator[None]:
    """Spark compiles expressions before it evaluates them, as it does for everybody: for tests that are about what it evaluates."""
    before = {name: spark.conf.get(name) for name in _INTERPRETED}
    for name in _INTERPRETED:
        spark.conf.unset(name)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture
def merged_by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark merges even what Arrow could."""
    monkeypatch.setattr("waldelta.changes.merge.choose.merge_here", lambda *_: None)
    monkeypatch.setattr("waldelta.changes.merge.choose.merge_files", lambda *_: None)


@pytest.fixture
def merged_by_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks merge even the few changes of a small target, file by file, as they do for larger ones."""
    monkeypatch.setattr("waldelta.changes.merge.choose.merge_here", lambda *_: None)


@pytest.fixture(params=[pytest.param("driver", marks=pytest.mark.soak), "tasks"])
def where_decoded(request, monkeypatch):
    """A small range is decoded by the driver, a larger one by Spark's tasks; both must do the same.

    All other tests have small ranges.
    """
    if request.param == "tasks":
        monkeypatch.setattr("waldelta.lake.changelog.batch_range.SMALL_ROWS", 0)
    return request.param


@pytest.fixture
def split_by_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even few messages of few tables are written anew by table before they are read, half of them by tasks."""
    monkeypatch.setattr("waldelta.lake.changelog.batch_range.SMALL_ROWS", 60)
    monkeypatch.setattr("waldelta.changes.stage.split.WORTH_IT", 1)

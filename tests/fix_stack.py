"""The embedded stack as a fixture: real Airflow, real Spark Connect server, one per test session."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.stack import Stack
from tests.soak.listener import Listener
from waldelta_airflow.settings import RETRY_DELAY_VARIABLE


@contextmanager
def own_folder() -> Iterator[Path]:
    """An empty folder outside of pytest's: every other pytest session closes that one to PostgreSQL's user again."""
    folder = Path(tempfile.mkdtemp(prefix="waldelta_stack_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def stack_folder() -> Iterator[Path]:
    """A folder for a stack of the test's own."""
    with own_folder() as folder:
        yield folder


def have_parsed(stack: Stack) -> None:
    """Have Airflow read the pipeline files at once: it does when the DAG file that reads them has changed.

    Not when it was reading it just then; the next time comes before anybody's patience ends.
    """
    for file in stack.dags.glob("waldelta_*.py"):
        file.touch()


@pytest.fixture(scope="session")
def fault_points() -> Iterator[Listener]:
    """Who hears where the jobs of the stack are (waldelta.failpoints)."""
    with own_folder() as folder:
        listener = Listener(folder / "socket", gates=False)
        yield listener
        listener.close()


@pytest.fixture(scope="session")
def stack(fault_points: Listener) -> Iterator[Stack]:
    """A running stack with the repository's DAG file and no pipelines.

    A test writes its own pipeline files into ``stack.pipelines`` (``${WALDELTA_LAKE}`` is the stack's lake), followed by
    ``have_parsed``, and DAG files into ``stack.dags``, gets a source database of its own by ``stack.add_source(conn_id, database)``, the pools
    by ``stack.create_pools()``, and talks to Airflow through ``stack.client()``.
    """
    with own_folder() as folder:
        pipelines, dags = folder / "pipelines", folder / "dags"
        pipelines.mkdir()
        shutil.copytree(Stack.dags, dags)
        # Every ten seconds would be two hundred times until the last test: tests say when there is something new (``have_parsed``).
        seldom = {"AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "45"}
        environment = fault_points.environment | {RETRY_DELAY_VARIABLE: "2"} | seldom
        with Stack(
            folder,
            dags=dags,
            pipelines=pipelines,
            sources={},
            spark_memory="2g",
            triggerer=False,
            environment=environment,
        ) as running:
            yield running

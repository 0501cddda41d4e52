"""Rehearsals open the session of all tests: a worker's process has one Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _session_of_all_tests(spark_jvm: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def open_session(*_: object) -> Iterator[Any]:
        yield spark_jvm()

    for module in ("session", "runner"):
        monkeypatch.setattr(f"waldelta.spark.{module}.open_session", open_session)

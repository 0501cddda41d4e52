"""Fixtures shared by all layers; each family of fixtures has a module of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = [
    "tests.support.fixtures.postgres",
    "tests.support.fixtures.spark",
    "tests.support.fixtures.stack",
    "tests.support.fixtures.airflow",
    "tests.support.fixtures.stores",
]

_UNIT = Path(__file__).with_name("unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark unit tests as such."""
    for item in items:
        if _UNIT in item.path.parents:
            item.add_marker("unit")

"""Fixtures shared by all layers; each family of fixtures has a module of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.seeds import is_long

pytest_plugins = [
    "tests.support.fixtures.postgres",
    "tests.support.fixtures.spark",
    "tests.support.fixtures.stack",
    "tests.support.fixtures.airflow",
    "tests.support.fixtures.stores",
]

_UNIT = Path(__file__).with_name("unit")
_SOAK_TIMEOUT_S = 7200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark unit tests as such, and give tests of a soak more time until they count as hanging."""
    for item in items:
        if _UNIT in item.path.parents:
            item.add_marker("unit")
        if is_long() or item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(_SOAK_TIMEOUT_S))

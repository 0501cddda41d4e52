"""Fixtures shared by all layers; each family of fixtures has a module of its own."""

from __future__ import annotations

pytest_plugins = [
    "tests.support.fixtures.postgres",
    "tests.support.fixtures.spark",
    "tests.support.fixtures.stack",
    "tests.support.fixtures.airflow",
]

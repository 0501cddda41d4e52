"""Fixtures shared by all layers; each family of fixtures has a module of its own."""

from __future__ import annotations

pytest_plugins = ["tests.fix_postgres", "tests.fix_spark", "tests.fix_stack", "tests.fix_airflow"]

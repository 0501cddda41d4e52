"""Imports Great Expectations without modules that only other data sources and charts need, which
are half of the import's time.

Great Expectations imports SQLAlchemy, drivers and pyspark.ml where they are installed, and works
without them. SciPy and Altair serve three of its expectations. The former are hidden during the
import; the latter are loaded on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from waldelta.hidden_modules import hidden

# A suite that needs a hidden module is listed by expectation: KL divergence bins numbers with
# pyspark.ml.
_HIDDEN = ("sqlalchemy", "psycopg2", "pyspark.ml")
_NEEDS_ALL = frozenset(
    {"expect_column_kl_divergence_to_be_less_than", "ExpectColumnKLDivergenceToBeLessThan"}
)
_LATER = ("scipy.stats", "altair")


class _FirstUse(MetaPathFinder):
    """Loads modules that one thread imports when they are first used."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _LATER or threading.get_ident() != self._thread:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def import_great_expectations(kinds: Collection[str] = ()) -> None:
    """Import Great Expectations for suites with these types of expectations, unless it is imported.

    Its analytics are switched off first, so it sends no data.
    """
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    if "great_expectations" in sys.modules:
        return
    if _NEEDS_ALL.intersection(kinds):
        importlib.import_module("great_expectations")
        return
    first_use = _FirstUse()
    sys.meta_path.insert(0, first_use)
    try:
        with hidden(*_HIDDEN):
            importlib.import_module("great_expectations")
    finally:
        sys.meta_path.remove(first_use)


def import_everything() -> None:
    """Import Great Expectations for any suite, with our own expectations and the report modules."""
    import_great_expectations(_NEEDS_ALL)
    for name in (
        "waldelta.stages.check.great_expectations.run_suite",
        "waldelta.stages.check.reports.data_docs",
    ):
        importlib.import_module(name)

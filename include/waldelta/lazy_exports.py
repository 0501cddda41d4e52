"""Loads a package's exports at the first use of each name.

Importing any module of a package runs the package's ``__init__`` first. DAG parsing, the fork
server and the pages import single modules: without lazy exports they would load PySpark, Arrow and
database drivers for names that they never use.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str, **names: str) -> Callable[[str], Any]:
    """Returns a package's ``__getattr__`` (PEP 562) for the names that it exports.

    ``names`` has per module its names, separated by blanks. A name is looked up in its module each
    time.
    """
    module_of = {name: module for module, listed in names.items() for name in listed.split()}

    def get(name: str) -> Any:
        if (module := module_of.get(name)) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module}"), name)

    return get

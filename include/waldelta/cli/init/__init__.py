"""The verb init: writes a pipeline file and its SQL from what a database has."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.cli.init.init import run_init

__all__ = ["run_init"]
__getattr__ = lazy_exports(__name__, init="run_init")

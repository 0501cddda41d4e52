"""Mends a target: finds the rows that differ from those expected."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.repair.mend.mend import ExpectedRows, differences

__all__ = ["ExpectedRows", "differences"]
__getattr__ = lazy_exports(__name__, mend="ExpectedRows differences")

"""The parts of repair that sync and apply use too: which rows differ from those expected, and what
becomes of a killed repair.
"""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.repair.mend.mend import ExpectedRows, differences
    from waldelta.stages.repair.mend.unfinished_repairs import end_killed_repairs

__all__ = ["ExpectedRows", "differences", "end_killed_repairs"]
__getattr__ = lazy_exports(
    __name__, mend="ExpectedRows differences", unfinished_repairs="end_killed_repairs"
)

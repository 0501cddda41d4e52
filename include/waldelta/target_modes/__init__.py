"""Target modes: what a target keeps of rows that the source changed or deleted, one class each.

A class says everything in which its mode differs from others: facts, and SQL text. It is loaded
without PySpark. What is typed here of later packages is passed in by them.
"""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.target_modes.mirror import MIRROR
    from waldelta.target_modes.modes import MODES, mode_column_names, named_mode
    from waldelta.target_modes.target_mode import Feature, Fold, TargetMode

__all__ = ["MIRROR", "MODES", "Feature", "Fold", "TargetMode", "mode_column_names", "named_mode"]
__getattr__ = lazy_exports(
    __name__,
    mirror="MIRROR",
    modes="MODES mode_column_names named_mode",
    target_mode="Feature Fold TargetMode",
)

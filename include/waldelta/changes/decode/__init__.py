"""Decodes raw messages and collapses them to net changes by key."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.changes.decode.decode import DecodePlan
    from waldelta.changes.decode.target_plan import TargetPlan, plan_target

__all__ = ["DecodePlan", "TargetPlan", "plan_target"]
__getattr__ = lazy_exports(__name__, decode="DecodePlan", target_plan="TargetPlan plan_target")

"""Reconciliation: compares a target with its source by checksums that both sides compute."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.repair.reconcile.compare_table import ComparedTarget, compare, needs_spark
    from waldelta.stages.repair.reconcile.touched_keys import stage_changed

__all__ = ["ComparedTarget", "compare", "needs_spark", "stage_changed"]
__getattr__ = lazy_exports(
    __name__, compare_table="ComparedTarget compare needs_spark", touched_keys="stage_changed"
)

"""Repairs targets by merging only the rows that differ, without a new copy."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.repair.reconcile_targets import ReconcileRequest, compare_all
    from waldelta.stages.repair.retry_quarantined import read_quarantined_again

__all__ = ["ReconcileRequest", "compare_all", "read_quarantined_again"]
__getattr__ = lazy_exports(
    __name__,
    reconcile_targets="ReconcileRequest compare_all",
    retry_quarantined="read_quarantined_again",
)

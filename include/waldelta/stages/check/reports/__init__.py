"""Reports as HTML pages: Data Docs, reconciliation pages, their index."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check.reports.data_docs import list_reports, prune_reports
    from waldelta.stages.check.reports.index import CheckedRun, ReportEntry, checked_runs

__all__ = ["CheckedRun", "ReportEntry", "checked_runs", "list_reports", "prune_reports"]
__getattr__ = lazy_exports(
    __name__, data_docs="list_reports prune_reports", index="CheckedRun ReportEntry checked_runs"
)

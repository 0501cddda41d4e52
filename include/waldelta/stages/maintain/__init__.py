"""Stage maintain: keeps targets, change log, ledger and reports small."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.maintain.maintain import (
        maintain_target,
        prune_change_log,
        prune_ledger_rows,
        prune_reports,
        remove_leftovers,
    )

__all__ = [
    "maintain_target",
    "prune_change_log",
    "prune_ledger_rows",
    "prune_reports",
    "remove_leftovers",
]
__getattr__ = lazy_exports(
    __name__,
    maintain="maintain_target prune_change_log prune_ledger_rows prune_reports remove_leftovers",
)

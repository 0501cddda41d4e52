"""The ledger: Delta tables that record what runs did and what state each target is in."""

from waldelta.lake.ledger.ledger import Ledger
from waldelta.lake.ledger.quarantine import IncompleteRow, Quarantine
from waldelta.lake.ledger.reconciliations import Reconciliation
from waldelta.lake.ledger.records import BatchCut, ColumnState, TableState, TargetCut

__all__ = [
    "BatchCut",
    "ColumnState",
    "IncompleteRow",
    "Ledger",
    "Quarantine",
    "Reconciliation",
    "TableState",
    "TargetCut",
]

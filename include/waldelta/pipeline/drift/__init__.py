"""Publication drift: what changed between catalog states, and what a target needs because of it."""

from waldelta.pipeline.drift.catalog_state import CatalogTable, read_catalog_state
from waldelta.pipeline.drift.record_drift import with_leaves
from waldelta.pipeline.drift.repair_plan import Repair, is_dear
from waldelta.pipeline.drift.schema_evolution import Evolution
from waldelta.pipeline.drift.unsent_changes import outdated_columns, unsent_changes

__all__ = [
    "CatalogTable",
    "Evolution",
    "Repair",
    "is_dear",
    "outdated_columns",
    "read_catalog_state",
    "unsent_changes",
    "with_leaves",
]

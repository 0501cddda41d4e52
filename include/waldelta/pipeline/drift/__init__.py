"""Publication drift: what changed between catalog states, and what a target needs because of it."""

from waldelta.pipeline.drift.catalog_state import CatalogTable, read_catalog_state
from waldelta.pipeline.drift.repair_plan import Repair
from waldelta.pipeline.drift.schema_evolution import Evolution

__all__ = ["CatalogTable", "Evolution", "Repair", "read_catalog_state"]

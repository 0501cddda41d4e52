"""Publication drift: what changed between catalog states, and what a target needs because of it."""

from waldelta.pipeline.drift.catalog_state import (
    CatalogTable,
    read_catalog_state,
    read_catalog_tables,
    stored,
)
from waldelta.pipeline.drift.drift import (
    EVERYTHING,
    as_published,
    find_drift,
    source_as_copied,
)
from waldelta.pipeline.drift.record_drift import (
    check_drift,
    check_mode,
    check_rewrite,
    of_partition,
    read_own_tables,
    read_published_now,
    record_leaves,
    with_leaves,
)
from waldelta.pipeline.drift.repair_plan import (
    MovingRows,
    Repair,
    is_dear,
    merges_partitions,
    moving_rows,
    obstacle,
    why_other_rows,
    within_leaves,
)
from waldelta.pipeline.drift.schema_evolution import (
    Evolution,
    NewColumn,
    check_key,
    other_type,
    plan_evolution,
    plan_ignoring,
    refusal,
    unchanged,
)
from waldelta.pipeline.drift.unsent_changes import (
    outdated_columns,
    unsent_changes,
)

__all__ = [
    "EVERYTHING",
    "CatalogTable",
    "Evolution",
    "MovingRows",
    "NewColumn",
    "Repair",
    "as_published",
    "check_drift",
    "check_key",
    "check_mode",
    "check_rewrite",
    "find_drift",
    "is_dear",
    "merges_partitions",
    "moving_rows",
    "obstacle",
    "of_partition",
    "other_type",
    "outdated_columns",
    "plan_evolution",
    "plan_ignoring",
    "read_catalog_state",
    "read_catalog_tables",
    "read_own_tables",
    "read_published_now",
    "record_leaves",
    "refusal",
    "source_as_copied",
    "stored",
    "unchanged",
    "unsent_changes",
    "why_other_rows",
    "with_leaves",
    "within_leaves",
]

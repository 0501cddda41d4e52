"""Which targets a pipeline has, each target's source, and its table lifecycle."""

from waldelta.pipeline.targets.external_commits import check_target
from waldelta.pipeline.targets.lifecycle import (
    RequiredAction,
    TableLifecycle,
    read_lifecycles,
    read_published,
    record_removed,
    requiring,
    target_generations,
    unknown_tables,
)
from waldelta.pipeline.targets.target_definition import (
    check_columns,
    merge_error,
    why_division_stays,
)
from waldelta.pipeline.targets.target_sources import (
    ReplicatedTarget,
    TargetSource,
    column_states,
    filter_of,
    read_target_filter,
    read_unlocked_sources,
)
from waldelta.pipeline.targets.unreadable_messages import open_messages, record_unreadable
from waldelta.pipeline.targets.watermarks import (
    TargetFence,
    Watermarks,
    apply_app_id,
    check_same_copy,
    messages_applied,
    record_state,
    synced_states,
)

__all__ = [
    "ReplicatedTarget",
    "RequiredAction",
    "TableLifecycle",
    "TargetFence",
    "TargetSource",
    "Watermarks",
    "apply_app_id",
    "check_columns",
    "check_same_copy",
    "check_target",
    "column_states",
    "filter_of",
    "merge_error",
    "messages_applied",
    "open_messages",
    "read_lifecycles",
    "read_published",
    "read_target_filter",
    "read_unlocked_sources",
    "record_removed",
    "record_state",
    "record_unreadable",
    "requiring",
    "synced_states",
    "target_generations",
    "unknown_tables",
    "why_division_stays",
]

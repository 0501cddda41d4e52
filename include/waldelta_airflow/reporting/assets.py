"""Assets: one per target table, so that other DAGs can be scheduled on its changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import Asset, AssetAlias

from waldelta.config import PipelineFile, split_table_name
from waldelta.pipeline.after_commit import TargetCommit, commits_of

_COUNTS = ("inserted", "updated", "deleted", "skipped")


def target_asset(pipeline: PipelineFile, table: str) -> Asset:
    """Returns the asset of one target.

    Use it as ``schedule=[target_asset(...)]`` or ``Asset("flights/public.flights")``.
    """
    from waldelta.lake import target_uri

    schema, name = split_table_name(pipeline.target.target_names.of(table))
    return Asset(
        name=f"{pipeline.pipeline}/{table}", uri=target_uri(pipeline.target.root, schema, name)
    )


def pipeline_alias(pipeline: PipelineFile) -> AssetAlias:
    """Returns the alias for all targets of a pipeline, which is the report task's outlet.

    The tables that a run changes are known only afterwards, and an asset that is an outlet itself
    would get an event from every run.
    """
    return AssetAlias(name=f"waldelta/{pipeline.pipeline}", group="waldelta")


def changed_targets(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns by table the event's ``extra`` of each target that a run changed and that is fine.

    A target whose expectations were corrected got no event for its changes when its check failed.
    """
    bounds = {key: result.get(key) for key in ("run_id", "start_lsn", "end_lsn")}
    late = {table: TargetCommit(table, {}, True) for table in result.get("corrected") or ()}
    changed = {commit.table: commit for commit in commits_of(result) if commit.is_fine}
    return {
        table: {
            **{name: commit.count(name) for name in _COUNTS},
            "truncated": bool(commit.count("truncated")),
            **{
                key: commit.counts[key]
                for key in ("rows", "version")
                if commit.counts.get(key) is not None
            },
            **bounds,
        }
        for table, commit in (late | changed).items()
    }


def changed_without_event(result: Mapping[str, Any]) -> list[str]:
    """Returns the targets that a run changed but that get no event.

    They lack some changes, or failed a check.
    """
    return [commit.table for commit in commits_of(result) if not commit.is_fine]

"""Commits a target's staged net changes: in the driver, file by file in tasks, or by Spark."""

from __future__ import annotations

import logging
from dataclasses import replace

import tenacity

from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_UPDATE
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.merge.by_driver import changes_copies, merge_in_driver
from waldelta.changes.merge.by_file import merge_files
from waldelta.changes.merge.keyless import KeylessTarget, count_statement, rewrite_statement
from waldelta.changes.merge.statements import (
    FOUND_DELETES,
    FOUND_UPDATES,
    CommitTag,
    as_stored,
    commit_statement,
    insert_statement,
    merge_statement,
)
from waldelta.changes.merge.states import merge_states
from waldelta.changes.stage.stage import Staged, check_whole
from waldelta.lake import Fence
from waldelta.pipeline import Job
from waldelta.pipeline.task_errors import is_passing
from waldelta.spark import Runner

log = logging.getLogger(__name__)

# How often a MERGE runs in all, when concurrent commits conflict with it.
_ATTEMPTS = 3


def merge_staged(
    runner: Runner,
    job: Job,
    changes: Staged,
    plan: TargetPlan,
    tag: CommitTag,
    fence: Fence,
) -> CommitTag:
    """Commit the net changes in the driver, else file by file in tasks, else by Spark.

    States are always merged by Spark. Returns the tag of the commit.
    """
    done = None
    if plan.decode.unfolding is None:
        done = None if changes.net is None else merge_in_driver(job, plan, changes.net, tag, fence)
        if done is None and changes.files is not None:
            done = merge_files(runner, job, plan, changes.files, tag, fence)
    if done is not None:
        return done
    # Another run may have copied the target again since: Spark would treat that copy as ours.
    fence.verify()
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_passing),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        before_sleep=lambda _: log.warning(
            "table=%s another writer committed during the merge: merging again",
            plan.state.table_name,
        ),
        reraise=True,
    )
    if plan.decode.unfolding is not None:
        target = job.lake.target(plan.state.table_name)
        return again(merge_states, runner, target, plan, changes, tag)
    if changes.net is None and changes.files is not None:
        check_whole(runner, changes)
    return again(_merge, runner, job, changes.source, plan, tag, fence)


def _merge(
    runner: Runner,
    job: Job,
    source: str,
    plan: TargetPlan,
    tag: CommitTag,
    fence: Fence,
) -> CommitTag:
    """Commit the net changes; returns the tag they were committed under.

    Spark's commit isn't a compare-and-swap. But ``source`` is gone once another run has taken the
    target over (take_over_target).
    """
    target = job.lake.target(plan.state.table_name).relation
    keep_metadata = job.pipeline.target.metadata_columns
    names = plan.decode.names
    source = as_stored(source, plan.decode.types)
    cut, has_key = plan.truncated_leaves, bool(plan.decode.shape.key)
    found: dict[str, int] = {}
    if changes_copies(plan, tag) or (cut and not has_key):
        statement = count_statement(target, source, KeylessTarget.of(job, plan))
        rows = {row["action"]: row["rows"] for row in runner.spark().sql(statement).collect()}
        found = {
            FOUND_UPDATES: rows.get(ACTION_UPDATE, 0),
            FOUND_DELETES: rows.get(ACTION_DELETE, 0),
        }
        tag = replace(tag, counts=tag.counts | found)
        fence.verify()  # Counting may have taken long.
    if any(found.values()) or (cut and not has_key):
        statement = rewrite_statement(target, source, KeylessTarget.of(job, plan))
    elif plan.is_truncated or not has_key:
        statement = insert_statement(
            target, source, names, metadata_columns=keep_metadata, overwrite=plan.is_truncated
        )
    else:
        statement = merge_statement(
            target, source, names, plan.decode.shape, metadata_columns=keep_metadata, truncated=cut
        )
    return commit_statement(runner, tag, statement)

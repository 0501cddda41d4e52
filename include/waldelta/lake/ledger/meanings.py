"""What the columns of the ledger's tables mean; ``make reference`` writes the page from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# By table: what it has, and by one or more columns what they mean, in Markdown. ``at`` and
# ``run_id``, which each table has, are explained once.
MEANINGS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "slot_moves": (
        "positions of the slot",
        {
            "event": (
                "`creating`, `created`, `adopted`, `intent`, `compared`, `promoted` or `dropped`"
            ),
            "slot, system_identifier, timeline": "the slot and its server",
            "incarnation": "start position of this slot incarnation",
            "lsn, batch": "the slot moves to this position, over this batch",
            "compared_after": "the comparison follows the move",
            "messages, changes": "messages and changes of rows in the batch",
            "format": "format of the lake; another waldelta's is refused",
        },
    ),
    "tables": (
        "status of each target",
        {
            "table_name, generation": "target, copy generation",
            "status": "`copying`, `synced`, `failed`, `needs_sync` or `removed`",
            "reason": "why it has this status",
            "snapshot, snapshot_lsn": "the copy's snapshot, its position",
            "relation_ids": "oids of source tables or merged partitions",
            "root_id": "oid of the table whose partitions are merged",
            "key_columns, columns": (
                "each change of columns adds a row; a column has `name`, `type_oid`, "
                "`typmod`, `type_name`, `stored_type`, `not_null`, `attnum`, `stopped`: it "
                "stays with its last values, and `source_name`: its name on the source, if it"
                " has another one in the lake"
            ),
            "row_filter, later_filters": "publications' filter at the copy, and since",
            "target_filter": "the target's own filter",
            "rows, bytes, seconds": "size, duration of the copy",
            "incarnation": "slot incarnation whose changes are applied to this copy",
            "storage": "state of the source's catalogs, to detect rewrites",
            "publishes, unpublished, entries": (
                "published operations, unpublished columns, publications"
            ),
            "source_table": "source table, if its name differs",
            "unrepaired_leaves": "partitions that came or went and were only reported",
            "version": "Delta version of the copy",
            "external_commits": "external commits since the copy",
            "mode": "[target mode](../how-to/keep-history.md); null is `mirror`",
            "copy_skipped": "true: taken without a copy",
            "stored_name": "name in the lake, if it isn't `table_name`",
        },
    ),
    "batches": (
        "consistent cuts",
        {
            "batch, end_lsn, commit_ts": "batch, end, last commit time",
            "expired": "the versions may be deleted",
            "targets": (
                "one struct per target: `table_name`, `generation`, `version`: this Delta "
                "version holds exactly this batch; `inserted`, `updated`, `deleted`: changed "
                "rows; `skipped`: updates and deletes of rows that the target lacks; "
                "`truncated`: the batch truncated the target; `completed`: rows completed "
                "from the source; `quarantined`, `raw_rows`: rows in quarantine, and with "
                "values in `_wd_raw`"
            ),
        },
    ),
    "runs": (
        "results",
        {
            "verb, run_type, interval_start, interval_end": "as given",
            "status": "`running`, `succeeded` or `failed`",
            "start_lsn, end_lsn, changes, seconds": "landed WAL range, changes, duration",
            "land_seconds, apply_seconds, check_seconds": "durations of these stages",
            "result": "the whole result, JSON",
            "as_of": "everything committed by then has landed",
            "lag_before_bytes, lag_bytes": "replication lag before, after",
            "retained_bytes, wal_status": "WAL kept for the slot, its status",
            "applied": "true: every target has everything landed",
            "started_at": "start of this attempt",
            "targets": "its tables (as in `batches`)",
        },
    ),
    "gaps": (
        "data gaps",
        {
            "status": "`open` or `closed`",
            "slot, system_identifier, timeline, incarnation": "slot that lost the changes",
            "from_lsn, to_lsn": "range of lost changes",
            "cause, detail, remedy": "class of the error, message, what to do",
        },
    ),
    "read_windows": (
        "read windows",
        {
            "window_bytes, timeout_s": "a changed read window; null: the file's works again",
        },
    ),
    "decisions": (
        "what waits for an operator",
        {
            "table_name, generation": "target, copy generation",
            "kind": (
                "`row`: a row in quarantine; `message`: one that can't be decoded; `table`: "
                "one that a gate stops, once it is released; `dropped_column`, "
                "`retyped_column`, `copy`: a change of the source that asks first; "
                "`external_commit`: one to which an operator agreed"
            ),
            "key, values": (
                "key and received values of a row, JSON of PostgreSQL's texts; or a message's id"
            ),
            "columns": "missing columns of a row; the column that changed",
            "batch": "the last batch that was applied with the row",
            "lsn, commit_ts, reason": "the change, and why it waits",
            "messages": "the original messages, with bytes in `raw`",
            "by, why, decided_at": "who decided, why, when",
            "outdated": "the target has the row as it was before",
            "row_id": "its id, once a repair went on with it",
            "incarnation, timeline": "the slot's, for positions",
            "after_lsn, upto_lsn": "a release covers commits from here to there",
            "status": (
                "`waiting`: the target lacks the row, or the message blocks its tables; "
                "`completed`: completed with newer values from the source; `resolved`: a "
                "later change, a retry or a comparison ended the waiting; `accepted`, "
                "`discarded`, `skipped`, `released`: decisions of an operator"
            ),
        },
    ),
    "expectations": (
        "results of checks",
        {
            "table_name, version": "target, checked Delta version; null for a gate's result",
            "expectation, meaning, severity, origin": "what was expected, and who says so",
            "success": "null: not evaluated",
            "observed, unexpected_count": "what was found; rows that fail it",
            "not_checked": "the table's rules that couldn't be judged, in the first row of a check",
            "suite": "digest of the table's own expectations",
            "examples": "rows that fail the expectation, with key and values",
        },
    ),
    "profiles": (
        "measurements",
        {
            "table_name, version": "target, measured Delta version",
            "rows, columns": "row counts and distributions of columns",
        },
    ),
    "passed_suites": (
        "targets that meet their suites",
        {
            "table_name, generation, version": "target, copy generation, Delta version",
            "suite": "digest of what all rows meet",
            "whole": "all rows were checked",
            "end_lsn": "position up to which the version has changes",
        },
    ),
    "reconciliations": (
        "comparisons with the source",
        {
            "table_name, generation": "target, copy generation",
            "status, reason": "the result ([results](../how-to/reconcile.md)), and why",
            "position, snapshot": "where the source was read",
            "version, batch": "compared Delta version, its last batch",
            "source_rows, target_rows": "compared rows",
            "missing, extra, different, doubled": "differing rows; `doubled` keys exist twice",
            "in_flight, lacking": "skipped keys: changed during the comparison; quarantined",
            "repaired": "corrected rows",
            "buckets, differing_buckets": "compared checksums",
            "is_complete": "all were examined",
            "skipped_columns": "columns that weren't compared",
            "differences": "first rows: `kind`, `key`, `rows`, and `columns` with both values",
            "seconds, source_seconds": "duration, the source's part",
            "by": "who started it",
        },
    ),
}

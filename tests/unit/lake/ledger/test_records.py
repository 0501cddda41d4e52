"""The tables of the ledger as lakes have them: no change of a class changes them."""

from datetime import UTC, datetime

import pytest

from waldelta.lake.ledger import (
    BatchCut,
    ColumnProfile,
    Decision,
    ExpectationResult,
    Gap,
    Reconciliation,
    RowDifference,
    Run,
    SentMessage,
    SlotMove,
    StorageState,
    TableState,
    TargetCut,
)
from waldelta.lake.ledger.check_records import ColumnDifference, PassedSuite, Profile
from waldelta.lake.ledger.records import (
    AttributeState,
    FileState,
    LabelState,
    LedgerRow,
    ReadWindowSetting,
    row_of,
    schema_of,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
# Types as Arrow prints them.
TIME = "timestamp[us, tz=UTC]"
TARGETS = (
    "list<item: struct<table_name: string, generation: int64, version: int64, inserted: int64,"
    " updated: int64, deleted: int64, skipped: int64, truncated: bool, completed: int64,"
    " quarantined: int64, raw_rows: int64, commit_ts: timestamp[us, tz=UTC]>>"
)
# A table's name and columns, without those that all have: when, and by which run.
TABLES = {
    SlotMove: """slot_moves
        event: string, slot: string, system_identifier: string, timeline: int64, incarnation:
        string, lsn: int64, batch: int64, compared_after: bool, messages: int64, changes: int64,
        format: int64""",
    TableState: """tables
        table_name: string, generation: int64, status: string, snapshot: string, snapshot_lsn:
        int64, relation_ids: list<item: int64>, key_columns: list<item: string>, columns: list<item:
        struct<name: string, type_oid: int64, typmod: int64, type_name: string, stored_type: string,
        not_null: bool, attnum: int64, stopped: bool, source_name: string>>, row_filter:
        string, rows: int64, bytes: int64, seconds: double, reason: string, incarnation:
        string, storage: struct<files: list<item: struct<oid: int64, relfilenode: int64,
        inherits: string>>, attributes: list<item: struct<attnum: int64, xmin: int64,
        has_missing: bool, default_oid: int64, name: string, comment: string>>,
        labels: list<item: struct<attnum: int64, oid: int64, label: string>>, as_of: int64>,
        target_filter: string, later_filters:
        list<item: string>, publishes: list<item: string>, unpublished: list<item: int64>,
        source_table: string, root_id: int64, unrepaired_leaves: list<item: int64>, entries:
        list<item: string>, version: int64, external_commits: list<item: struct<version:
        int64, operation: string, by: string, at: TIME>>, mode: string, copy_skipped: bool,
        stored_name: string""",
    BatchCut: """batches
        batch: int64, end_lsn: int64, commit_ts: TIME, targets: TARGETS, expired: bool""",
    Run: """runs
        verb: string, status: string, run_type: string, interval_start: TIME, interval_end: TIME,
        start_lsn: int64, end_lsn: int64, changes: int64, seconds: double, result: string, as_of:
        TIME, lag_before_bytes: int64, lag_bytes: int64, retained_bytes: int64, wal_status:
        string, applied: bool, started_at: TIME, targets: TARGETS,
        land_seconds: double, apply_seconds: double, check_seconds: double""",
    Gap: """gaps
        status: string, slot: string, system_identifier: string, timeline: int64, incarnation:
        string, from_lsn: int64, to_lsn: int64, cause: string, detail: string, remedy: string""",
    ReadWindowSetting: """read_windows
        window_bytes: int64, timeout_s: int64""",
    Decision: """decisions
        status: string, table_name: string, generation: int64, batch: int64, key: string, columns:
        list<item: string>, values: string, lsn: int64, commit_ts: TIME, reason: string, messages:
        list<item: struct<batch: int64, seq: int64, lsn: int64, xid: int64, raw: binary>>, by:
        string, outdated: bool, row_id: string, kind: string, why: string, decided_at: TIME,
        incarnation: string, timeline: int64, after_lsn: int64, upto_lsn: int64""",
    Reconciliation: """reconciliations
        table_name: string, status: string, reason: string, generation: int64, position: int64,
        batch: int64, version: int64, snapshot: string, source_rows: int64, target_rows: int64,
        missing: int64, extra: int64, different: int64, doubled: int64, in_flight: int64, lacking:
        int64, repaired: int64, buckets: int64, differing_buckets: int64, is_complete: bool,
        skipped_columns: list<item: string>, differences: list<item: struct<kind: string, key:
        string, rows: int64, columns: list<item: struct<name: string, source: string, target:
        string>>, hash: int64>>, seconds: double, source_seconds: double, by: string""",
    ExpectationResult: """expectations
        table_name: string, expectation: string, meaning: string, severity: string, origin:
        string, success: bool, observed: string, unexpected_count: int64, version: int64,
        not_checked: list<item: string>, suite: string, examples: list<item: string>""",
    Profile: """profiles
        table_name: string, version: int64, rows: int64, columns: list<item: struct<name: string,
        nulls: double, mean: double, deviation: double, least: double, most: double>>""",
    PassedSuite: """passed_suites
        table_name: string, generation: int64, version: int64, suite: string, whole: bool,
        end_lsn: int64""",
}


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_the_schema_of_a_table(kind):
    """Names, order, types, and that every column may have nulls."""
    name, *columns = TABLES[kind].split()
    schema = schema_of(kind)
    written = ", ".join(f"{field.name}: {field.type}" for field in schema)
    assert kind.table == name
    assert written.replace(TARGETS, "TARGETS").replace(TIME, "TIME") == (
        "at: TIME, run_id: string, " + " ".join(columns)
    )
    assert all(field.nullable for field in schema)


def test_every_kind_of_row_has_its_table():
    kinds = {kind.__name__ for kind in LedgerRow.__subclasses__()}
    assert kinds == {kind.__name__ for kind in TABLES}


STORAGE = StorageState([FileState(1, 2)], [AttributeState(1, 7)], [LabelState(1, 5, "sad")], 9)
MESSAGE = SentMessage(4, 7, 1 << 33, 999, b"I\x00\xff")
DIFFERENCE = RowDifference("different", "{}", 1, [ColumnDifference("a", None, "1")], 3)
# What a table has, and the row that it is.
ROWS = {
    "a column that an earlier version lacks": (
        {"event": "intent", "slot": "s", "system_identifier": "1", "timeline": 1,
         "incarnation": "0/1", "lsn": 5},
        SlotMove(NOON, "r", "intent", "s", "1", 1, "0/1", 5),
    ),
    "nulls": (
        {"batch": 1, "end_lsn": 2, "commit_ts": None, "targets": None, "expired": None},
        BatchCut(NOON, "r", 1, 2, None, [], expired=False),
    ),
    "a list that may be null": (
        {"verb": "consume", "status": "failed", "targets": None},
        Run(NOON, "r", "consume", "failed", targets=None),
    ),
    "a column and a field of a later version": (
        {"batch": 1, "end_lsn": 2, "commit_ts": NOON, "later": 1,
         "targets": [{"table_name": "t", "generation": 1, "version": 3, "later": 2}]},
        BatchCut(NOON, "r", 1, 2, NOON, [TargetCut("t", 1, 3)]),
    ),
    "a struct's null field": (
        {"batch": 1, "end_lsn": 2, "commit_ts": NOON,
         "targets": [{"table_name": "t", "generation": 1, "version": 3, "completed": None}]},
        BatchCut(NOON, "r", 1, 2, NOON, [TargetCut("t", 1, 3)]),
    ),
    "a struct of lists": (
        {"table_name": "t", "generation": 1, "status": "synced", "storage": {
            "files": [{"oid": 1, "relfilenode": 2, "inherits": None}],
            "attributes": [{"attnum": 1, "xmin": 7, "has_missing": False, "default_oid": None}],
            "labels": [{"attnum": 1, "oid": 5, "label": "sad"}], "as_of": 9,
        }},
        TableState(NOON, "r", "t", 1, "synced", storage=STORAGE),
    ),
    "a struct that an earlier version wrote": (
        {"table_name": "t", "generation": 1, "status": "synced",
         "storage": {"files": [], "attributes": [], "labels": None, "as_of": None}},
        TableState(NOON, "r", "t", 1, "synced", storage=StorageState()),
    ),
    "no struct": (
        {"table_name": "t", "generation": 1, "status": "synced", "storage": None},
        TableState(NOON, "r", "t", 1, "synced"),
    ),
    "bytes": (
        {"status": "waiting", "table_name": "t", "generation": 1, "batch": 2, "key": "{}",
         "columns": None, "messages": [
            {"batch": 4, "seq": 7, "lsn": 1 << 33, "xid": 999, "raw": b"I\x00\xff"}]},
        Decision(NOON, "r", "waiting", "t", 1, 2, "{}", messages=[MESSAGE]),
    ),
    "lists in a list": (
        {"table_name": "t", "status": "different", "differences": [
            {"kind": "different", "key": "{}", "rows": 1, "hash": 3,
             "columns": [{"name": "a", "source": None, "target": "1"}]}]},
        Reconciliation(NOON, "r", "t", "different", differences=[DIFFERENCE]),
    ),
    "a null in a column without a default": (
        {"table_name": "t", "expectation": "e", "meaning": "m", "severity": "s", "origin": "o",
         "success": None, "observed": None, "unexpected_count": None, "version": None},
        ExpectationResult(NOON, "r", "t", "e", "m", "s", "o", None, None, None, None),
    ),
    "numbers": (
        {"table_name": "t", "version": 1, "rows": 2,
         "columns": [{"name": "a", "nulls": 0.5, "mean": None}]},
        Profile(NOON, "r", "t", 1, 2, [ColumnProfile("a", 0.5)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("values, row", ROWS.values(), ids=ROWS)
def test_a_row_from_the_values_of_its_table(values, row):
    assert row_of(type(row), values | {"at": NOON, "run_id": "r"}) == row


def test_a_row_needs_the_columns_without_a_default():
    """Rather than a row that has nulls for columns that nobody read."""
    with pytest.raises(TypeError, match="lsn"):
        row_of(SlotMove, {"at": NOON, "run_id": "r", "event": "intent"})

"""A target's state and columns, as suites are planned for them."""

from datetime import UTC, datetime

from waldelta.lake.ledger import ColumnState, TableState

HELD = ["id", "_wd_lsn", "_wd_commit_ts", "_wd_raw"]


def state(columns, keys=("id",), row_filter=None, target_filter=None):
    states = [ColumnState(n, 0, -1, t, s, nn) for n, t, s, nn in columns]
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return TableState(
        at, "r", "public.t", 1, "synced", key_columns=list(keys), columns=states,
        row_filter=row_filter, target_filter=target_filter,
    )  # fmt: skip


ID = ("id", "bigint", "bigint", True)

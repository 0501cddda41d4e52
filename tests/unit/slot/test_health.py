"""The slot's health: forecasts, warnings, and the oldest transaction that it waits for."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.data.messages import (
    TS,
    T,
    aborted,
    chunk,
    commit,
    decided,
    plain,
    prepared,
    row,
    written,
)
from tests.support.slot_state import SLOT as UNREMARKABLE
from waldelta.config.pipeline_file import SlotLimits
from waldelta.lake.changelog import Snapshot
from waldelta.lake.ledger import SlotMove
from waldelta.lsn import Lsn
from waldelta.slot.health import forecast, slot_warnings, wal_rate

NOW = datetime(2026, 11, 1, 3, tzinfo=UTC)
GB = 1 << 30
SLOT = replace(
    UNREMARKABLE,
    confirmed_flush_lsn=Lsn(20 * GB),
    restart_lsn=Lsn(20 * GB),
    retained_bytes=2 * GB,
    wal_bytes_per_hour=float(GB),
)


def moved(ago: timedelta, lsn: int) -> SlotMove:
    return SlotMove(NOW - ago, "r", "intent", "s", "1", 1, "0/0", lsn)


# WAL ends at 22 GB.
RATES = {
    "the server's average": (SLOT, None, GB),
    "nothing known": (replace(SLOT, wal_bytes_per_hour=None), None, None),
    "more since the last move": (SLOT, moved(timedelta(minutes=30), 20 * GB), 4 * GB),
    "less since the last move": (SLOT, moved(timedelta(hours=10), 20 * GB), GB),
    "too short ago to tell": (SLOT, moved(timedelta(minutes=1), 20 * GB), GB),
    "a move beyond the end, as after a restore": (SLOT, moved(timedelta(hours=1), 30 * GB), GB),
}


@pytest.mark.parametrize("case", RATES)
def test_rate(case):
    slot, move, expected = RATES[case]
    assert wal_rate(slot, move, NOW) == expected


LIMITS = {
    "no limit": (None, None, None),
    "the server's": (3 * GB, None, ("max_slot_wal_keep_size", 3.0)),
    "the budget, 2 GB of it used": (None, 3 * 1024, ("slot_limits.disk_budget_mb", 1.0)),
    "the nearer one": (3 * GB, 3 * 1024, ("slot_limits.disk_budget_mb", 1.0)),
    "beyond it": (None, 1024, ("slot_limits.disk_budget_mb", 0.0)),
}


@pytest.mark.parametrize("case", LIMITS)
def test_forecast(case):
    safe, budget, expected = LIMITS[case]
    found = forecast(
        replace(SLOT, safe_wal_size=safe), SlotLimits(disk_budget_mb=budget), None, NOW
    )
    assert (found and (found.limit, found.hours)) == expected


WARNINGS = {
    "fine": (SLOT, []),
    "enough time": (replace(SLOT, safe_wal_size=5 * GB), []),
    "little time": (replace(SLOT, safe_wal_size=2 * GB),
     [("warning", "is lost in 2 hours unless it moves: 2 GB are left")]),
    "very little time": (replace(SLOT, safe_wal_size=GB // 4),
     [("critical", "is lost in 15 minutes")]),
    "no rate, no forecast": (replace(SLOT, safe_wal_size=0, wal_bytes_per_hour=None), []),
    "much held back": (replace(SLOT, retained_bytes=6 * GB),
     [("warning", "slot_limits.warn_mb is 5 GB")]),
    "too much": (replace(SLOT, retained_bytes=60 * GB),
     [("critical", "slot_limits.critical_mb is 49 GB")]),
    "with what spilled": (
        replace(SLOT, retained_bytes=6 * GB, spilled=3, spilled_bytes=5 * GB),
        [
            (
                "warning",
                "of its transactions 3 didn't fit into logical_decoding_work_mem (5 GB spilled)",
            )
        ],
    ),
    "about to be lost": (replace(SLOT, wal_status="unreserved"),
     [("critical", "is lost at the next checkpoint")]),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNINGS)
def test_warnings(case):
    slot, expected = WARNINGS[case]
    found = slot_warnings(slot, SlotLimits(), None, NOW)
    assert [w.severity for w in found] == [severity for severity, _ in expected]
    for warning, (severity, part) in zip(found, expected, strict=True):
        assert part in str(warning)
        assert str(warning).startswith("critical: ") == (severity == "critical")


# The helpers commit plain transactions at TS, streamed ones a microsecond later, prepared ones two
# later; None: nothing is lacking.
CASES = {
    "a plain one": ([plain(7, row(1))], 0, 0),
    "one that was applied": ([plain(7, row(1)), plain(8)], 1, None),
    "of another table": ([plain(7)], 0, None),
    "a streamed one": ([chunk(7, row(1, 7)) + commit(7)], 0, 1),
    "a streamed one before a plain one":
     ([chunk(7, row(1, 7)) + commit(7) + plain(9, row(2))], 0, 0),
    "a streamed one that was rolled back": ([chunk(7, row(1, 7)) + aborted(7, 7)], 0, None),
    "a prepared one": ([prepared(7, row(1)), decided(7)], 0, 2),
    "one prepared in a batch that was applied": ([prepared(7, row(1)), decided(7)], 1, 2),
    "one that is prepared only": ([prepared(7, row(1))], 0, None),
}  # fmt: skip


@pytest.mark.parametrize(("batches", "applied", "later_by"), CASES.values(), ids=CASES)
def test_the_oldest_commit_that_has_landed(tmp_path, batches, applied, later_by):
    """Of rows that came before their commit it is known by the message that decided them."""
    log = written(tmp_path, *batches)
    found = log.oldest_commit(log.stream(applied, len(batches)), [T], Snapshot(0, 0))
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=TS)
    assert found == (None if later_by is None else at + timedelta(microseconds=later_by))

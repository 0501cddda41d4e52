"""An estimate's lines and its warning, from the numbers that it has."""

import pytest

from waldelta.quantities import duration
from waldelta.stages.setup.estimate import CopyEstimate

MB = 1 << 20
PER_MINUTE = CopyEstimate(
    tables=5, rows=1_234_567, source_bytes=800 * MB, lake_bytes=200 * MB, seconds=600,
    longest_seconds=300, sampled={"public.a": 2.04, "public.b": 1.0}, wal_bytes_per_minute=10 * MB,
    wal_limit_mb=1024,
)  # fmt: skip


def changed(**values):
    fields = {name: getattr(PER_MINUTE, name) for name in CopyEstimate.__dataclass_fields__}
    return CopyEstimate(**fields | values)


def test_the_lines_name_rows_bytes_minutes_wal_and_cost():
    amount, time, wal, cost = PER_MINUTE.describe()
    assert amount == (
        "5 tables, about 1,230,000 rows: reads 800 MB on the source, writes about 200 MB to the"
        " lake"
    )
    assert time.startswith("about 10 minutes with ")
    assert "(sample: public.a for 2.0 s, public.b for 1.0 s)" in time
    assert wal == (
        "WAL: the server writes about 10 MB a minute now, so the slot keeps about 100 MB until the"
        " copy ends (max_slot_wal_keep_size: 1 GB)"
    )
    assert "sequential scans of 800 MB" in cost
    assert cost.endswith("snapshots that hold vacuum back for up to 5 minutes")


@pytest.mark.parametrize(
    "limit_mb, rate, warns",
    [
        (-1, 10_000 * MB, False),
        (100, 10 * MB, False),
        (99, 10 * MB, True),
        (0, 1, True),
        (99, None, False),
    ],
)
def test_a_slot_that_would_be_lost_is_a_warning(limit_mb, rate, warns):
    found = changed(wal_limit_mb=limit_mb, wal_bytes_per_minute=rate).findings
    assert [finding.severity for finding in found] == ["warning"] * warns
    assert all("max_slot_wal_keep_size is" in finding.text for finding in found)


def test_what_is_unknown_is_said():
    assert changed(unknown="the server is away").describe() == ["no estimate: the server is away"]
    assert "unknown" in changed(wal_bytes_per_minute=None).describe()[2]
    assert "no limit" in changed(wal_limit_mb=-1).describe()[2]
    assert changed(unread=("public.c",)).describe()[-1].startswith("without public.c, which")
    assert "sample: none" in changed(sampled={}).describe()[1]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "1 second"),
        (1.1, "2 seconds"),
        (59, "59 seconds"),
        (59.1, "1 minute"),
        (3599, "1 hour"),
        (61, "1 minute"),
        (359_940, "4.2 days"),
    ],
)
def test_a_duration_has_one_unit(seconds, text):
    assert duration(seconds) == text

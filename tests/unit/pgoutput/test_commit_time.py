"""Commit times as integers, whichever message brings them, and the moment that is shown of each."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from tests.support import pgoutput_encoder as enc
from waldelta.pgoutput.commit_time import EARLIEST, LATEST, shown, shown_at
from waldelta.pgoutput.envelope import Envelope
from waldelta.pgoutput.messages import begun_at, read_control

LEAST, GREATEST, SHIFT = -(1 << 63), (1 << 63) - 1, 946_684_800_000_000
# PostgreSQL's microseconds since 2000, those since 1970, and what is shown.
TIMES = {
    "2000": (0, SHIFT, datetime(2000, 1, 1, tzinfo=UTC)),
    "20000": (568_024_704_000_000_000, 568_971_388_800_000_000, LATEST),
    "44 BC": (-64_477_900_800_000_000, -63_531_216_000_000_000, EARLIEST),
    "4714 BC": (-211_813_488_000_000_000, SHIFT - 211_813_488_000_000_000, EARLIEST),
    "294276": (9_223_371_331_199_999_999, GREATEST, LATEST),
    "infinity": (GREATEST, GREATEST, LATEST),
    "-infinity": (LEAST, LEAST + SHIFT, EARLIEST),
}


@pytest.mark.parametrize(("sent", "held", "seen"), TIMES.values(), ids=TIMES)
def test_every_time_is_taken(sent, held, seen):
    """By Begin and Commit, by what decides other transactions, or by a waiting one's first."""
    at = sent.to_bytes(8, "big", signed=True)
    begin, commit = enc.begin(100, SHIFT, 7), enc.commit(100, 110, SHIFT)
    begin = begin[:9] + at + begin[17:]
    rows = Envelope(1000).add([1, 2], [7, 7], enc.messages(begin, commit[:18] + at))
    assert rows["commit_ts"].cast(pa.int64()).to_pylist() == [held, held]
    assert shown(rows["commit_ts"]).to_pylist() == [seen, seen]
    streamed = enc.stream_commit(7, 100, 110, SHIFT)[:-8] + at
    assert (read_control(streamed).at_us, begun_at(begin), shown_at(held)) == (held, held, seen)


def test_what_is_shown_is_a_moment_wherever_the_reader_is():
    """First and last have a local time in the zones furthest from UTC; null stays null."""
    for moment in (EARLIEST, LATEST):
        for zone in ("Etc/GMT+12", "Etc/GMT-14"):
            assert moment.astimezone(ZoneInfo(zone)).year in (1, 9999)
    expected = [None, datetime(1970, 1, 1, tzinfo=UTC)]
    assert shown(pa.array([None, 0], pa.timestamp("us", "UTC"))).to_pylist() == expected

"""Commit times, as integers until they are displayed, since no calendar covers PostgreSQL's range.

A replication origin sets the commit time of the transactions that it applies: the infinities, years
before Christ and beyond 9999 are legal. The change log stores microseconds since 1970, as in
Delta's timestamps. PostgreSQL counts from 2000, so infinity and the years from 294247 exceed that
integer and become its greatest value. The order is kept. Targets, the ledger and pages show the
nearest time in a calendar that every reader has.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.byte_readers import EPOCH_SHIFT_US, ArrowArray, Positions

# One day within the years 1 to 9999, so that a reader's time zone doesn't lead out of them.
EARLIEST, LATEST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
SHOWN = pa.timestamp("us", "UTC")
UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_EARLIEST_US, _LATEST_US = (
    (EARLIEST - UNIX_EPOCH) // _MICROSECOND,
    (LATEST - UNIX_EPOCH) // _MICROSECOND,
)
_GREATEST_US = np.iinfo(np.int64).max


def unix_us(times: Positions) -> Positions:
    """PostgreSQL's timestamps as microseconds since 1970.

    >>> unix_us(np.array([0, -946_684_800_000_000, 2**63 - 1, -(2**63)])).tolist() == [
    ...     946_684_800_000_000, 0, 2**63 - 1, 946_684_800_000_000 - 2**63]
    True
    """
    return np.asarray(np.minimum(times, _GREATEST_US - EPOCH_SHIFT_US) + EPOCH_SHIFT_US)


def shown(times: ArrowArray) -> ArrowArray:
    """Returns times of the change log, as timestamps or integers, limited to the displayed
    calendar.
    """
    numbers = times.cast(pa.int64())
    limited = pc.min_element_wise(
        pc.max_element_wise(numbers, pa.scalar(_EARLIEST_US), skip_nulls=False),
        pa.scalar(_LATEST_US),
        skip_nulls=False,
    )
    return limited.cast(SHOWN)


def shown_at(time_us: int) -> datetime:
    """Returns one displayed time.

    >>> shown_at(2**63 - 1).isoformat(), shown_at(0).isoformat()
    ('9999-12-31T00:00:00+00:00', '1970-01-01T00:00:00+00:00')
    """
    return UNIX_EPOCH + min(max(time_us, _EARLIEST_US), _LATEST_US) * _MICROSECOND

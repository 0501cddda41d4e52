"""What the change log says of a range of its batches without reading their rows."""

from __future__ import annotations

import pytest

from tests import pgoutput_encoder as enc
from tests.unit.spark_jobs.test_decode_streams import plain
from tests.unit.test_pending import written

ROWS = plain(7, enc.insert(16400, ["1", "x"]))
TRUNCATE, OTHERS = plain(8, enc.truncate([16399, 16400])), plain(8, enc.truncate([16401]))


@pytest.mark.parametrize(
    "after, upto, expected", [(0, 5, 2), (1, 2, 2), (2, 5, 4), (2, 3, None), (4, 5, None), (0, 0, None)]
)
def test_the_first_truncate(tmp_path, after, upto, expected):
    """However far back it is looked for, nothing else is read."""
    log = written(tmp_path, OTHERS + ROWS, TRUNCATE, ROWS + OTHERS, TRUNCATE, ROWS)
    assert log.first_truncate(after, upto, [16400]) == expected

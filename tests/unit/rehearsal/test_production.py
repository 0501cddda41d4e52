"""What a rehearsal knows of production: how long copies take there."""

from __future__ import annotations

import pytest

from waldelta.rehearsal.production import Production, TableSize

GB = 1 << 30
SIZES = {"s.big": TableSize(1_000_000, 10 * GB), "s.other": TableSize(100_000, GB)}


@pytest.mark.parametrize(
    ("copies", "seconds", "speed"),
    [
        ({}, 204.8, "at an assumed 50 MB in a second"),
        ({"s.big": (9_999, 60.0)}, 204.8, "at an assumed 50 MB in a second"),
        ({"s.gone": (500_000, 60.0)}, 204.8, "at an assumed 50 MB in a second"),
        ({"s.other": (100_000, 30.0)}, 300.0, "at the speed of this pipeline's copies"),
        ({"s.other": (50_000, 15.0)}, 300.0, "at the speed of this pipeline's copies"),
        ({"s.big": (500_000, 60.0), "s.other": (100_000, 1.0)}, 120.0,
         "at the speed of its last copy"),
    ],
)  # fmt: skip
def test_a_copy_takes_as_long_as_those_before_it(copies, seconds, speed):
    production = Production("", "schema.sql", None, SIZES, copies)
    assert production.copy_time("s.big") == (pytest.approx(seconds), speed)

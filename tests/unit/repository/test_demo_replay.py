"""The replay's slices, without a database."""

from datetime import timedelta
from itertools import pairwise

import pytest

from demo.flights import data_folder, open_csv
from demo.replay import plan_slices


@pytest.mark.parametrize("count", [1, 4, 7])
def test_slices_cover_the_year_without_gap_or_overlap(count):
    """Every hour lies in exactly one slice, however many there are."""
    slices = plan_slices(count)
    assert len(slices) == count
    assert all(a.last == b.first for a, b in pairwise(slices))
    assert slices[-1].last - slices[0].first == timedelta(days=369)


def test_csv_files_are_found_without_importing_the_package():
    """The packaged files are read as files: the package's own import needs pkg_resources."""
    with open_csv("flights") as file:
        assert file.readline().startswith(b"year,month,day,dep_time")
    assert (data_folder() / "weather.csv").exists()

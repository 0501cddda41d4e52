"""The pages' pictures can be taken: the ledger's own writers write the lakes that they show."""

import pytest

from tests.pictures.__main__ import write_story
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger


@pytest.mark.soak("the lakes of the pictures")
def test_the_lakes_of_the_pictures_are_written(tmp_path):
    write_story(tmp_path)
    assert Ledger(Lake(f"file://{tmp_path}/lakes/orders")).last_run() is not None

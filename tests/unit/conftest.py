"""What holds for all unit tests."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_forced() -> Iterator[None]:
    """Files aren't forced onto the disk, which takes most of the time of tests that write tables.

    What has to be forced, and when, is asked of `os.fsync` by tests.support.disk.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield

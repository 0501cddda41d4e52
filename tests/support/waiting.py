"""Waiting for what a test's other processes and threads do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 120) -> None:
    """Return once the condition holds; fails when it doesn't in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)

"""Runs work concurrently with a block of code, in a thread that ends with the block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_concurrently(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run ``work`` while the block runs.

    ``work`` gets an event, and must return once that is set.
    """
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

"""What a test does in the middle of a copy: with its snapshot taken and its chunks planned, before
its rows are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from waldelta.stages.sync._write import write_copy


def before_rows(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Have each copy do this first."""

    def write(*given: Any) -> Any:
        action()
        return write_copy(*given)

    monkeypatch.setattr("waldelta.stages.sync.copy_table.write_copy", write)

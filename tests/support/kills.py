"""Kills of a run, as far as this process can have one: nothing handles what is raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Killed(BaseException):
    """What a kill is to the process."""


@contextmanager
def killed_in(function: str) -> Iterator[None]:
    """Have the block killed where it calls this function, named by its module."""

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, kill)
        with pytest.raises(Killed):
            yield


@contextmanager
def killed_at(step: str, module: str) -> Iterator[None]:
    """Have the block killed at this fault point of a module."""

    def at(reached: str) -> None:
        if reached == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.fault_point", at)
        with pytest.raises(Killed):
            yield

"""Fault points: nothing outside of tests; in tests each one is known to the matrix."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.soak.listener import Listener
from tests.soak.steps import STEPS
from waldelta.fault import SOCKET, fault_point

ROOT = Path(__file__).parents[2]


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv(SOCKET, raising=False)
    monkeypatch.setattr("socket.socket", None)
    fault_point("land.committed")


def test_a_point_waits_until_what_is_armed_for_it_is_over(tmp_path, monkeypatch):
    """Once, and at the pass that is asked for."""
    listener = Listener(tmp_path / "socket")
    monkeypatch.setenv(SOCKET, str(listener.path))
    met: list[int] = []
    done = listener.arm("b", met.append, after=1)
    for step in ("a", "b", "b", "b"):
        fault_point(step)
    listener.close()
    assert (listener.reached, met, done.is_set()) == (["a", "b", "b", "b"], [os.getpid()], True)


def test_the_matrix_has_every_fault_point():
    sources = [*ROOT.glob("spark_jobs/*.py"), *ROOT.glob("include/waldelta/**/*.py")]
    points = [name for path in sources for name in re.findall(r'fault_point\("([\w.]+)"\)', path.read_text())]
    assert sorted(points) == sorted({step.point for step in STEPS})

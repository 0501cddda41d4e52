"""Fault points: nothing outside of tests; in tests each one is known to the matrix."""

import os
import re
from pathlib import Path
from string import Template

import pytest

from tests.soak.fault_matrix import units
from tests.soak.listener import Listener
from tests.soak.page import figures
from tests.soak.steps import FAULTS, FOLDER_FAULTS, STEPS, STORE_FAULTS, cells
from waldelta.failpoints import SOCKET, fault_point

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
    points = [
        name
        for path in sources
        for name in re.findall(r'fault_point\("([\w.]+)"\)', path.read_text())
    ]
    assert sorted(points) == sorted({step.point for step in STEPS})


@pytest.mark.parametrize("in_store", [False, True])
def test_the_matrix_tries_every_cell_once_and_every_step_and_fault_early(in_store):
    wanted = cells([], [], in_store=in_store)
    planned = list(units(wanted, 4))
    names = [(step.name, fault) for unit in planned for step, fault in unit]
    assert sorted(names) == sorted((step.name, fault) for step, fault in wanted)
    for unit in planned:
        assert len({fault for _, fault in unit}) == 1
        assert len(unit) <= (4 if FAULTS[unit[0][1]].own_process else 1)
    early = names[: len(names) // 4]
    assert {step for step, _ in early} == {step.name for step, _ in wanted}
    assert {fault for _, fault in early} == set(STORE_FAULTS if in_store else FOLDER_FAULTS)


def test_the_page_counts_what_was_tried():
    """Cells not reached are neither good nor bad; those of an older version are told apart."""
    cell = {
        "step": "land.committed",
        "seconds": 3.0,
        "problems": [],
        "at": "2026-01-01",
        "ended": "killed by signal 9",
    }
    results = {
        "land.committed | driver": cell | {"fault": "driver", "code": "new"},
        "land.committed | jvm": cell | {"fault": "jvm", "code": "old", "at": "2025-12-31"},
        "land.committed | disk": (
            cell | {"fault": "disk", "problems": ["w1: 1 rows lost"], "code": "new"}
        ),
        "land.committed | server": (
            cell | {"fault": "server", "ended": "not reached; succeeded", "code": "new"}
        ),
        "a step that is no more | jvm": cell | {"fault": "jvm", "code": "old"},
    }
    on_s3 = {
        f"{step} | late PUT": cell | {"fault": "late PUT", "code": "new"}
        for step in ("land.reading", "land.committed")
    }
    said = figures(results, on_s3, [], [], "new")
    assert "| `land` | · | · | · | · | · | – | ✗ |" in said["matrix"]
    assert (said["cells"], said["bad"], said["unreached"], said["recovery"]) == ("3", "1", "1", "3")
    assert "1 of them" in said["older"]
    draft = ROOT / "tests/soak/guarantees_page.md"
    assert set(Template(draft.read_text()).get_identifiers()) == set(said)
    assert "| `land` | · | · | · | · | ✓ |" in said["matrix_on_s3"]
    assert (said["cells_on_s3"], said["bad_on_s3"], said["unreached_on_s3"]) == ("2", "0", "0")

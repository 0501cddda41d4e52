"""The stack's processes end completely: children, orphans, and those that ignore SIGTERM."""

import os
import sys

import psutil
import pytest

from demo.stack import processes
from demo.stack.processes import MARK, StackError, end, finish, marked, start, stop, wait_until

SLEEP = "import time; time.sleep(600)"
# Starts a grandchild in a session of its own, ignores SIGTERM, and says when it has done so.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
    start_new_session=True)
print("ready", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def launch(tmp_path):
    environment = {**os.environ, MARK: str(tmp_path)}
    yield lambda code: start(
        "part",
        [sys.executable, "-c", code],
        folder=tmp_path,
        log=tmp_path / "logs/part.log",
        environment=environment,
    )
    end(marked(tmp_path), grace_s=0)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stopping_a_part_takes_its_descendants_along(launch, tmp_path):
    """Neither a deaf process nor a child in another process group survives."""
    part = launch(STUBBORN)
    wait_until(lambda: "ready" in part.log_tail(), "the child", 10, [part])
    grandchild = int(part.log_tail().split()[1])
    stop([part], grace_s=0.5)
    assert not part.alive
    assert not alive(grandchild)
    assert marked(tmp_path) == []


def test_an_orphan_is_found_by_its_mark(launch, tmp_path):
    part = launch(STUBBORN)
    wait_until(lambda: "ready" in part.log_tail(), "the child", 10, [part])
    psutil.Process(part.pid).kill()
    wait_until(lambda: not part.alive, "its end", 10)
    assert [p.pid for p in marked(tmp_path)] == [int(part.log_tail().split()[1])]
    end(marked(tmp_path), grace_s=0.5)
    assert marked(tmp_path) == []


def test_a_part_that_dies_while_starting_is_named_with_the_end_of_its_log(launch):
    part = launch("import sys; sys.exit('no port left')")
    with pytest.raises(StackError, match=r"part died while starting(.|\n)*no port left"):
        wait_until(lambda: False, "part", 10, [part])


def test_waiting_ends_with_the_log_when_time_is_up(launch):
    part = launch("import time; print('still busy', flush=True); time.sleep(600)")
    wait_until(lambda: "busy" in part.log_tail(), "its first line", 10)
    with pytest.raises(StackError, match=r"the server did not come up within 0 s(.|\n)*still busy"):
        wait_until(lambda: False, "the server", 0.1, [part])


def test_a_step_that_fails_is_an_error_with_its_log(launch):
    with pytest.raises(StackError, match=r"exit 1(.|\n)*migration refused"):
        finish(launch("import sys; sys.exit('migration refused')"), 10)


def test_a_reused_process_id_is_not_taken_for_the_part(launch):
    part = launch(SLEEP)
    assert part.alive
    assert not processes.Part(part.name, part.pid, part.created - 3600, part.log).alive


def test_logs_are_private(launch):
    part = launch(SLEEP)
    assert part.log.stat().st_mode & 0o077 == 0

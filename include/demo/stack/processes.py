"""Child processes of the embedded stack: starts them in their own groups, waits for them, and ends
them completely.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

# Every process of a stack has the stack's folder in this variable, and its children inherit it. So
# even an orphan in another process group is found.
MARK = "WALDELTA_STACK_FOLDER"
TAIL_LINES = 30
# A process's start time is counted from the boot, whose time moves when the clock is corrected.
CLOCK_DRIFT_S = 30


class StackError(RuntimeError):
    """A part of the stack did not start, or died."""


@dataclass
class Part:
    """One running process of the stack, identified by process id and start time, since ids are
    reused.
    """

    name: str
    pid: int
    created: float
    log: Path
    child: subprocess.Popen[bytes] | None = None
    needed: bool = True  # The stack doesn't fail with a part that only makes it faster.

    @property
    def alive(self) -> bool:
        if self.child is not None and self.child.poll() is not None:
            return False
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid)
            return abs(found.create_time() - self.created) < CLOCK_DRIFT_S and _living(found)
        return False

    def log_tail(self) -> str:
        """Returns the last lines of the log."""
        if not self.log.exists():
            return "(no log)"
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:]) or "(empty log)"


def start(
    name: str,
    command: Sequence[str],
    *,
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    held: Sequence[int] = (),
) -> Part:
    """Start a process in its own session, so that a terminal's Ctrl-C doesn't reach it; its files
    are private.

    The descriptors in ``held`` stay open as long as it runs.
    """
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    log.touch(mode=0o600)
    with log.open("ab") as output:
        child = subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
            pass_fds=held,
        )
    try:
        created = psutil.Process(child.pid).create_time()
    except psutil.NoSuchProcess:
        created = 0.0
    return Part(name, child.pid, created, log, child)


def wait_until(
    condition: Callable[[], bool], what: str, timeout_s: float, parts: Iterable[Part] = ()
) -> None:
    """Wait for a condition.

    Raises StackError with the end of the log when one of the parts dies or time runs out.
    """
    parts = tuple(parts)
    deadline = time.monotonic() + timeout_s
    while not condition():
        if dead := next((part for part in parts if part.needed and not part.alive), None):
            raise StackError(
                f"{dead.name} died while starting; the end of {dead.log}:\n{dead.log_tail()}"
            )
        if time.monotonic() > deadline:
            tails = "\n".join(f"--- the end of {part.log}:\n{part.log_tail()}" for part in parts)
            raise StackError(f"{what} did not come up within {timeout_s:.0f} s\n{tails}")
        time.sleep(0.1)


def finish(part: Part, timeout_s: float) -> None:
    """Wait for a process that ends by itself; raises StackError with the end of its log when it
    fails.
    """
    try:
        code = part.child.wait(timeout_s) if part.child is not None else 0
    except subprocess.TimeoutExpired:
        stop([part], grace_s=2)
        raise StackError(
            f"{part.name} took longer than {timeout_s:.0f} s:\n{part.log_tail()}"
        ) from None
    if code != 0:
        raise StackError(
            f"{part.name} failed (exit {code}); the end of {part.log}:\n{part.log_tail()}"
        )


def stop(parts: Iterable[Part], grace_s: float) -> None:
    """End these parts and all their descendants.

    Each part gets SIGTERM; after the grace period, all remaining processes get SIGKILL.
    """
    parts = [part for part in parts if part.alive]
    family: list[psutil.Process] = []
    for part in parts:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(part.pid)
            family += [process, *process.children(recursive=True)]
    for part in parts:
        with suppress(ProcessLookupError):
            os.kill(part.pid, signal.SIGTERM)
    end(_wait_for_end(family, grace_s, lambda: _reap(parts)), grace_s=0)
    _reap(parts)


def end(processes: Iterable[psutil.Process], grace_s: float = 5) -> None:
    """Send SIGTERM, then SIGKILL after the grace period, and wait until the processes are gone."""
    left = list(processes)
    for send in ("terminate", "kill"):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                getattr(process, send)()
        left = _wait_for_end(left, grace_s if send == "terminate" else 10)
        if not left:
            return


def marked(folder: Path) -> list[psutil.Process]:
    """Returns the living processes with this stack's mark, whatever their parent; never the
    caller.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if (
                process.pid != os.getpid()
                and process.environ().get(MARK) == str(folder)
                and _living(process)
            ):
                found.append(process)
    return found


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block as Ctrl-C does, so that ``finally`` blocks run."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    chosen = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in chosen}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Block signals that would end the program until the end of the block, so that cleanup
    completes.
    """
    chosen = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, chosen)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_end(
    processes: Iterable[psutil.Process],
    timeout_s: float,
    each_time: Callable[[], None] = lambda: None,
) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while True:
        each_time()
        left = [process for process in processes if _living(process)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.05)


def _living(process: psutil.Process) -> bool:
    # A zombie whose parent never waits for it counts as gone.
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _reap(parts: Iterable[Part]) -> None:
    for part in parts:
        if part.child is not None:
            part.child.poll()

"""CPU seconds and peak memory by process role, sampled during a measurement."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event

import psutil

from waldelta.background import run_concurrently

INTERVAL_S = 0.1
# The source's backends that work for the contender; the subscriber's backends; Spark; what the job
# or a baseline itself runs; Spark's Python workers; those of them that read the source.
ROLES = ("source", "subscriber", "jvm", "client", "workers", "reader")

_WORKER = re.compile("-m (pyspark.daemon|waldelta.changes.python_daemon)")
# Processes that a server has independently of its clients.
_AUXILIARY = re.compile(
    r"postgres: .*(checkpointer|background writer|walwriter|archiver|logger|io"
    r" worker|autovacuum|launcher)"
)


@dataclass
class Usage:
    """CPU seconds of all processes by role, and the peak memory of one process (MB, without shared
    memory).

    Memory isn't added up, because forked processes share most of it.
    """

    cpu_s: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)


def role_of(name: str, command: str) -> str:
    """Returns the role of a process that isn't PostgreSQL's; a worker may turn out to be a
    reader.
    """
    if name == "java":
        return "jvm"
    return "workers" if _WORKER.search(command) else "client"


def is_auxiliary(title: str) -> bool:
    """Returns whether a PostgreSQL process exists whatever is measured."""
    return _AUXILIARY.search(title) is not None


@contextmanager
def watched(servers: Mapping[str, int], trees: Sequence[int], source_port: int) -> Iterator[Usage]:
    """Watch servers, given by role and the postmaster's process id, and trees of processes.

    This process's new children are included. The figures are complete after the block. What a
    process does in its last tenth of a second isn't seen, except for PostgreSQL's backends, because
    their server adds up the CPU of those that ended.
    """
    usage = Usage()
    sampler = _Sampler(servers, trees, source_port)
    sampler.take()
    start = dict(sampler.cpu)
    before = {role: sampler.server_cpu_s(role, pid) for role, pid in servers.items()}

    def watch(done: Event) -> None:
        while not done.wait(INTERVAL_S):
            sampler.take()

    try:
        with run_concurrently(watch, "resources"):
            yield usage
    finally:
        sampler.take()
        cpu_s: dict[str, float] = defaultdict(float)
        for pid, seconds in sampler.cpu.items():
            cpu_s[sampler.roles[pid]] += seconds - start.get(pid, 0.0)
        for role, pid in servers.items():
            cpu_s[role] = sampler.server_cpu_s(role, pid) - before[role]
        usage.cpu_s = {role: cpu_s[role] for role in ROLES if role in cpu_s}
        usage.peak_mb = {role: sampler.peak[role] for role in ROLES if role in sampler.peak}


class _Processes:
    """All processes by their parents.

    Reading them takes CPU from the measured ones, so each process is read only once.
    """

    def __init__(self) -> None:
        self._children: dict[int, list[psutil.Process]] = {}
        self._known: dict[int, tuple[psutil.Process, int]] = {}
        self.look()

    def look(self) -> None:
        """Update the list of processes. One whose parent ended keeps its place."""
        pids = set(psutil.pids())
        for gone in self._known.keys() - pids:
            del self._known[gone]
        for pid in pids - self._known.keys():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                self._known[pid] = process, process.ppid()
        self._children = defaultdict(list)
        for process, parent in self._known.values():
            self._children[parent].append(process)

    def children(self, pid: int) -> list[psutil.Process]:
        return self._children[pid]

    def tree(self, pid: int, without: Set[int] = frozenset()) -> Iterator[psutil.Process]:
        """Yields a process and its descendants, but no subtree whose root is in ``without``."""
        if pid in self._known:
            yield self._known[pid][0]
        for child in self._children[pid]:
            if child.pid not in without:
                yield from self.tree(child.pid, without)


class _Sampler:
    """The last sample of each process, and the maximum memory by role."""

    def __init__(self, servers: Mapping[str, int], trees: Sequence[int], source_port: int) -> None:
        self._servers, self._trees, self._port = servers, trees, source_port
        self._processes = _Processes()
        self._standing = {child.pid for child in self._processes.children(os.getpid())}
        self._backends: dict[str, list[psutil.Process]] = {}
        self._titles: dict[int, bool] = {}
        self._names: dict[int, str] = {}
        self.cpu: dict[int, float] = {}
        self.roles: dict[int, str] = {}
        self.peak: dict[str, float] = {}

    def take(self) -> None:
        """Take one sample."""
        found = self._processes
        found.look()
        clients = [
            process
            for process in found.tree(os.getpid(), self._standing)
            if process.pid != os.getpid()
        ]
        for process in (*clients, *(process for pid in self._trees for process in found.tree(pid))):
            with suppress(psutil.Error), process.oneshot():
                role = self._role(process)
                times = process.cpu_times()
                self.cpu[process.pid] = times.user + times.system
                # A worker that has read continues with other tasks: memory for a merge isn't memory
                # for reading.
                reads = role != "reader" or self._reads_source(process)
                self._note_memory(role if reads else "workers", process)
        for role, pid in self._servers.items():
            self._backends[role] = [
                child for child in found.children(pid) if not self._is_auxiliary(child)
            ]
            for backend in self._backends[role]:
                with suppress(psutil.Error):
                    self._note_memory(role, backend)

    def _note_memory(self, role: str, process: psutil.Process) -> None:
        self.peak[role] = max(self.peak.get(role, 0.0), _private_mb(process))

    def server_cpu_s(self, role: str, postmaster: int) -> float:
        """Returns CPU seconds of a server's backends, both those that have ended and those alive at
        the last sample.

        A backend that ends between the two reads would be in neither, or in both. Then both are
        read again, unless backends end all the time.
        """
        total = 0.0
        for _ in range(100):
            ended = _ended_cpu_s(postmaster)
            total = ended + self._backends_cpu_s(role)
            if _ended_cpu_s(postmaster) == ended:
                break
        return total

    def _backends_cpu_s(self, role: str) -> float:
        total = 0.0
        for backend in self._backends[role]:
            with suppress(psutil.Error):
                times = backend.cpu_times()
                total += times.user + times.system
        return total

    def _is_auxiliary(self, process: psutil.Process) -> bool:
        if process.pid not in self._titles:
            with suppress(psutil.Error):
                self._titles[process.pid] = is_auxiliary(" ".join(process.cmdline()))
        return self._titles.get(process.pid, False)

    def _role(self, process: psutil.Process) -> str:
        name = process.name()
        # A process may become another program: a process that starts Java is first a shell.
        if process.pid not in self.roles or self._names[process.pid] != name:
            self._names[process.pid] = name
            self.roles[process.pid] = role_of(name, " ".join(process.cmdline()))
        if self.roles[process.pid] == "workers" and self._reads_source(process):
            self.roles[process.pid] = "reader"
        return self.roles[process.pid]

    def _reads_source(self, process: psutil.Process) -> bool:
        return any(c.raddr and c.raddr.port == self._port for c in process.net_connections("tcp"))


def _private_mb(process: psutil.Process) -> float:
    """Returns resident memory without shared memory: shared_buffers belong to no single backend."""
    memory = process.memory_info()
    return (memory.rss - getattr(memory, "shared", 0)) / 1e6


def _ended_cpu_s(postmaster: int) -> float:
    """Returns the CPU seconds of a server's backends that have ended."""
    times = psutil.Process(postmaster).cpu_times()
    return times.children_user + times.children_system

"""CPU seconds and peak memory by the role of a process, sampled while something is measured."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event

import psutil

from waldelta.beside import beside

INTERVAL_S = 0.1
# Backends of the source that work for whoever is measured; the subscriber's; Spark; what the job, or a baseline, runs itself;
# Spark's Python workers; of these the ones that read the source.
ROLES = ("source", "subscriber", "jvm", "client", "workers", "reader")

_WORKER = re.compile(r"-m (pyspark\.daemon|spark_jobs\.python_daemon)")
# Processes that a server has whoever it works for.
_AUXILIARY = re.compile(
    r"postgres: .*(checkpointer|background writer|walwriter|archiver|logger|io worker|autovacuum|launcher)"
)


@dataclass
class Usage:
    """By role: CPU seconds, and the largest memory of its processes together at one moment (MB, without shared memory)."""

    cpu_s: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)


def role_of(name: str, command: str) -> str:
    """What a process that isn't PostgreSQL's is; a worker may turn out to be a reader."""
    if name == "java":
        return "jvm"
    return "workers" if _WORKER.search(command) else "client"


def is_auxiliary(title: str) -> bool:
    """Whether one of PostgreSQL's processes is there whatever is measured."""
    return _AUXILIARY.search(title) is not None


@contextmanager
def watched(servers: Mapping[str, int], trees: list[int], source_port: int) -> Iterator[Usage]:
    """Watch servers, given by role and process id of the postmaster, and trees of processes with this one's new children.

    The figures are there after the block. What a process does in its last tenth of a second isn't seen, but with PostgreSQL's
    backends, whose server adds up what those that ended used.
    """
    usage = Usage()
    own = psutil.Process()
    standing = {child.pid for child in own.children(recursive=True)} - set(trees)
    sampler = _Sampler(source_port)
    before = {role: _backends_cpu_s(pid) for role, pid in servers.items()}
    sampler.take(servers, _processes(own, standing, trees))
    start = dict(sampler.cpu)

    def watch(done: Event) -> None:
        while not done.wait(INTERVAL_S):
            sampler.take(servers, _processes(own, standing, trees))

    try:
        with beside(watch, "resources"):
            yield usage
    finally:
        sampler.take(servers, _processes(own, standing, trees))
        cpu_s: dict[str, float] = defaultdict(float)
        for pid, seconds in sampler.cpu.items():
            cpu_s[sampler.roles[pid]] += seconds - start.get(pid, 0.0)
        for role, pid in servers.items():
            cpu_s[role] = _backends_cpu_s(pid) - before[role]
        usage.cpu_s = {role: cpu_s[role] for role in ROLES if role in cpu_s}
        usage.peak_mb = {role: sampler.peak[role] for role in ROLES if role in sampler.peak}


def _processes(own: psutil.Process, standing: set[int], trees: list[int]) -> list[psutil.Process]:
    """This process's descendants without those of ``standing``, and without what stands below one that isn't watched."""
    found = []
    with suppress(psutil.Error):
        found = [child for child in own.children(recursive=True) if child.pid not in standing]
    for pid in trees:
        with suppress(psutil.Error):
            root = psutil.Process(pid)
            found += [root, *root.children(recursive=True)]
    return list({process.pid: process for process in found}.values())


class _Sampler:
    """What was last seen of each process, and the largest sums by role."""

    def __init__(self, source_port: int) -> None:
        self._port = source_port
        self.cpu: dict[int, float] = {}
        self.roles: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self.peak: dict[str, float] = {}

    def take(self, servers: Mapping[str, int], processes: list[psutil.Process]) -> None:
        memory: dict[str, float] = defaultdict(float)
        for process in processes:
            with suppress(psutil.Error), process.oneshot():
                role = self._role(process)
                times = process.cpu_times()
                self.cpu[process.pid] = times.user + times.system
                memory[role] += _private_mb(process)
        for role, pid in servers.items():
            for backend in _backends(pid):
                with suppress(psutil.Error):
                    memory[role] += _private_mb(backend)
        for role, megabytes in memory.items():
            self.peak[role] = max(self.peak.get(role, 0.0), megabytes)

    def _role(self, process: psutil.Process) -> str:
        name = process.name()
        # A process may become another program: what starts Java is a shell at first.
        if process.pid not in self.roles or self._names[process.pid] != name:
            self._names[process.pid] = name
            self.roles[process.pid] = role_of(name, " ".join(process.cmdline()))
        known = self.roles[process.pid]
        if known == "workers" and self._reads_source(process):
            known = "reader"
        self.roles[process.pid] = known
        return known

    def _reads_source(self, process: psutil.Process) -> bool:
        return any(c.raddr and c.raddr.port == self._port for c in process.net_connections("tcp"))


def _private_mb(process: psutil.Process) -> float:
    """Resident memory without what is shared: a backend's share of shared_buffers is nobody's."""
    memory = process.memory_info()
    return (memory.rss - getattr(memory, "shared", 0)) / 1e6


def _backends(postmaster: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        children = psutil.Process(postmaster).children()
        return [child for child in children if not is_auxiliary(_title(child))]
    return []


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _backends_cpu_s(postmaster: int) -> float:
    """CPU seconds of all backends that have ended and of those that live."""
    times = psutil.Process(postmaster).cpu_times()
    total = times.children_user + times.children_system
    for backend in _backends(postmaster):
        with suppress(psutil.Error):
            own = backend.cpu_times()
            total += own.user + own.system
    return total

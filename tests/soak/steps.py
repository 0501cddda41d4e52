"""What the fault matrix consists of: the steps of runs, the faults, and which of them meet."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.soak.scene import Fault, Scene, family, kill_driver, kill_jvm, kill_process

Prepare = Callable[[Scene], None]
_FILE_BYTES = 1500  # a disk that is full in the middle of a file


def _changes(scene: Scene) -> None:
    scene.write()


def _columns(scene: Scene) -> None:
    scene.alter(*(["drop", "rename"] if scene.is_wide() else ["add default"]))


def _rewritten(scene: Scene) -> None:
    scene.alter("rewrite" if scene.is_wide() else "add volatile")


def _refiltered(scene: Scene) -> None:
    scene.refilter()


def _unpublished(scene: Scene) -> None:
    for _ in range(3):
        scene.connection.execute(b"select pg_logical_emit_message(false, 'x', repeat('x', 8000000))")
        scene.connection.execute(b"select pg_switch_wal()")


def _written_down(scene: Scene) -> None:
    """The slot's position, without which maintenance forgets nothing; and then changes, as ever."""
    scene.connection.execute(b"checkpoint")
    scene.write()


def _slot_dropped(scene: Scene) -> None:
    scene.write(4)
    scene.connection.execute(
        b"select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = current_database()"
    )
    scene.write(4)


@dataclass(frozen=True)
class Step:
    """A moment of a run: its fault point, the verb that passes it, and what is written to the source before."""

    point: str
    verb: str = "consume"
    prepare: Prepare = _changes
    group: str = ""
    checked: bool = False

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.group}: {self.point}" if self.group else self.point


_SYNC = ("sync.begun", "sync.planned", "sync.reading", "sync.committed", "sync.recorded")
STEPS: tuple[Step, ...] = (
    *(Step(point) for point in (
        "run.begun", "land.reading", "land.committed", "consume.landed", "consume.intended", "consume.copied",
        "consume.got", "consume.moved",
    )),
    Step("idle.intended", prepare=_unpublished),
    *(Step(point) for point in (
        "apply.staged", "apply.merging", "apply.merged", "apply.applied", "apply.cutting", "apply.cut",
    )),
    *(Step(point, prepare=_columns) for point in ("reshape.begun", "reshape.committed", "reshape.recorded")),
    *(Step(point, prepare=_rewritten, group="recopy") for point in _SYNC),
    *(Step(point, prepare=_refiltered) for point in ("repair.begun", "repair.merged")),
    *(Step(point, checked=True) for point in ("check.begun", "check.ended")),
    Step("run.ended"),
    *(Step(point, "sync", group="sync") for point in _SYNC),
    *(Step(point, "resync", _slot_dropped, "resync") for point in (
        "resync.recorded", "setup.publications", "resync.compared", *_SYNC,
    )),
    *(Step(point, "maintain", _written_down) for point in (
        "maintain.compacted", "maintain.forgetting", "maintain.forgotten", "maintain.pruned",
    )),
)  # fmt: skip


def _full_disk(_: Scene, pid: int) -> None:
    """No file of the run may grow any more: the same error in the same places as a full disk, without one."""
    for process in family(pid):
        is_ours = os.getsid(process.pid) == os.getsid(pid)  # and no other driver's that we have started
        if is_ours and (process.name() == "java" or process.pid == pid):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY))


def disk_is_free(pid: int) -> None:
    """Files may grow again."""
    for process in family(pid):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _stall(scene: Scene, _: int) -> None:
    """No byte for a while, then all goes on."""
    scene.network.stall()
    time.sleep(1.5)
    scene.network.heal()


@dataclass(frozen=True)
class Kind:
    """A fault; ``own_process``: it takes the run's process with it, ``of_worker``: a task's; ``only_at``: where it means anything."""

    fault: Fault
    own_process: bool = False
    of_worker: bool = False
    only_at: tuple[str, ...] = ()


_TASKS = ("land.reading", "sync.reading")
FAULTS: dict[str, Kind] = {
    "driver": Kind(kill_driver, own_process=True),
    "python": Kind(kill_process, own_process=True),
    "jvm": Kind(kill_jvm, own_process=True),
    "worker": Kind(kill_process, of_worker=True, only_at=_TASKS),
    "backend": Kind(lambda scene, _: scene.end_backends()),
    "server": Kind(lambda scene, _: scene.restart_server()),
    "disk": Kind(_full_disk),
    "network": Kind(lambda scene, _: scene.network.cut()),
    "mid-message": Kind(lambda scene, _: scene.network.cut_after(1000), only_at=_TASKS),
    "zombie": Kind(lambda scene, _: None),  # see Matrix._zombie
    "stall": Kind(_stall, only_at=(*_TASKS, "consume.copied", "apply.staged")),
}


def cells(steps: Sequence[str], faults: Sequence[str]) -> list[tuple[Step, str]]:
    """The cells of the matrix that are asked for: steps by the beginning of their names, faults by name; none for all."""
    chosen = [step for step in STEPS if not steps or any(step.name.startswith(asked) for asked in steps)]
    return [
        (step, fault)
        for fault in faults or FAULTS
        for step in chosen
        if not FAULTS[fault].only_at or step.point in FAULTS[fault].only_at
    ]

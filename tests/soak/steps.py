"""What the fault matrix consists of: the steps of runs, the faults, and which of them meet."""

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak import preparations as prepared
from tests.soak.scene import (
    CHECKED,
    IN_STEPS,
    PLAIN,
    Fault,
    Scene,
    family,
    kill_driver,
    kill_jvm,
    kill_process,
)

Prepare = Callable[[Scene], None]
_FILE_BYTES = 1500  # a disk that is full in the middle of a file


@dataclass(frozen=True)
class Step:
    """A moment of a run: its fault point, the verb that passes it, what is written to the source
    before, and the pipeline file.

    ``within``: not the point itself, but what the server does next, a statement of which this is a
    part.
    """

    point: str
    verb: str = "consume"
    prepare: Prepare = prepared.changes
    group: str = ""
    file: str = PLAIN
    within: str = ""

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.group}: {self.point}" if self.group else self.point


def _steps(*points: str, **alike: Any) -> tuple[Step, ...]:
    return tuple(Step(point, **alike) for point in points)


_APPLY = ("apply.staged", "apply.merging", "apply.merged", "apply.applied")
_APPLY += ("apply.cutting", "apply.cut")
_SYNC = ("sync.begun", "sync.planned", "sync.reading", "sync.committed", "sync.recorded")
_MEND = ("repair.begun", "repair.merged", "repair.recorded")
_RESHAPE = ("reshape.begun", "reshape.committed", "reshape.recorded")
_RENEW = ("setup.dropped", "setup.publications", "setup.creating", "setup.created")
STEPS: tuple[Step, ...] = (
    *_steps("run.begun", "land.reading", "land.committed"),
    *_steps("consume.landed", "consume.intended", "consume.copied"),
    Step("consume.copied", group="within get", within="pg_logical_slot_get_binary_changes"),
    *_steps("consume.got", "consume.moved"),
    *_steps("idle.intended", "idle.moved", prepare=prepared.unpublished),
    *_steps(
        "recover.compared", "idle.intended", "idle.moved", prepare=prepared.behind, group="behind"
    ),
    *_steps("failover.marked", "failover.recorded", prepare=prepared.failed_over),
    *_steps("messages.writing", "messages.written", prepare=prepared.emitted),
    *_steps("takeover.removed", "takeover.fenced", prepare=prepared.left_staged),
    *_steps(*_APPLY),
    # One step is applied while the next ones land.
    *_steps(
        *("land.reading", "land.committed", "consume.intended", "consume.got", "consume.moved"),
        *_APPLY,
        prepare=prepared.many_changes,
        group="overlapped",
        file=IN_STEPS,
    ),
    *(
        Step(point, prepare=prepared.renamed)
        for point in ("move.begun", "move.renamed", "move.recorded")
    ),
    Step("complete.recorded", prepare=prepared.incomplete),
    Step("external.recorded", prepare=prepared.written_by_others),
    *_steps("rewrite.recorded", *_RESHAPE, prepare=prepared.columns),
    *_steps("resync.marked", *_SYNC, "sync.staged", prepare=prepared.rewritten, group="recopy"),
    Step("sync.touched", prepare=prepared.copy_killed, group="recopy"),
    *_steps("resync.marked", *_MEND, prepare=prepared.refiltered),
    *_steps("check.begun", "check.reported", "check.ended", file=CHECKED),
    Step("run.ended"),
    *_steps(*_MEND, verb="replay", prepare=prepared.damaged, group="replay"),
    *_steps(*_MEND, verb="decide", prepare=prepared.quarantined, group="quarantine"),
    *_steps(*_SYNC, verb="sync", group="sync"),
    *_steps(*_SYNC[:-1], verb="sync", prepare=prepared.returned, group="first"),
    *_steps(
        *("resync.recorded", *_RENEW, "resync.compared", *_SYNC),
        verb="resync",
        prepare=prepared.slot_dropped,
        group="resync",
    ),
    *_steps(
        *("maintain.compacted", "maintain.cleaned"),
        *("maintain.forgetting", "maintain.forgotten", "maintain.pruned"),
        verb="maintain",
        prepare=prepared.written_down,
    ),
    Step("maintain.purged", "maintain", prepared.with_vectors),
    Step("maintain.divided", "maintain", prepared.divided),
)


def _full_disk(_: Scene, pid: int) -> None:
    """No file of the run may grow any more, which fails as a full disk does."""
    for process in family(pid):
        is_ours = os.getsid(process.pid) == os.getsid(
            pid
        )  # and no other driver's that we have started
        if is_ours and (process.name().startswith(("java", "python")) or process.pid == pid):
            resource.prlimit(
                process.pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY)
            )


def disk_is_free(pid: int) -> None:
    """Files may grow again."""
    for process in family(pid):
        resource.prlimit(
            process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )


def _stall(scene: Scene, _: int) -> None:
    """No byte for a while, then all goes on."""
    scene.network.stall()
    time.sleep(1.5)
    scene.network.heal()


def _restart_store(scene: Scene, _: int) -> None:
    assert scene.store is not None
    scene.store.server.restart()


@dataclass(frozen=True)
class Kind:
    """A fault; ``own_process``: it takes the run's process with it, ``of_worker``: a task's;
    ``only_at``: where it means anything; ``of_store``: it needs a lake in an object store;
    ``of_all``: all pipelines meet it; ``is_late``: what the run sends next arrives after its death.

    ``within``: whether it means anything while the run waits for the server's answer.
    """

    fault: Fault
    own_process: bool = False
    of_worker: bool = False
    only_at: tuple[str, ...] = ()
    within: bool = True
    of_store: bool = False
    of_all: bool = False
    is_late: bool = False


_TASKS = ("land.reading", "sync.reading")
FAULTS: dict[str, Kind] = {
    "driver": Kind(kill_driver, own_process=True),
    "python": Kind(kill_process, own_process=True),
    "jvm": Kind(kill_jvm, own_process=True),
    "worker": Kind(kill_process, of_worker=True, only_at=_TASKS),
    "backend": Kind(lambda scene, _: scene.end_backends()),
    "server": Kind(lambda scene, _: scene.restart_server(), of_all=True),
    "disk": Kind(_full_disk),
    "network": Kind(lambda scene, _: scene.network.cut()),
    "mid-message": Kind(lambda scene, _: scene.network.cut_after(1000), only_at=_TASKS),
    # See Matrix._zombie. A run that waits for an answer when its connections end is at its end.
    "zombie": Kind(lambda scene, _: None, within=False),
    "stall": Kind(_stall, only_at=(*_TASKS, "consume.copied", "apply.staged")),
    "store": Kind(_restart_store, of_store=True, of_all=True),
    "late PUT": Kind(kill_driver, own_process=True, of_store=True, is_late=True),
}
FOLDER_FAULTS = tuple(name for name, kind in FAULTS.items() if not kind.of_store)
# Of a lake in an object store, these steps are tried: runs, copies and maintenance. The faults that
# aren't are of the source's connections, or of a disk.
STORE_STEPS = ("run.", "land.", "consume.", "within get", "takeover.", "apply.", "sync", "first")
STORE_STEPS += ("maintain.",)
STORE_FAULTS = ("driver", "jvm", "zombie", "store", "late PUT")


def cells(
    steps: Sequence[str], faults: Sequence[str], *, in_store: bool = False
) -> list[tuple[Step, str]]:
    """The cells asked for: steps by the beginning of their names, faults by name."""
    if in_store:
        steps, faults = steps or STORE_STEPS, faults or STORE_FAULTS
    chosen = [
        step for step in STEPS if not steps or any(step.name.startswith(asked) for asked in steps)
    ]
    return [
        (step, fault)
        for fault in faults or FOLDER_FAULTS
        for step in chosen
        if (not FAULTS[fault].only_at or step.point in FAULTS[fault].only_at)
        and (FAULTS[fault].within or not step.within)
    ]

"""How each kind of workload is measured: what is written, and in which order the contenders run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from benchmarks import sources
from benchmarks.contenders import Contender, make
from benchmarks.decode import decode_workload
from benchmarks.ours import Waldelta
from benchmarks.place import PUBLICATION, RAW_SLOT, Place, place
from benchmarks.results import Measurement, Round
from benchmarks.sources import ORDERS
from benchmarks.stack import Stack
from benchmarks.workloads import (
    FRESH,
    IDLE,
    NAIVE,
    OWN_SYNC,
    WARM,
    Backlog,
    Changes,
    Decode,
    Drift,
    Estimate,
    Idle,
    Sync,
    Tables,
    Variant,
    Workload,
    scaled,
)

# The share of a backlog that is written and applied before the measured rounds, so that servers and
# JVM are warm.
WARM_UP = 0.2
WARM_UP_ROUND = -1
# The naive program takes longer than all other contenders together, so it runs once.
ONCE = (NAIVE,)
Report = Callable[[Measurement], None]


@dataclass(frozen=True)
class Plan:
    """The options of the command line."""

    scale: float = 1.0
    rounds: int = 3

    def numbers(self) -> range:
        """Returns the rounds, with the warm-up round first."""
        return range(WARM_UP_ROUND, self.rounds)


def run(stack: Stack, workload: Workload, plan: Plan) -> list[Measurement]:
    """Measure one workload."""
    match workload:
        case Tables():
            return _changes(stack, _as_changes(workload, plan), plan)
        case Changes():
            return _changes(stack, workload, plan)
        case Sync() | Estimate():
            measure = _sync if isinstance(workload, Sync) else _estimate
            return measure(stack, workload, plan)
        case Idle():
            return _idle(stack, workload, plan)
        case Drift():
            return _drift(stack, workload, plan)
        case Decode():
            return decode_workload(
                workload, scaled(workload.messages, plan.scale, 1000), plan.rounds
            )
    raise TypeError(f"{type(workload).__name__} is no kind of workload")


def _as_changes(workload: Tables, plan: Plan) -> Changes:
    """Returns the workload with the number of tables at this scale; rows and changes per table
    stay.
    """
    source = sources.many(scaled(workload.tables, plan.scale, 1))
    backlog = Backlog(
        workload.changes * len(source.tables), sources.each_of(source, workload.changes)
    )
    return Changes(
        workload.name,
        workload.about,
        workload.rows,
        (backlog,),
        workload.contenders,
        source,
        scalable=False,
    )


def _changes(stack: Stack, workload: Changes, plan: Plan) -> list[Measurement]:
    scale = plan.scale if workload.scalable else 1.0
    rows = scaled(workload.rows, scale)
    found = _Rounds(workload.name)
    with (
        place(stack, workload.source, workload.name, rows) as there,
        _taking_part(there, workload) as contenders,
    ):
        for contender in contenders:
            contender.prepare()
        for number in plan.numbers():
            for backlog in workload.backlogs:
                part = WARM_UP if number == WARM_UP_ROUND and workload.scalable else 1
                changes = scaled(backlog.changes, scale * part)
                write_backlog(there, replace(backlog, changes=changes))
                # In alternating order, so that no contender always profits from caches that another
                # one has filled.
                for contender in contenders[:: -1 if number % 2 else 1]:
                    if contender.name not in ONCE or number <= 0:
                        measured = stack.measure(contender.apply, contender.trees)
                        contender.settle()
                        found.add(number, backlog.name, contender, changes, measured)
                # Not directly after the contender, so that no other one finds in caches what this
                # has read.
                for contender in contenders if number == 0 else []:
                    if contender.name in ONCE:
                        contender.verify()
                there.sql(
                    f"select pg_replication_slot_advance('{RAW_SLOT}', pg_current_wal_flush_lsn())"
                )
        for contender in contenders:
            if contender.name not in ONCE:
                contender.verify()
    return found.measurements()


@contextmanager
def _taking_part(there: Place, workload: Changes | Sync) -> Iterator[list[Contender]]:
    variants = workload.variants if isinstance(workload, Changes) else (Variant(),)
    with ExitStack() as closing:
        contenders: list[Contender] = []
        for name in workload.contenders:
            for contender in make(name, there, variants):
                closing.callback(contender.close)
                contenders.append(contender)
        yield contenders


def write_backlog(there: Place, backlog: Backlog) -> None:
    """Write it to the source."""
    statement = backlog.statement.format(
        changes=backlog.changes,
        transactions=backlog.changes // 100 - 1,
        newest=sources.newest(backlog.changes) if backlog.clustered else "",
    )
    there.sql(statement)


def _sync(stack: Stack, workload: Sync, plan: Plan) -> list[Measurement]:
    rows = scaled(workload.rows, plan.scale)
    found = _Rounds(workload.name)
    with (
        place(stack, ORDERS, workload.name, rows) as there,
        _taking_part(there, workload) as contenders,
    ):
        for contender in contenders:
            if not contender.baseline:
                contender.job("setup")
        for number in plan.numbers():
            for contender in contenders[:: -1 if number % 2 else 1]:
                if contender.name not in ONCE or number <= 0:
                    measured = stack.measure(contender.copy, contender.trees)
                    # Verified at once, because the native subscriber truncates its tables next.
                    if number == (0 if contender.name in ONCE else plan.rounds - 1):
                        contender.verify()
                    contender.settle()
                    if isinstance(contender, Waldelta):
                        contender.begin_anew()
                    found.add(number, "", contender, rows, measured)
    return found.measurements()


def _estimate(stack: Stack, workload: Estimate, plan: Plan) -> list[Measurement]:
    rows = scaled(workload.rows, plan.scale)
    found = _Rounds(workload.name)
    with place(stack, workload.source, workload.name, rows) as there:
        ours = Waldelta(there, FRESH, Variant(document={"quality": {"enabled": False}}), 0)
        ours.job("setup")
        for number in plan.numbers():
            estimated = ours.estimate()
            measured = stack.measure(ours.first_copy, ours.trees)
            shares = ours.share_of_estimate(estimated, measured.notes)
            found.add(number, "", ours, rows, replace(measured, notes=measured.notes | shares))
            ours.begin_anew()
        ours.close()
    return found.measurements()


# The imports and queries of an Airflow worker before it starts anything.
LOOK = """
import sys
from waldelta.stages.land.idle_check import check_idle
from waldelta.pipeline.job import load_job
from waldelta.config.pipeline_file import load_pipeline_file
assert not check_idle(load_job(load_pipeline_file(sys.argv[1]))).has_work
"""


def _idle(stack: Stack, workload: Idle, plan: Plan) -> list[Measurement]:
    found = _Rounds(workload.name)
    with place(stack, ORDERS, workload.name, 1000) as there:
        ours = Waldelta(there, WARM, Variant(), 0)
        ours.prepare()
        ours.name = IDLE
        ours.job("consume")
        there.sql(NEIGHBOURS)
        for number in plan.numbers():
            write_unpublished(there)
            found.add(number, "", ours, 0, stack.measure(lambda: _look(ours), list))
        ours.close()
    return found.measurements()


NEIGHBOURS = "create table neighbours(id bigint, note text)"


def write_unpublished(there: Place) -> None:
    """Write about 16 MB of WAL of an unpublished table.

    An idle check of a slot must read past it in a database with other tables.
    """
    there.sql(
        "insert into neighbours select g, repeat(md5(g::text), 30) from generate_series(1, 16000) g"
    )


def _look(ours: Waldelta) -> None:
    subprocess.run([sys.executable, "-c", LOOK, str(ours.file)], check=True, env=ours.environment())


def _drift(stack: Stack, workload: Drift, plan: Plan) -> list[Measurement]:
    """Each round makes a new copy, then applies the publication's other filter with the repairing
    run.
    """
    rows, moving = scaled(workload.rows, plan.scale), scaled(workload.moving, plan.scale)
    filters = (f"id <= {rows - moving}", f"id > {moving}")
    found = _Rounds(workload.name)
    with place(stack, ORDERS, workload.name, rows) as there:
        there.sql(f"alter publication {PUBLICATION} set table orders where ({filters[0]})")
        ours = Waldelta(
            there,
            WARM,
            Variant(target={"drift": "repair"}, document={"quality": {"enabled": False}}),
            0,
        )
        ours.prepare()
        for number in plan.numbers():
            found.add(
                number,
                "",
                _Named(OWN_SYNC, baseline=True),
                rows,
                stack.measure(ours.copy, ours.trees),
            )
            there.sql(
                f"alter publication {PUBLICATION} set table orders where ({filters[number % 2]})"
            )
            found.add(number, "", ours, 2 * moving, stack.measure(ours.apply, ours.trees))
        ours.verify(filters[number % 2])
        ours.close()
    return found.measurements()


@dataclass(frozen=True)
class _Named:
    name: str
    baseline: bool


class _Rounds:
    """The rounds of a workload, as they come; warm-up rounds aren't kept."""

    def __init__(self, workload: str) -> None:
        self._workload = workload
        self._found: dict[tuple[str, str], Measurement] = {}

    def add(
        self,
        number: int,
        backlog: str,
        contender: Contender | _Named,
        changes: int,
        measured: Round,
    ) -> None:
        name, baseline = contender.name, contender.baseline
        place = " ".join(filter(None, (self._workload, backlog, name)))
        label = "warm-up" if number == WARM_UP_ROUND else f"round {number + 1}"
        print(f"{place}, {label}: {measured.seconds:.2f} s {_brief(measured)}", flush=True)
        if number != WARM_UP_ROUND:
            empty = Measurement(self._workload, backlog, name, changes, [], baseline)
            self._found.setdefault((backlog, name), empty).rounds.append(measured)

    def measurements(self) -> list[Measurement]:
        """Returns the measurements by backlog, in the order in which they came first."""
        backlogs: Sequence[str] = list(dict.fromkeys(backlog for backlog, _ in self._found))
        return sorted(self._found.values(), key=lambda one: backlogs.index(one.backlog))


def _brief(measured: Round) -> str:
    return " ".join(f"{name} {value:,.2f}" for name, value in measured.notes.items())

"""Killed tasks, a killed scheduler, runs at once, success marked by hand."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event

import psutil
import psycopg
import pytest

from demo.airflow_client import DagRun
from demo.stack import Stack
from demo.stack.stack import AIRFLOW
from tests.e2e.shop import CDC, NO_COPY, Shop, change, clear, make_shop
from tests.soak.lakes import SoakLake
from tests.soak.listener import Listener
from tests.support.waiting import wait_until

DAG = "desk_cdc"
TIMEOUT_S = 120.0
CHANGED = {"desk/public.orders", "desk/public.visits"}
# Without a key: a row that is applied twice stands there twice.
VISITS = """
create table visits (place int, what text);
alter table visits replica identity full;
insert into visits select n % 3, 'seen' from generate_series(1, 9) n;
"""


@pytest.fixture(scope="module")
def desk(stack: Stack) -> Iterator[Shop]:
    yield from make_shop(stack, "desk", "waldelta_spark", "- {name: public.visits}", VISITS)


@dataclass
class Stopped:
    """A job that waits at a fault point until it is killed."""

    pid: int = 0
    there: Event = field(default_factory=Event)
    gone: Event = field(default_factory=Event)

    def wait(self) -> int:
        """Wait until the job is there; gives its process id."""
        assert self.there.wait(TIMEOUT_S), "no job came to the fault point"
        return self.pid

    def wait_for_its_end(self) -> None:
        assert self.gone.wait(TIMEOUT_S), "the job is still there"


def stop_at(fault_points: Listener, step: str) -> Stopped:
    """Stop the next job that comes to this step."""
    stopped = Stopped()

    def stop(pid: int) -> None:
        stopped.pid = pid
        stopped.there.set()
        wait_until(lambda: not psutil.pid_exists(pid))

    stopped.gone = fault_points.arm(step, stop)
    return stopped


def write(desk: Shop) -> None:
    """Transactions on the tables; the one without a key gets equal rows."""
    change(desk)
    desk.source.execute("insert into visits select 1, 'again' from generate_series(1, 3)")
    desk.source.execute(
        "delete from visits where ctid in (select ctid from visits where place = 1 limit 2)"
    )


def assert_nothing_lost_or_doubled(desk: Shop) -> None:
    assert desk.is_equal()
    assert desk.target("visits", "place", "what") == desk.wanted("select place, what from visits")
    assert SoakLake(desk.root).landed_twice() == []


def announced(desk: Shop, run: DagRun) -> set[str]:
    return {
        event["name"]
        for event in desk.client.asset_events(source_dag_id=DAG, source_run_id=run.run_id)
    }


def mark_success(desk: Shop, run_id: str, task: str | None = None) -> None:
    """What "Mark state as success" does in the UI, to a run or a task of it."""
    path, state = f"/dags/{DAG}/dagRuns/{run_id}", "state"
    if task is not None:
        path, state = f"{path}/taskInstances/{task}", "new_state"
    desk.client.request("PATCH", path, json={state: "success"})


def let_time_pass(stack: Stack) -> None:
    """Has Airflow take the scheduler for gone, which otherwise takes its time."""
    with psycopg.connect(stack.postgres.conninfo(AIRFLOW)) as metadata:
        metadata.execute(
            "update job set latest_heartbeat = '2000-01-01' where job_type = 'SchedulerJob'"
        )


@pytest.mark.soak("a killed task of Airflow")
def test_killed_tasks_are_retried_and_tell_what_their_first_try_did(desk, fault_points):
    """The task between landing and consuming, and the job that has merged one table."""
    write(desk)
    landed = stop_at(fault_points, "land.committed")
    run_id = desk.client.trigger(DAG)
    landed.wait()
    task = desk.client.get(f"/dags/{DAG}/dagRuns/{run_id}/taskInstances/land")["pid"]
    merged = stop_at(fault_points, "apply.merged")
    os.kill(task, signal.SIGKILL)
    os.kill(merged.wait(), signal.SIGKILL)
    run = desk.client.wait(DAG, run_id)
    assert run.states == dict.fromkeys(CDC, "success") | NO_COPY
    assert {task.task_id for task in run.tasks if task.try_number > 1} >= {"land", "apply"}
    assert_nothing_lost_or_doubled(desk)
    assert announced(desk, run) == CHANGED


@pytest.mark.soak("a killed scheduler of Airflow")
def test_a_killed_schedulers_run_goes_on_and_those_triggered_meanwhile_follow_one_by_one(
    stack, desk, fault_points
):
    """Killed with the slot about to move; two runs are triggered meanwhile."""
    write(desk)
    moving = stop_at(fault_points, "consume.intended")
    interrupted = desk.client.trigger(DAG)
    moving.wait()
    stack.kill_scheduler()
    moving.wait_for_its_end()
    let_time_pass(stack)
    write(desk)
    both = [desk.client.trigger(DAG) for _ in range(2)]
    stack.start_scheduler()
    runs = [desk.client.wait(DAG, run_id) for run_id in (interrupted, *both)]
    assert [run.state for run in runs] == ["success"] * 3
    assert all(
        first.end <= second.start
        for first, second in pairwise(sorted(runs, key=lambda run: run.start))
    )
    assert_nothing_lost_or_doubled(desk)


@pytest.mark.soak("runs marked by hand")
def test_what_was_marked_success_by_hand_is_brought_by_the_next_run(desk, fault_points):
    """A run whose job holds the slot; a task that has merged one table."""
    write(desk)
    consumed = stop_at(fault_points, "consume.moved")
    marked = desk.client.trigger(DAG)
    consumed.wait()
    merged = stop_at(fault_points, "apply.merged")
    mark_success(desk, marked)
    run_id = desk.client.trigger(DAG)
    consumed.wait_for_its_end()
    merged.wait()
    mark_success(desk, run_id, "apply")
    assert desk.client.wait(DAG, run_id).state == "success"
    merged.wait_for_its_end()
    assert announced(desk, desk.client.run(DAG, run_id)) == set()
    # Cleared, a run that was marked goes on as any other does.
    run = clear(desk, desk.client.run(DAG, marked))
    assert run.states == dict.fromkeys(CDC, "success") | NO_COPY
    assert_nothing_lost_or_doubled(desk)
    assert announced(desk, run) == CHANGED

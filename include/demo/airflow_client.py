"""A small client of Airflow's REST API, with which the demo and the tests act as a user would."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import httpx

FINISHED = frozenset({"success", "failed"})
_UNFINISHED_TASK = frozenset(
    {None, "none", "scheduled", "queued", "running", "restarting", "deferred", "up_for_retry"}
)


class AirflowError(RuntimeError):
    """The API refused a request, or a wait timed out."""


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task of a DAG run, in its latest try."""

    task_id: str
    state: str | None
    try_number: int
    map_index: int
    start: datetime | None
    end: datetime | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class DagRun:
    """One DAG run; ``seconds`` from its start to its end."""

    dag_id: str
    run_id: str
    run_type: str
    state: str
    start: datetime | None
    end: datetime | None
    seconds: float | None
    conf: Mapping[str, Any]
    tasks: tuple[TaskRun, ...] = ()

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def states(self) -> dict[str, str | None]:
        """State by task id."""
        return {task.task_id: task.state for task in self.tasks}


class AirflowClient:
    """The REST API of one Airflow with a user's login.

    The token is fetched on first use and when it expires.
    """

    def __init__(self, url: str, user: str, password: str) -> None:
        self.url, self.user = url.rstrip("/"), user
        self._password = password
        # Without trust_env, because a proxy of the environment must not handle the loopback
        # address.
        self._http = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"AirflowClient({self.url!r}, {self.user!r})"

    def close(self) -> None:
        self._http.close()

    def login(self) -> None:
        """Exchange user and password for a token."""
        answer = self._http.post(
            "/auth/token", json={"username": self.user, "password": self._password}
        )
        if answer.status_code != httpx.codes.CREATED:
            raise AirflowError(f"{self.url} refused user {self.user!r} (HTTP {answer.status_code})")
        self._http.headers["Authorization"] = f"Bearer {answer.json()['access_token']}"

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Send a request below /api/v2; returns the JSON answer.

        Raises AirflowError with the API's own message.
        """
        for attempt in (1, 2):
            if "Authorization" not in self._http.headers or attempt == 2:
                self.login()
            answer = self._http.request(method, f"/api/v2{path}", **options)
            if answer.status_code != httpx.codes.UNAUTHORIZED:
                break
        if answer.is_error:
            raise AirflowError(f"{method} {path}: HTTP {answer.status_code}: {answer.text[:2000]}")
        return answer.json() if answer.content else None

    def get(self, path: str, **params: Any) -> Any:
        return self.request("GET", path, params=params)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.request("POST", path, json=body)

    def page(self, path: str) -> str:
        """Returns the HTML of a page outside the API, such as a plugin's."""
        self.login()
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.text

    def health(self) -> dict[str, Any]:
        """Returns state and last heartbeat of metadata database, scheduler and DAG processor.

        It needs no login.
        """
        answer = self._http.get("/api/v2/monitor/health", timeout=5)
        answer.raise_for_status()
        return dict(answer.json())

    # DAGs

    def dag_ids(self) -> set[str]:
        return {str(dag["dag_id"]) for dag in self.get("/dags", limit=500)["dags"]}

    def import_errors(self) -> dict[str, str]:
        """Returns, by file name, the stack trace of DAG files that can't be imported."""
        found = self.get("/importErrors", limit=500)["import_errors"]
        return {str(error["filename"]): str(error["stack_trace"]) for error in found}

    def wait_for_dags(self, dag_ids: Collection[str], timeout_s: float = 90) -> None:
        """Wait until the DAG processor has parsed these DAGs."""

        def missing() -> list[str]:
            return sorted(set(dag_ids) - self.dag_ids())

        try:
            self._until(lambda: not missing(), timeout_s, "DAGs")
        except AirflowError:
            errors = "\n".join(self.import_errors().values()) or "no import errors"
            raise AirflowError(
                f"not parsed within {timeout_s:.0f} s: {', '.join(missing())}; {errors}"
            ) from None

    def unpause(self, dag_id: str, *, paused: bool = False) -> None:
        self.request("PATCH", f"/dags/{dag_id}", json={"is_paused": paused})

    def pause(self, dag_id: str) -> None:
        self.unpause(dag_id, paused=True)

    # Runs

    def trigger(
        self, dag_id: str, conf: Mapping[str, Any] | None = None, run_id: str | None = None
    ) -> str:
        """Start a manual run with these params; returns its run id.

        A run of a paused DAG doesn't begin.
        """
        body: dict[str, Any] = {"logical_date": None, "conf": dict(conf or {})}
        if run_id is not None:
            body["dag_run_id"] = run_id
        return str(self.post(f"/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def run(self, dag_id: str, run_id: str) -> DagRun:
        """Returns a run with the states of its tasks."""
        run = self.get(f"/dags/{dag_id}/dagRuns/{run_id}")
        tasks = self.get(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances", limit=500)[
            "task_instances"
        ]
        return _dag_run(run, tuple(sorted(map(_task_run, tasks), key=_by_start)))

    def runs(self, dag_id: str, **params: Any) -> list[DagRun]:
        """Returns the DAG's runs, newest first, without their tasks.

        ``params`` are those of the API (state, run_type, …).
        """
        found = self.get(
            f"/dags/{dag_id}/dagRuns", **{"order_by": "-run_after", "limit": 200} | params
        )
        return [_dag_run(run) for run in found["dag_runs"]]

    def wait(
        self,
        dag_id: str,
        run_id: str,
        timeout_s: float = 600,
        on_poll: Callable[[DagRun], None] | None = None,
    ) -> DagRun:
        """Wait until the run has finished, whatever its outcome; ``on_poll`` gets every polled
        state.
        """
        latest: list[DagRun] = []

        def has_finished() -> bool:
            latest[:] = [self.run(dag_id, run_id)]
            if on_poll is not None:
                on_poll(latest[0])
            return latest[0].finished

        try:
            self._until(has_finished, timeout_s, f"{dag_id} {run_id}")
        except AirflowError as err:
            states = latest[0].states if latest else {}
            raise AirflowError(f"{err}; tasks: {states}") from None
        return latest[0]

    def run_to_end(
        self,
        dag_id: str,
        conf: Mapping[str, Any] | None = None,
        timeout_s: float = 600,
        on_poll: Callable[[DagRun], None] | None = None,
    ) -> DagRun:
        """Trigger a run and wait for it.

        Raises AirflowError with the failed tasks' log when it does not succeed.
        """
        return self._succeeded(self.wait(dag_id, self.trigger(dag_id, conf), timeout_s, on_poll))

    def wait_for_scheduled(
        self, dag_id: str, timeout_s: float = 600, on_poll: Callable[[DagRun], None] | None = None
    ) -> DagRun:
        """Wait for the end of the newest run that the scheduler has created; raises as run_to_end()
        does.
        """
        created: list[DagRun] = []

        def is_created() -> bool:
            created[:] = self.runs(dag_id, run_type="scheduled", limit=1)
            return bool(created)

        self._until(is_created, timeout_s, f"{dag_id}'s scheduled run")
        return self._succeeded(self.wait(dag_id, created[0].run_id, timeout_s, on_poll))

    def _succeeded(self, run: DagRun) -> DagRun:
        if run.state != "success":
            raise AirflowError(
                f"{run.dag_id} {run.run_id} is {run.state}: {run.states}\n{self._failure_logs(run)}"
            )
        return run

    def log(
        self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1
    ) -> str:
        """Returns a task's log as text, one event per line, with all of its fields."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        headers = {"Accept": "application/json"}
        params = {"full_content": "true", "map_index": map_index}
        content = self.request("GET", path, params=params, headers=headers)["content"]
        return content if isinstance(content, str) else "\n".join(map(_log_line, content))

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        return self.get(path, deserialize=False)["value"]

    def rendered_fields(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """Returns the task's template fields as the UI shows them."""
        return dict(
            self.get(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}")["rendered_fields"]
        )

    def backfill(self, dag_id: str, start: datetime, end: datetime, **options: Any) -> int:
        """Create a backfill over [start, end]; returns its id.

        ``options`` are those of the API (reprocess_behavior, max_active_runs, dag_run_conf, …). Its
        runs have run_type backfill.
        """
        body = {
            "dag_id": dag_id,
            "from_date": start.isoformat(),
            "to_date": end.isoformat(),
            **options,
        }
        return int(self.post("/backfills", body)["id"])

    # Assets, connections, pools

    def asset_events(self, **params: Any) -> list[dict[str, Any]]:
        """Returns asset events, newest first.

        Filters are those of the API: source_dag_id, source_run_id, source_task_id, …
        """
        return list(
            self.get("/assets/events", **{"order_by": "-timestamp", "limit": 500} | params)[
                "asset_events"
            ]
        )

    def connection(self, conn_id: str) -> dict[str, Any] | None:
        """Returns a connection without its password; None when there is none."""
        found = self.get("/connections", connection_id_pattern=conn_id, limit=200)["connections"]
        return next((c for c in found if c["connection_id"] == conn_id), None)

    def set_connection(self, conn_id: str, conn_type: str, **fields: Any) -> None:
        """Create or replace a connection (host, port, login, password, schema, extra)."""
        body = {"connection_id": conn_id, "conn_type": conn_type, **fields}
        if self.connection(conn_id) is None:
            self.post("/connections", body)
        else:
            self.request("PATCH", f"/connections/{conn_id}", json=body)

    def set_pool(self, name: str, slots: int, description: str = "") -> None:
        """Create the pool unless it exists."""
        if name not in {pool["name"] for pool in self.get("/pools", limit=500)["pools"]}:
            self.post("/pools", {"name": name, "slots": slots, "description": description})

    def _failure_logs(self, run: DagRun) -> str:
        failed = [task for task in run.tasks if task.state in ("failed", "up_for_retry")]
        parts = []
        for task in failed:
            log = self.log(run.dag_id, run.run_id, task.task_id, max(1, task.try_number))
            parts.append(f"--- {task.task_id}\n{log[-4000:]}")
        return "\n".join(parts)

    @staticmethod
    def _until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AirflowError(f"{what}: not there within {timeout_s:.0f} s")
            time.sleep(0.5)


def unfinished(run: DagRun) -> list[str]:
    """Returns the tasks of a run that aren't finished."""
    return [task.task_id for task in run.tasks if task.state in _UNFINISHED_TASK]


def _by_start(task: TaskRun) -> tuple[bool, float, str]:
    return (task.start is None, task.start.timestamp() if task.start else 0.0, task.task_id)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def _dag_run(run: Mapping[str, Any], tasks: tuple[TaskRun, ...] = ()) -> DagRun:
    return DagRun(
        dag_id=run["dag_id"],
        run_id=run["dag_run_id"],
        run_type=run["run_type"],
        state=run["state"],
        start=_time(run["start_date"]),
        end=_time(run["end_date"]),
        seconds=run["duration"],
        conf=run["conf"] or {},
        tasks=tasks,
    )


def _task_run(task: Mapping[str, Any]) -> TaskRun:
    return TaskRun(
        task_id=task["task_id"],
        state=task["state"],
        try_number=task["try_number"],
        map_index=task["map_index"],
        start=_time(task["start_date"]),
        end=_time(task["end_date"]),
        seconds=task["duration"],
    )


def _log_line(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return str(entry)
    fields = " ".join(
        f"{k}={v}" for k, v in entry.items() if k not in ("timestamp", "level", "event", "logger")
    )
    head = " ".join(str(entry[k]) for k in ("timestamp", "level") if entry.get(k))
    return f"{head} {entry.get('event', '')} {fields}".strip()

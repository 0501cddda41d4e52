"""Where a secret must not be: arguments, Airflow's pages, Spark's configuration, files."""

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from demo.airflow_client import AirflowClient, DagRun

# pyspark keeps a process in one mode, classic or Connect, so a client is a process of its own.
CONFIGURATION = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
try:
    for row in spark.sql("set -v").collect() + spark.sql("set").collect():
        print(*row)
finally:
    spark.stop()
"""


@contextmanager
def none_in_arguments(secrets: Collection[str]) -> Iterator[None]:
    """Every process's arguments, looked at again and again during the block."""
    found: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for process in psutil.process_iter(["cmdline"]):
                line = " ".join(process.info["cmdline"] or ())
                if any(secret in line for secret in secrets):
                    found.append(line)
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert found == []


def assert_none_shown(client: AirflowClient, run: DagRun, secrets: Collection[str]) -> None:
    """Neither a task's log, its rendered templates nor its XComs have one."""
    for task in run.tasks:
        shown = str(client.rendered_fields(run.dag_id, run.run_id, task.task_id))
        if task.try_number:
            shown += client.log(run.dag_id, run.run_id, task.task_id, task.try_number)
        instance = f"/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/{task.task_id}"
        shown += str(client.get(f"{instance}/xcomEntries"))
        assert not [s for s in secrets if s in shown], f"{run.dag_id}.{task.task_id}"


def spark_configuration(remote: str) -> str:
    """What any session of a Connect server can read of its configuration."""
    run = subprocess.run(
        [sys.executable, "-c", CONFIGURATION], env=os.environ | {"SPARK_REMOTE": remote},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "spark.sql.session.timeZone" in run.stdout
    return run.stdout


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def contains(path: Path, secrets: Collection[str]) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:  # a file of a running server
        return False
    return any(secret.encode() in content for secret in secrets)


def readable_by_others(path: Path, top: Path) -> bool:
    """Whether another user reaches and reads the file."""
    try:
        folders = [p.stat().st_mode & stat.S_IXOTH for p in path.parents if p.is_relative_to(top)]
        return bool(path.stat().st_mode & stat.S_IROTH) and all(folders)
    except FileNotFoundError:
        return False

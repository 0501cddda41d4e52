"""Hive's metastore as a server of its own, from the jars that PySpark has."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waldelta.rehearsal.embedded_postgres import free_port
from waldelta.spark.settings import pyspark_folder

_START_S = 120.0
_AUTHORIZATION = "org.apache.hadoop.hive.ql.security.authorization"
_DERBY = "jdbc:derby:{}/metastore;create=true"
# Answers each line of SQL by a line of JSON; the first one is empty.
_READER = """
import json, sys
from pyspark.sql import SparkSession
from waldelta.spark.settings import SETTINGS, jars
builder = SparkSession.builder.master("local[1]")
settings = SETTINGS | {
    "spark.jars": ",".join(map(str, jars())),
    "spark.sql.catalogImplementation": "hive",
    "spark.sql.catalog.lake": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    sys.argv[1]: sys.argv[2],
}
for name, value in settings.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
exec(sys.argv[3])
print("[]", flush=True)
for statement in sys.stdin:
    frame = spark.sql(statement)
    frame = frame.drop("namespace", "isTemporary")
    print(json.dumps([list(row) for row in frame.collect()], default=str), flush=True)
"""


@contextmanager
def hive_metastore(folder: Path) -> Iterator[int]:
    """Run a metastore whose database is in a folder; yields its port.

    A connection's login may do what the permissions of folders allow it.
    """
    port = free_port()
    options = {
        "javax.jdo.option.ConnectionURL": _DERBY.format(folder),
        "hive.metastore.warehouse.dir": f"{(folder / 'warehouse').as_uri()}",
        "datanucleus.schema.autoCreateAll": "true",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.pre.event.listeners": f"{_AUTHORIZATION}.AuthorizationPreEventListener",
        "hive.security.metastore.authorization.manager": (
            f"{_AUTHORIZATION}.StorageBasedAuthorizationProvider"
        ),
    }
    command = [
        "java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC",
        f"-Dderby.stream.error.file={folder}/derby.log",
        # Its logging by a queue needs a jar that Spark leaves out.
        "-Dhive.async.log.enabled=false",
        "-cp", f"{pyspark_folder()}/jars/*", "org.apache.hadoop.hive.metastore.HiveMetaStore",
        "-p", str(port),
        *(part for name, value in options.items() for part in ("--hiveconf", f"{name}={value}")),
    ]  # fmt: skip
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        _wait(process, port, folder / "log")
        yield port
    finally:
        process.kill()
        process.wait()


@contextmanager
def spark_reader(
    metastore: int | Path, folder: Path, first: str = ""
) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    """Run a session of Spark with a metastore, by its port or the folder of its database; yields
    what returns a statement's rows. The session executes the Python code ``first`` before.
    """
    if isinstance(metastore, int):
        setting = ["spark.hadoop.hive.metastore.uris", f"thrift://127.0.0.1:{metastore}"]
    else:
        setting = ["spark.hadoop.javax.jdo.option.ConnectionURL", _DERBY.format(metastore)]
    with (folder / "reader.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _READER, *setting, first],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None

    def read(statement: str) -> list[tuple[Any, ...]]:
        print(statement, file=process.stdin, flush=True)
        return answer()

    def answer() -> list[tuple[Any, ...]]:
        line = process.stdout.readline()
        assert line, (folder / "reader.log").read_text()[-4000:]
        return [tuple(row) for row in json.loads(line)]

    try:
        answer()
        yield read
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(log.read_text()[-4000:])

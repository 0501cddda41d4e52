"""Hive's metastore as a server of its own, from the jars that PySpark has."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.embedded_postgres import free_port
from waldelta.spark.settings import pyspark_folder

_START_S = 120.0


@contextmanager
def hive_metastore(folder: Path, port: int | None = None) -> Iterator[int]:
    """Run a metastore whose database is in a folder; yields its port."""
    port = port or free_port()
    options = {
        "javax.jdo.option.ConnectionURL": f"jdbc:derby:{folder}/metastore;create=true",
        "hive.metastore.warehouse.dir": f"{(folder / 'warehouse').as_uri()}",
        "datanucleus.schema.autoCreateAll": "true",
        "hive.metastore.schema.verification": "false",
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

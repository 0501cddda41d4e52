"""A Spark Connect server on this machine, bound to loopback, which requires a token;
``waldelta connect-server`` runs it.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from waldelta.errors import ConfigError
from waldelta.permissions import private_files
from waldelta.spark.java import check_java
from waldelta.spark.settings import (
    LOCAL_WORKERS,
    LOG4J,
    TASK_ATTEMPTS,
    authentication,
    driver_memory,
    driver_settings,
    jars,
    pyspark_folder,
    shuffle_partitions,
)

MAIN_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
# The server reads the token from its environment, so it is in no argument, file or configuration
# page.
TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - the name of a variable
# Without TLS, pyspark sends a token only to a host of exactly this name.
HOST = "localhost"
PORT = 15002

# A batch job's JVM lives for seconds and needs no second compiler; this one lives for days and uses
# it.
_JVM_FLAGS = "-XX:+UseParallelGC -Dio.netty.tryReflectionSetAccessible=true"


@dataclass(frozen=True, repr=False)
class ConnectServer:
    """How a server is started in ``folder``; ``python`` runs the tasks' Python code.

    ``store`` has the variables that open the lake's object store; without any, those of the caller
    do.
    """

    folder: Path
    port: int = PORT
    memory: str = "3g"
    python: str = sys.executable
    store: Mapping[str, str] = field(default_factory=dict)

    def prepare(self, spark_submit: str) -> tuple[list[str], dict[str, str]]:
        """Write the configuration; returns the command, and the variables it needs besides the
        token.
        """
        conf = self.folder / "conf"
        for folder in (self.folder / "tmp", conf):
            folder.mkdir(parents=True, exist_ok=True)
        (conf / LOG4J.name).write_bytes(LOG4J.read_bytes())
        properties = conf / "spark-defaults.conf"
        properties.write_text("".join(f"{key} {value}\n" for key, value in self.settings().items()))
        command = [
            spark_submit,
            "--properties-file",
            str(properties),
            "--class",
            MAIN_CLASS,
            "spark-internal",
        ]
        return command, {"SPARK_CONF_DIR": str(conf), "PYSPARK_PYTHON": self.python}

    def settings(self) -> dict[str, str]:
        """Return the server's Spark configuration: the sessions' common settings and the server's
        own.
        """
        master = f"local[{os.cpu_count() or 2},{TASK_ATTEMPTS}]"
        own = {
            "spark.master": master,
            **authentication(master),
            "spark.app.name": "waldelta",
            "spark.jars": ",".join(str(jar) for jar in jars()),
            "spark.driver.memory": self.memory,
            "spark.driver.extraJavaOptions": _JVM_FLAGS,
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.local.dir": str(self.folder / "tmp"),
            "spark.sql.warehouse.dir": (self.folder / "warehouse").as_uri(),
            "spark.sql.shuffle.partitions": str(shuffle_partitions()),
            # The first of several stages is small; adaptive execution joins the nearly empty rest.
            "spark.sql.adaptive.enabled": "true",
            # Sessions of finished runs are kept no longer than they are useful.
            "spark.connect.session.manager.defaultSessionTimeout": "30m",
        }
        return driver_settings(self.store or os.environ) | LOCAL_WORKERS | own


@contextmanager
def port_on_ipv6(port: int) -> Iterator[Sequence[int]]:
    """Bind a socket to the same port of ::1, for the server to inherit; it accepts no connection.

    Many machines also resolve HOST to ::1, and clients try that first: another user who listened
    there would get the token. Raises ConfigError when a process has that port.
    """
    with ExitStack() as sockets:
        try:
            beside = sockets.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_STREAM))
            beside.bind(("::1", port))
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"another process uses port {port} of [::1], and clients of {HOST} would reach"
                    " it instead of the Spark Connect server: choose another port"
                ) from err
            yield ()  # This machine has no ::1.
        else:
            yield (beside.fileno(),)


def run_connect_server(port: int) -> NoReturn:
    """Become the server; raises ConfigError before that where something is missing."""
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigError(
            f"set {TOKEN_VARIABLE} to a secret, which clients send: export"
            f" {TOKEN_VARIABLE}=$(openssl rand -hex 32)"
        )
    check_java()
    spark_submit = str(pyspark_folder() / "bin" / "spark-submit")
    with private_files(), port_on_ipv6(port) as held:
        folder = Path(tempfile.mkdtemp(prefix="waldelta-connect-"))
        command, own = ConnectServer(folder, port, driver_memory()).prepare(spark_submit)
        for descriptor in held:
            os.set_inheritable(descriptor, True)
        sys.stderr.write(
            f"starting a Spark Connect server at {HOST}:{port}; Ctrl-C ends it. Its clients:\n"
            f"    export SPARK_REMOTE='sc://{HOST}:{port}/;token='${TOKEN_VARIABLE}\n"
        )
        sys.stderr.flush()
        os.execve(command[0], command, {**os.environ, **own})  # noqa: S606 - no shell

"""A local, long-lived Spark Connect server, bound to loopback, which requires a token."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from demo.java import java_home
from demo.stack.processes import Part, StackError, start
from waldelta.lake.store_connection import is_store_variable
from waldelta.spark.settings import (
    LOCAL_WORKERS,
    TASK_ATTEMPTS,
    driver_settings,
    jars,
    shuffle_partitions,
)

MAIN_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
# The server reads the token from its environment, so it is in no argument, file or configuration
# page.
TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"  # noqa: S105 - the name of a variable
# Without TLS, pyspark sends a token only to a host of exactly this name.
HOST = "localhost"

# A batch job's JVM lives for seconds and needs no second compiler; this one lives for days and uses
# it.
_JVM_FLAGS = "-XX:+UseParallelGC -Dio.netty.tryReflectionSetAccessible=true"
_LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.stdout.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{yyyy-MM-dd HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


@contextmanager
def _port_on_ipv6(port: int) -> Iterator[Sequence[int]]:
    """Bind a socket to the same port of ::1, for the server to inherit; it accepts no connection.

    Many machines also resolve HOST to ::1, and clients try that first: another user who listened
    there would get the token. Raises StackError when a process has that port.
    """
    with ExitStack() as sockets:
        try:
            beside = sockets.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_STREAM))
            beside.bind(("::1", port))
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                raise StackError(
                    f"another process uses port {port} of [::1], and clients of {HOST} would reach"
                    " it instead of the Spark Connect server: start again, with other ports"
                ) from err
            yield ()  # This machine has no ::1.
        else:
            yield (beside.fileno(),)


@dataclass(frozen=True, repr=False)
class SparkConnectServer:
    """How to start a server in ``folder``; ``python`` runs the tasks' Python code.

    ``store`` has the variables that open the lake's object store; without any, those of the caller
    do.
    """

    folder: Path
    port: int
    token: str
    log: Path
    memory: str = "3g"
    python: str = sys.executable
    store: Mapping[str, str] = field(default_factory=dict)

    @property
    def remote(self) -> str:
        """SPARK_REMOTE for a client; it contains the token."""
        return f"sc://{HOST}:{self.port}/;token={self.token}"

    def start(self, environment: Mapping[str, str]) -> Part:
        """Start the server; it takes some seconds until ``is_listening``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "tmp").mkdir(exist_ok=True)
        conf = self.folder / "conf"
        conf.mkdir(exist_ok=True)
        (conf / "log4j2.properties").write_text(_LOG4J)
        properties = conf / "spark-defaults.conf"
        properties.write_text("".join(f"{key} {value}\n" for key, value in self.settings().items()))
        own = {
            "JAVA_HOME": str(java_home()),
            "SPARK_CONF_DIR": str(conf),
            "PYSPARK_PYTHON": self.python,
            TOKEN_VARIABLE: self.token,
        }
        spark_submit = str(Path(self.python).with_name("spark-submit"))
        command = [
            spark_submit,
            "--properties-file",
            str(properties),
            "--class",
            MAIN_CLASS,
            "spark-internal",
        ]
        with _port_on_ipv6(self.port) as held:
            return start("Spark Connect server", command, folder=self.folder, log=self.log,
                         environment={**self._opening(environment), **own}, held=held)  # fmt: skip

    def _opening(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment with the store's variables in place of others of their kind."""
        if not self.store:
            return dict(environment)
        kept = {k: v for k, v in environment.items() if not is_store_variable(k)}
        return kept | dict(self.store)

    def is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def settings(self) -> dict[str, str]:
        """Return the server's Spark configuration: the sessions' common settings and the server's
        own.
        """
        cores = os.cpu_count() or 2
        own = {
            "spark.master": f"local[{cores},{TASK_ATTEMPTS}]",
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

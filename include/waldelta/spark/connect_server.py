"""A Spark Connect server on this machine, bound to loopback, which requires a token; ``waldelta
connect-server`` runs it.

Before PySpark connects to a server, this checks that it answers. PySpark repeats a failed call for
minutes and logs no reason.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from waldelta.errors import ConfigError, SparkUnreachable
from waldelta.permissions import private_files
from waldelta.server_errors import texts
from waldelta.spark.jars import check_java
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

if TYPE_CHECKING:
    from pyspark.sql.connect.client import DefaultChannelBuilder

SPARK_CONNECT_TIMEOUT_S = 30.0
# Servers on other machines that are used without TLS, as host:port, separated by commas: a service
# mesh may encrypt below PySpark.
UNENCRYPTED_VARIABLE = "WALDELTA_UNENCRYPTED_SPARK"
# How long the port itself is tested for the reason, after no connection was made.
_REASON_TIMEOUT_S = 5.0


def check_reachable(remote: str, timeout_s: float = SPARK_CONNECT_TIMEOUT_S) -> None:
    """Connect to the Spark Connect server of a SPARK_REMOTE as PySpark will, and close the
    connection.

    Raises SparkUnreachable with the reason. Raises ConfigError for an address that can't be read,
    or that leads to another machine without TLS.
    """
    import grpc

    server = _parse(remote)
    _refuse_clear_text(server)
    decided = threading.Event()
    states: list[grpc.ChannelConnectivity] = []

    def note(state: grpc.ChannelConnectivity) -> None:
        states.append(state)
        if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            decided.set()

    with closing(server.toChannel()) as channel:
        channel.subscribe(note, try_to_connect=True)
        decided.wait(timeout_s)
        channel.unsubscribe(note)
    if grpc.ChannelConnectivity.READY not in states:
        raise _unreachable(server, timeout_s)


def named_refusal(remote: str, err: Exception) -> SparkUnreachable | None:
    """Returns the error for a token that the server refused; None when ``err`` is about something
    else.
    """
    if texts.TOKEN_REFUSED.search(str(err)) is None:
        return None
    return _permanent_error(
        f"the Spark Connect server {_parse(remote).endpoint} refused the token: write the server's"
        f" spark.connect.authenticate.token into {_ADDRESS}"
    )


def _parse(remote: str) -> DefaultChannelBuilder:
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.client import DefaultChannelBuilder

    try:
        return DefaultChannelBuilder(remote)
    except (PySparkException, ValueError):
        # PySpark's messages repeat the address, which may contain a token.
        raise ConfigError(
            "the address of the Spark Connect server can't be read: write sc://host:port/;token=…"
            f" into {_ADDRESS}"
        ) from None


def _refuse_clear_text(server: DefaultChannelBuilder) -> None:
    """Refuse a connection to another machine without TLS, before anything is sent.

    A job's messages contain the source's password, since Spark's tasks read the source themselves.
    """
    allowed = {one.strip() for one in os.environ.get(UNENCRYPTED_VARIABLE, "").split(",")}
    host = server.host.strip("[]")
    if server.secure or host == "localhost" or _is_loopback(host) or server.endpoint in allowed:
        return
    raise ConfigError(
        f"the Spark Connect server {server.endpoint} is on another machine, and the connection to"
        " it has no TLS: the source's password would cross the network as it is. Add use_ssl=true"
        " to SPARK_REMOTE, or use_ssl to the connection's extra, and put a proxy that ends TLS"
        f" before the server; where the network itself encrypts, list {server.endpoint} in"
        f" {UNENCRYPTED_VARIABLE}"
    )


def _unreachable(server: DefaultChannelBuilder, timeout_s: float) -> SparkUnreachable:
    """Returns why no connection was made, from what the port itself answers; sends no token."""
    host, port = server.host.strip("[]"), int(server.endpoint.rpartition(":")[2])
    where = f"the Spark Connect server {server.endpoint}"
    try:
        tls = _speaks_tls(host, port)
    except TimeoutError:
        return SparkUnreachable(
            f"{where} didn't answer within {timeout_s:g} s: check host, port and the firewalls,"
            " which may drop packets"
        )
    except OSError as err:
        return SparkUnreachable(
            f"{where} can't be reached ({err.strerror or err}): start it, or correct host and port"
            f" in {_ADDRESS}"
        )
    if tls is None:
        return SparkUnreachable(
            f"{where} takes connections and doesn't answer: check the port in {_ADDRESS}, and the"
            " server's log"
        )
    return _permanent_error(f"{where} {_mismatch(server, host, tls=tls)}")


def _mismatch(server: DefaultChannelBuilder, host: str, *, tls: bool) -> str:
    if tls and server.secure:
        return (
            "has a certificate that isn't trusted here, or isn't for that host: write the host as"
            " the certificate names it, and the file of the authority that signed it into"
            " GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
        )
    if tls:
        return (
            "speaks TLS, and the address asks for none: add use_ssl=true to SPARK_REMOTE, or"
            " use_ssl to the connection's extra"
        )
    if server.use_ssl:
        return (
            f"doesn't speak TLS: take use_ssl out of {_ADDRESS}, or point that at the proxy that"
            " ends TLS for the server"
        )
    if server.secure:
        remedy = (
            "write localhost for the host"
            if _is_loopback(host)
            else "put a proxy that ends TLS before the server"
        )
        return (
            "doesn't speak TLS, and PySpark sends a token without TLS to localhost alone, by that"
            f" name: {remedy}"
        )
    return f"is something else that listens there: check host and port in {_ADDRESS}"


def _speaks_tls(host: str, port: int) -> bool | None:
    """Returns whether the port answers a TLS handshake by TLS; None when it accepts and stays
    silent.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # Only the answer is needed; nothing is sent.
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, port), timeout=_REASON_TIMEOUT_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=host):
                return True
        except TimeoutError:
            return None
        except ssl.SSLError as err:
            # An alert is TLS, too: the server may ask for a certificate, for example.
            return "ALERT" in (err.reason or "")
        except OSError:
            return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _permanent_error(message: str) -> SparkUnreachable:
    err = SparkUnreachable(message)
    err.retryable = False
    return err


_ADDRESS = "SPARK_REMOTE, or Airflow's connection"


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
        """Returns the server's Spark configuration: the sessions' common settings and the server's
        own.
        """
        master = f"local[{os.cpu_count() or 2},{TASK_ATTEMPTS}]"
        server_settings = {
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
        return driver_settings(self.store or os.environ) | LOCAL_WORKERS | server_settings


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
    with private_files(), port_on_ipv6(port) as sockets:
        folder = Path(tempfile.mkdtemp(prefix="waldelta-connect-"))
        command, environment = ConnectServer(folder, port, driver_memory()).prepare(spark_submit)
        for descriptor in sockets:
            os.set_inheritable(descriptor, True)
        sys.stderr.write(
            f"starting a Spark Connect server at {HOST}:{port}; Ctrl-C ends it. Its clients:\n"
            f"    export SPARK_REMOTE='sc://{HOST}:{port}/;token='${TOKEN_VARIABLE}\n"
        )
        sys.stderr.flush()
        os.execve(command[0], command, {**os.environ, **environment})  # noqa: S606 - no shell

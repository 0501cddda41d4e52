"""Checks that a Spark Connect server answers before PySpark connects to it.

PySpark repeats a failed call for minutes and logs no reason.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
from contextlib import closing
from typing import TYPE_CHECKING

from waldelta.errors import ConfigError, SparkUnreachable
from waldelta.server_errors import texts

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

    server = _parsed(remote)
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
    """Return the error for a token that the server refused; None when ``err`` is about something
    else.
    """
    if texts.TOKEN_REFUSED.search(str(err)) is None:
        return None
    return _for_good(
        f"the Spark Connect server {_parsed(remote).endpoint} refused the token: write the server's"
        f" spark.connect.authenticate.token into {_ADDRESS}"
    )


def _parsed(remote: str) -> DefaultChannelBuilder:
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
    """Return why no connection was made, from what the port itself answers; sends no token."""
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
    return _for_good(f"{where} {_mismatch(server, host, tls=tls)}")


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
    """Return whether the port answers a TLS handshake by TLS; None when it accepts and stays
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


def _for_good(message: str) -> SparkUnreachable:
    err = SparkUnreachable(message)
    err.retryable = False
    return err


_ADDRESS = "SPARK_REMOTE, or Airflow's connection"

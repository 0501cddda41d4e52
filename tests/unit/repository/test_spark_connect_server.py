"""The demo's Spark Connect server alone has its port, on both loopback addresses."""

import os
import socket

import pytest

from demo.stack.processes import StackError, stop, wait_until
from demo.stack.spark_connect_server import SparkConnectServer
from waldelta.rehearsal.embedded_postgres import free_port


@pytest.fixture
def server(tmp_path, monkeypatch):
    """What its start needs, but for Spark: a process that goes on."""
    program = tmp_path / "bin" / "spark-submit"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "delta.jar").touch()
    monkeypatch.setenv("WALDELTA_JARS", str(tmp_path / "jars"))
    python = str(program.with_name("python"))
    return SparkConnectServer(
        tmp_path / "spark", free_port(), python=python, token="token", log=tmp_path / "spark.log"
    )


def bound(port: int) -> bool:
    """Whether another process could listen there."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("::1", port))
            other.listen()
        except OSError:
            return False
        return True


def test_no_other_process_can_listen_in_its_place(server):
    """As long as it runs; a connection there is refused, so that clients go on to the server."""
    part = server.start(os.environ)
    try:
        assert not bound(server.port)
        with (
            socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as client,
            pytest.raises(ConnectionRefusedError),
        ):
            client.connect(("::1", server.port))
    finally:
        stop([part], grace_s=5)
    wait_until(lambda: bound(server.port), "the port", 10)


def test_where_another_process_listens_it_doesnt_start(server):
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as other:
        other.bind(("::1", server.port))
        other.listen()
        with pytest.raises(
            StackError, match=f"another process uses port {server.port} of \\[::1\\]"
        ):
            server.start(os.environ)

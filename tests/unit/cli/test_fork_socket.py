"""A request to the fork server is bounded in length and time, and delays no other."""

import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from waldelta.cli.fork_socket import LONGEST_REQUEST, receive_request, send_request

LENGTH = struct.Struct("!I")


@pytest.fixture
def ends():
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        yield here, there


@pytest.fixture
def output(tmp_path):
    number = os.open(tmp_path / "output", os.O_CREAT | os.O_WRONLY)
    yield number
    os.close(number)


def test_a_request_arrives_with_its_output(ends, output):
    asker, server = ends
    asking = threading.Thread(
        target=send_request, args=(asker, {"arguments": ["x" * (1 << 20)]}, output)
    )
    asking.start()
    request, got = receive_request(server, 20)
    asking.join()
    expected = (1 << 20, os.fstat(output).st_ino)
    assert (len(request["arguments"][0]), os.fstat(got).st_ino) == expected
    os.close(got)


def test_one_that_is_too_long_is_refused_unread(ends, output):
    asker, server = ends
    socket.send_fds(asker, [LENGTH.pack(LONGEST_REQUEST + 1)], [output])
    asker.sendall(b"x" * 1000)
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    with pytest.raises(
        ValueError, match=f"{LONGEST_REQUEST + 1} bytes, and no request needs more than"
    ):
        receive_request(server, 20)
    assert {path.name for path in Path("/proc/self/fd").iterdir()} <= before
    assert len(server.recv(4096)) == 1000


def test_nor_is_it_sent(ends, output):
    """The caller starts a process of its own then."""
    asker, server = ends
    with pytest.raises(ValueError, match="no request needs more"):
        send_request(asker, {"arguments": ["x" * LONGEST_REQUEST]}, output)
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.recv(1)


def test_one_that_comes_in_drops_is_given_up_in_time(ends, output):
    """Each byte is early enough for a limit on one read."""
    asker, server = ends
    ended = threading.Event()

    def drip():
        socket.send_fds(asker, [LENGTH.pack(10_000)], [output])
        while not ended.wait(0.05):
            asker.sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(TimeoutError):
            receive_request(server, 0.5)
    finally:
        ended.set()
        dripping.join()

"""Each cause why a Spark Connect server can't be reached has its remedy, without the token."""

import socket
import ssl
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.support.servers.serving import listening
from tests.support.servers.tls import Authority
from waldelta.errors import ConfigError, SparkUnreachable
from waldelta.rehearsal.embedded_postgres import free_port
from waldelta.spark import connect_server
from waldelta.spark.connect_server import check_reachable

TOKEN = "secret-7x9"


@contextmanager
def silent():
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def swallowing():
    """A port whose queue is full: the kernel drops further packets, as a firewall does."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(server.getsockname())
        yield server.getsockname()[1]


@contextmanager
def by_tls(folder):
    """A port with TLS and HTTP/2's settings, whose certificate nothing here trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(folder).issue("server", "localhost"))
    context.set_alpn_protocols(["h2"])

    def serve(client: socket.socket) -> None:
        with context.wrap_socket(client, server_side=True) as inner:
            inner.recv(100)

    with listening(serve) as port:
        yield port


def http1(client: socket.socket) -> None:
    client.recv(1000)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def ports(tmp_path):
    with ExitStack() as stack:
        yield {
            "closed": free_port(),
            "silent": stack.enter_context(silent()),
            "swallowing": stack.enter_context(swallowing()),
            "http": stack.enter_context(listening(http1)),
            "tls": stack.enter_context(by_tls(tmp_path)),
        }


CASES = {
    "nothing listens": ("127.0.0.1:{closed}", True,
                        r"can't be reached \(Connection refused\): start it, or correct host"),
    "nothing listens on localhost": ("localhost:{closed}", True, r"Connection refused"),
    "unknown host": ("nowhere.invalid:15002/;use_ssl=true", True,
                     r"nowhere.invalid:15002 can't be reached"),
    "packets are swallowed": ("127.0.0.1:{swallowing}", True,
                              r"didn't answer within 1 s: .*firewalls"),
    "takes connections only": ("127.0.0.1:{silent}", True,
                               r"takes connections and doesn't answer: check the port"),
    "another server": ("127.0.0.1:{http}/;", False, r"is something else that listens there"),
    "not trusted": ("localhost:{tls}/;use_ssl=true;token=" + TOKEN, False,
                    r"certificate that isn't trusted"),
    "TLS at the server alone": ("localhost:{tls}", False,
                                r"speaks TLS, and the address asks for none: add use_ssl"),
    "TLS for nothing": ("localhost:{http}/;use_ssl=true", False,
                        r"doesn't speak TLS: take use_ssl out"),
    "a token by the address": ("127.0.0.1:{http}/;token=" + TOKEN, False,
                               r"write localhost for the host"),
}  # fmt: skip


@pytest.mark.parametrize("address, retryable, told", CASES.values(), ids=CASES)
def test_each_cause_has_its_remedy(ports, monkeypatch, address, retryable, told):
    monkeypatch.setattr(connect_server, "_REASON_TIMEOUT_S", 1.0)
    with pytest.raises(SparkUnreachable, match=told) as caught:
        check_reachable("sc://" + address.format(**ports), timeout_s=1.0)
    assert caught.value.retryable is retryable
    assert TOKEN not in str(caught.value)


ELSEWHERE = {
    "another machine": ("0.0.0.0:{port}", None, False),
    "another is allowed": ("0.0.0.0:{port}", "0.0.0.0:1, spark:{port}", False),
    "it is allowed": ("0.0.0.0:{port}", "spark:1, 0.0.0.0:{port}", True),
    "by TLS": ("0.0.0.0:{port}/;use_ssl=true", None, True),
    "by TLS, which a token brings": ("0.0.0.0:{port}/;token=" + TOKEN, None, True),
    "this machine": ("127.0.0.1:{port}", None, True),
    "this machine by its name": ("localhost:{port}", None, True),
}  # fmt: skip


@pytest.mark.parametrize("address, allowed, is_asked", ELSEWHERE.values(), ids=ELSEWHERE)
def test_nothing_goes_to_another_machine_in_clear(monkeypatch, address, allowed, is_asked):
    """The source's password would be read on the way: the server there isn't even connected to."""
    monkeypatch.setattr(connect_server, "_REASON_TIMEOUT_S", 1.0)
    connected = []
    with listening(connected.append) as port:
        if allowed is not None:
            monkeypatch.setenv("WALDELTA_UNENCRYPTED_SPARK", allowed.format(port=port))
        with pytest.raises(SparkUnreachable if is_asked else ConfigError) as caught:
            check_reachable("sc://" + address.format(port=port), timeout_s=1.0)
    assert bool(connected) is is_asked
    if not is_asked:
        assert "0.0.0.0" in str(caught.value)
        assert "password" in str(caught.value)
        assert "use_ssl" in str(caught.value)


@pytest.mark.parametrize(
    "address", ["spark://h:1/;token=", "sc://h:1/path;token=", "sc://h:x/;token=", "sc:///;token="]
)
def test_an_address_that_cannot_be_read(address):
    with pytest.raises(ConfigError, match="write sc://host:port") as caught:
        check_reachable(address + TOKEN)
    assert TOKEN not in str(caught.value)

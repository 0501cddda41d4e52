"""What the proxy in front of an object store counts, and what it does to requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from deltalake import write_deltalake

from tests.support.servers.store_proxy import StoreProxy
from waldelta.lake import Lake

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def through(bucket, proxy):
    """The bucket behind the proxy."""
    return bucket.at(proxy.endpoint)


def put(bucket, key: str, body: bytes = b"content") -> None:
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=body)


def test_requests_pass_and_are_counted(through, proxy):
    put(through, "a/b", CONTENT)
    assert through.read("a/b") == CONTENT
    assert through.keys("a/") == ["a/b"]
    client = through.client
    client.head_object(Bucket=through.name, Key="a/b")
    client.delete_objects(Bucket=through.name, Delete={"Objects": [{"Key": "a/b"}]})
    expected = dict.fromkeys(
        [("python", kind) for kind in ("PUT", "GET", "LIST", "HEAD", "DELETES")], 1
    )
    assert proxy.counts() == expected
    assert proxy.statuses("PUT .*/a/b") == [200]


@pytest.mark.timeout(50)
def test_other_threads_run_while_the_store_is_asked_for_a_table(through):
    """The proxy is a thread of this process: it could not answer, and delta-rs would wait for a
    minute.
    """
    lake = Lake(through.uri("lake"), through.storage_options)
    assert not lake.target("public.t").exists
    write_deltalake(
        lake.target("public.t").uri, pa.table({"id": [1]}), storage_options=lake.storage_options
    )
    assert Lake(lake.root, lake.storage_options).target("public.t").exists


def test_a_held_request_reaches_the_store_when_it_is_released(bucket, through, proxy):
    """Requests that don't match pass, also a second one that does."""
    with ThreadPoolExecutor(1) as pool, proxy.hold("PUT .*/held") as hold:
        waiting = pool.submit(put, through, "held/1")
        assert hold.wait().path == f"/{bucket.name}/held/1"
        put(through, "other")
        put(through, "held/2")
        assert bucket.keys() == ["held/2", "other"]
        hold.release()
        waiting.result()
        assert bucket.keys() == ["held/1", "held/2", "other"]


def test_a_share_of_requests_fails_as_the_seed_says(s3_server, bucket):
    def failed() -> list[int]:
        with StoreProxy(s3_server.port, 1) as proxy:
            proxy.fail_share = 0.3
            through = bucket.at(proxy.endpoint)
            for number in range(20):
                with suppress(ClientError):
                    put(through, f"{number}")
            return [n for n, status in enumerate(proxy.statuses("PUT")) if status == 503]

    first = failed()
    assert 0 < len(first) < 20
    assert failed() == first


def test_a_connection_that_the_store_has_closed_is_opened_again():
    """Stores close idle connections; the client's one to the proxy stays open."""
    closed = Event()

    class Store(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response_only(204)
            self.end_headers()
            self.close_connection = True

        def finish(self) -> None:
            super().finish()
            self.connection.close()
            closed.set()

    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as store:
        Thread(target=store.serve_forever, daemon=True).start()
        with StoreProxy(store.server_port) as proxy:
            client = HTTPConnection("127.0.0.1", proxy.port)
            for _ in range(3):
                client.request("GET", "/a")
                assert client.getresponse().read() == b""
                assert closed.wait(10)
                closed.clear()
            client.close()
        store.shutdown()
    assert proxy.statuses("GET") == [204] * 3

"""What the proxy in front of an object store counts, and what it does to requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pyarrow as pa
import pytest
from botocore.exceptions import BotoCoreError, ClientError
from deltalake import DeltaTable, write_deltalake

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


def test_delta_rs_commits_put_if_absent(through, proxy):
    write_deltalake(
        through.uri("t"), pa.table({"id": [1]}), storage_options=through.storage_options
    )
    table = DeltaTable(through.uri("t"), storage_options=through.storage_options)
    assert table.to_pyarrow_table()["id"].to_pylist() == [1]
    (commit,) = [a for a in proxy.answers if "delta-rs PUT" in str(a.request) and ".json" in str(a)]
    assert commit.request.is_conditional
    assert {client for client, _ in proxy.counts()} == {"delta-rs"}


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


def test_a_test_that_waits_in_vain_fails(proxy):
    with proxy.hold("PUT") as hold, pytest.raises(TimeoutError, match="no request matched 'PUT'"):
        hold.wait(timeout_s=0.01)


def test_a_lost_answer(bucket, through, proxy):
    with proxy.lose_answers("PUT .*/a"):
        with pytest.raises(BotoCoreError):
            put(through, "a")
        put(through, "a2")
    assert bucket.keys() == ["a", "a2"]
    assert proxy.statuses("PUT") == [200, 200]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_share_of_requests_fails_as_the_seed_says(s3_server, bucket, seed):
    def failed() -> list[int]:
        with StoreProxy(s3_server.port, seed) as proxy:
            proxy.fail_share = 0.3
            through = bucket.at(proxy.endpoint)
            for number in range(20):
                with suppress(ClientError):
                    put(through, f"{number}")
            return [n for n, status in enumerate(proxy.statuses("PUT")) if status == 503]

    first = failed()
    assert 0 < len(first) < 20
    assert failed() == first


def test_a_failed_request_says_to_slow_down(bucket, through, proxy):
    proxy.fail_share = 1
    with pytest.raises(ClientError, match="SlowDown"):
        put(through, "a")
    assert bucket.keys() == []


def test_a_store_that_is_away_closes_the_connection(proxy, through):
    proxy.store_port = 1
    with pytest.raises(BotoCoreError):
        through.keys()
    assert proxy.statuses("LIST") == [None]


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

"""The S3 servers of the tests do what S3 does, as far as tests rely on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from botocore.exceptions import ClientError

from tests.support.fixtures.stores import ON_EACH_SERVER
from tests.support.servers.s3_server import READER, Identity, Moto, SeaweedFS

WRITERS, KEYS = 8, 8


def error_code(call) -> str:
    with pytest.raises(ClientError) as refused:
        call()
    return refused.value.response["Error"]["Code"]


@pytest.mark.nightly("the tests' own servers, each with several writers")
@ON_EACH_SERVER
def test_exactly_one_of_several_writers_creates_an_object(bucket):
    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(KEYS):
            contents = [f"{writer}".encode() for writer in range(WRITERS)]
            created = list(pool.map(bucket.create, [f"{number}"] * WRITERS, contents))
            assert created.count(True) == 1
            assert bucket.read(f"{number}") == contents[created.index(True)]


def test_a_reader_reads_and_writes_nothing(bucket):
    bucket.client.put_object(Bucket=bucket.name, Key="a", Body=b"content")
    seen = bucket.seen_by(READER)
    assert (seen.keys(), seen.read("a")) == (["a"], b"content")
    for call in (
        lambda: seen.client.put_object(Bucket=bucket.name, Key="b", Body=b""),
        lambda: seen.client.delete_object(Bucket=bucket.name, Key="a"),
    ):
        assert error_code(call) == "AccessDenied"


def test_wrong_keys_are_refused(bucket):
    wrong = bucket.seen_by(Identity("admin", "wrong"))
    assert error_code(wrong.keys) == "SignatureDoesNotMatch"
    assert error_code(bucket.seen_by(Identity("nobody", "x")).keys) == "InvalidAccessKeyId"


def test_only_a_key_opens_the_store(seaweedfs, bucket):
    """By no other port of the server, either."""
    bucket.create("a", b"content")
    place = f"http://127.0.0.1:{seaweedfs.filer_port}/buckets/{bucket.name}/a"
    with pytest.raises(HTTPError, match="401"):
        urlopen(place, timeout=10)
    with pytest.raises(HTTPError, match="401"):
        urlopen(Request(place, data=b"forged", method="PUT"), timeout=10)
    assert bucket.read("a") == b"content"


@pytest.mark.nightly("the tests' own servers")
def test_a_killed_server_keeps_its_objects(tmp_path):
    """Those that it has answered for."""
    with SeaweedFS(tmp_path) as server:
        bucket = server.new_bucket()
        for number in range(KEYS):
            bucket.client.put_object(Bucket=bucket.name, Key=f"{number:02}", Body=b"content")
        server.restart()
        assert bucket.keys() == [f"{number:02}" for number in range(KEYS)]
        assert bucket.read("00") == b"content"


def test_two_servers_run_side_by_side(tmp_path):
    with Moto(tmp_path / "one") as one, Moto(tmp_path / "other") as other:
        bucket = one.new_bucket("same")
        bucket.client.put_object(Bucket="same", Key="a", Body=b"")
        assert (bucket.keys(), other.new_bucket("same").keys()) == (["a"], [])

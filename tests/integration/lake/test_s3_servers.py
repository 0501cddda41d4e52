"""The S3 servers of the tests do what S3 does, as far as tests rely on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.support.fixtures.stores import ON_EACH_SERVER

WRITERS, KEYS = 8, 8


@pytest.mark.nightly("the tests' own servers, each with several writers")
@ON_EACH_SERVER
def test_exactly_one_of_several_writers_creates_an_object(bucket):
    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(KEYS):
            contents = [f"{writer}".encode() for writer in range(WRITERS)]
            created = list(pool.map(bucket.create, [f"{number}"] * WRITERS, contents))
            assert created.count(True) == 1
            assert bucket.read(f"{number}") == contents[created.index(True)]


def test_only_a_key_opens_the_store(seaweedfs, bucket):
    """By no other port of the server, either."""
    bucket.create("a", b"content")
    place = f"http://127.0.0.1:{seaweedfs.filer_port}/buckets/{bucket.name}/a"
    with pytest.raises(HTTPError, match="401"):
        urlopen(place, timeout=10)
    with pytest.raises(HTTPError, match="401"):
        urlopen(Request(place, data=b"forged", method="PUT"), timeout=10)
    assert bucket.read("a") == b"content"

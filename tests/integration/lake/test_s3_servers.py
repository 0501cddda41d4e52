"""The S3 servers of the tests do what S3 does, as far as tests rely on it."""

from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyarrow.fs import FileSelector

from tests.support.fixtures.stores import ON_EACH_SERVER
from waldelta.lake import Lake


@pytest.mark.timeout(50)
def test_other_threads_run_while_the_store_is_asked_for_a_table(bucket, proxy):
    """The proxy is a thread of this process, which couldn't answer for a minute otherwise."""
    through = bucket.at(proxy.endpoint)
    lake = Lake(through.uri("lake"), through.storage_options)
    assert not lake.target("public.t").exists
    write_deltalake(
        lake.target("public.t").uri, pa.table({"id": [1]}), storage_options=lake.storage_options
    )
    assert Lake(lake.root, lake.storage_options).target("public.t").exists


def test_only_a_key_opens_the_store(seaweedfs, bucket):
    """By no other port of the server, either."""
    bucket.create("a", b"content")
    place = f"http://127.0.0.1:{seaweedfs.filer_port}/buckets/{bucket.name}/a"
    with pytest.raises(HTTPError, match="401"):
        urlopen(place, timeout=10)
    with pytest.raises(HTTPError, match="401"):
        urlopen(Request(place, data=b"forged", method="PUT"), timeout=10)
    assert bucket.read("a") == b"content"


@ON_EACH_SERVER
def test_the_mark_of_a_folder_is_no_file_of_it(bucket):
    """Programs mark folders by an object, and servers list it when nothing else is in there."""
    bucket.create("lake/marked/", b"")
    bucket.create("lake/other/a", b"content")
    lake = Lake(bucket.uri("lake"), bucket.storage_options)
    for recursive in (False, True):
        chosen = FileSelector("", allow_not_found=True, recursive=recursive)
        assert lake.files(f"{lake.root}/marked").get_file_info(chosen) == []
        (file,) = lake.files(f"{lake.root}/other").get_file_info(chosen)
        assert (file.path, file.size) == ("a", 7)

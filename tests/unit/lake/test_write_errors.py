"""What couldn't be written says why, and what helps: by delta-rs, Arrow and stores."""

import errno
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from deltalake.exceptions import DeltaError, TableNotFoundError

from tests.support.servers.serving import serving
from waldelta.errors import TargetNotWritable
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, Run, now
from waldelta.lake.write_errors import target_not_writable

URI = "file:///lake/_waldelta/runs"
PARQUET = "Failed to parse parquet: External: Generic LocalFileSystem error: "
# What delta-rs 1.6 said when it was so; the remedy's beginning; whether trying again may help.
SAID = {
    "a full disk": (
        DeltaError(PARQUET + "Unable to copy data to file: No space left on device (os error 28)"),
        "free space",
        False,
    ),
    "no inode is left": (
        OSError(
            "Generic LocalFileSystem error\n  \x1b[31m↳\x1b[0m Unable to rename file\n"
            "   \x1b[31m↳\x1b[0m No space left on device (os error 28)\n"
        ),
        "free space",
        False,
    ),
    "a quota": (OSError(errno.EDQUOT, "Disk quota exceeded"),
     "free space there, or raise the quota", False),
    "rights": (
        DeltaError(
            PARQUET + "Unable to open file /lake/part-0.parquet#1: Permission denied (os error 13)"
        ),
        "give the user that runs the job write permission there",
        False,
    ),
    "Arrow's rights": (
        PermissionError(
            13, "Failed to open local file '/lake/x'. Detail: [errno 13] Permission denied"
        ),
        "give the user that runs the job write permission there",
        False,
    ),
    "mounted for reading": (
        DeltaError(PARQUET + "Unable to open file /lake/x#1: Read-only file system (os error 30)"),
        "mount it",
        False,
    ),
    "a file in the way": (
        TableNotFoundError(
            "Could not create local directory: file:///lake/f/t\nError: Os { code: 20, kind:"
            ' NotADirectory, message: "Not a directory" }'
        ),
        "remove the file",
        False,
    ),
    "something new": (DeltaError("the lake is frozen"),
     "check target.root and the permissions of the user that runs the job", True),
}  # fmt: skip


@pytest.mark.parametrize("said, remedy, again", SAID.values(), ids=SAID)
def test_the_remedy_fits_the_cause(said, remedy, again):
    error = target_not_writable(URI, said)
    text = str(error)
    assert text.startswith(f"{URI} can't be written (")
    assert f"): {remedy}" in text
    assert str(said).split()[-1] in text
    assert "\n" not in text
    assert "\x1b" not in text
    assert error.retryable is again


def test_signatures_of_addresses_stay_out():
    """A shared access signature is part of the address that is asked."""
    error = target_not_writable(
        URI,
        OSError(
            "Error performing GET https://a.blob.example/c/_last?sv=2&sig=SECRET in 5ms - 403"
            " Forbidden"
        ),
    )
    assert "SECRET" not in str(error)
    assert "https://a.blob.example/c/_last?… in 5ms" in str(error)
    assert "check the credentials" in str(error)


ANSWERS = {
    "refused": (403, "AccessDenied", "check the credentials in the environment", False),
    "no bucket": (404, "NoSuchBucket", "create the bucket", False),
    "busy": (503, "SlowDown", "the store doesn't answer", True),
}


@pytest.mark.parametrize("status, code, remedy, again", ANSWERS.values(), ids=ANSWERS)
def test_an_object_stores_answer_is_told(status, code, remedy, again):
    """Of an append to the ledger, which begins with a look at the table."""
    body = f"<Error><Code>{code}</Code></Error>".encode()

    class Store(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = answer  # noqa: N815 - http.server's names

        def log_message(self, *_) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Store)) as store:
        assert_append_says(store.server_port, remedy, again=again)


def test_a_store_that_isnt_there_is_told():
    assert_append_says(1, "the store doesn't answer", again=True)


def assert_append_says(port: int, remedy: str, *, again: bool) -> None:
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "max_retries": "0",
        "retry_timeout": "1s",
    }
    with pytest.raises(TargetNotWritable, match=remedy) as caught:
        Ledger(Lake("s3://bucket/lake", options)).append(Run(now(), "r", "consume", "running"))
    assert str(caught.value).startswith("s3://bucket/lake/_waldelta/runs can't be written (")
    assert caught.value.retryable is again

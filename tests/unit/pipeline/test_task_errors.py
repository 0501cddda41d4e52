"""Errors that tasks raised, found again in Spark's account of them."""

import pytest

from waldelta.changes.merge import target_table as target
from waldelta.errors import (
    ApplyError,
    DecodeError,
    PeekTimeout,
    PrivilegeMissing,
    SlotInUse,
    TargetNotWritable,
)
from waldelta.lake import Lake
from waldelta.lake.write_errors import change_log_write_error, target_not_writable
from waldelta.pipeline import is_conflict, named_error, of_table, unexpected_error
from waldelta.pipeline.task_errors import writing_error
from waldelta.spark.runner import error_text

ERRORS = [
    DecodeError("Stream Commit", "length", 0,
                "29 bytes long, 30 wanted (row 0, 29 bytes), message 7 of this call"),
    DecodeError("slot", "kind", 0),
    PeekTimeout("reading slot 's' took longer than the statement timeout"),
    SlotInUse("slot 's' is being read by another process: x"),
]  # fmt: skip


@pytest.mark.parametrize("err", ERRORS, ids=lambda err: type(err).__name__)
def test_the_same_error_again(err):
    """Kind, text, and for a malformed message its parts."""
    text = (
        f"[PYTHON_EXCEPTION] Traceback\n  File x\nwaldelta.errors.{type(err).__name__}: {err}\n\tat"
        " org.apache.spark"
    )
    found = named_error(RuntimeError(text))
    assert type(found) is type(err)
    assert str(found) == str(err)
    if isinstance(err, DecodeError):
        expected = (err.message, err.field, err.offset, err.detail)
        assert (found.message, found.field, found.offset, found.detail) == expected


URI = "file:///lake/t"
READERS = {
    "told by a task": lambda said: named_error(
        RuntimeError(error_text(target_not_writable(URI, OSError(said))))
    ),
    "of the change log": lambda said: change_log_write_error(
        URI, RuntimeError(f"java.io.IOException: {said}")
    ),
    "of a target": lambda said: target.target_write_error(
        Lake("file:///lake").target("public.t"), RuntimeError(f"java.io.IOException: {said}")
    ),
    "of a merge": lambda said: writing_error("public.t", RuntimeError(f"IOException: {said}")),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("No space left on device", "free space there"),
        ("No space left on device (os error 28)", "free space there"),
        ("Permission denied (os error 13)", "write permission there"),
    ],
)
def test_a_full_disk_and_a_refused_right_are_not_tried_again(read, said, remedy):
    """A copy's next attempt would read the whole table from the source once more."""
    error = read(said)
    assert (type(error), error.retryable) == (TargetNotWritable, False)
    assert said.partition(" (")[0] in str(error)
    assert remedy in str(error)


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        ("told by a task", "503 Service Unavailable SlowDown"),
        ("told by a task", "error sending request"),
        ("of the change log", "UnknownHostException: lake.s3"),
        ("of a target", "503 Service Unavailable SlowDown"),
        ("of a target", "UNAVAILABLE: io exception"),
    ],
)
def test_a_store_that_does_not_answer_is_asked_again(reader, said):
    """Whoever it was that asked: a task's error comes over as text."""
    error = READERS[reader](said)
    assert (type(error), error.retryable) == (TargetNotWritable, True)


CONFLICTS = {
    "[DELTA_CONCURRENT_TRANSACTION] This error occurs when multiple streaming queries": True,
    "[DELTA_CONCURRENT_APPEND.WITHOUT_HINT] Transaction conflict detected": True,
    "[DELTA_METADATA_CHANGED] MetadataChangedException: The metadata of the Delta table has"
    " been changed": True,
    "io.delta.exceptions.ConcurrentWriteException: A concurrent transaction has written new data": (
        True
    ),
    "java.util.ConcurrentModificationException": False,
    "[DELTA_CANNOT_MODIFY_APPEND_ONLY] This table is configured to only allow appends": False,
}


@pytest.mark.parametrize("text", CONFLICTS)
def test_what_somebody_elses_commit_is_told_by(text):
    """A newer run has committed: there is nothing to do, and no defect."""
    assert is_conflict(RuntimeError(text)) is CONFLICTS[text]


@pytest.mark.parametrize(
    "err", [*ERRORS, ApplyError("a change lacks its key")], ids=lambda err: type(err).__name__
)
def test_errors_name_their_table(err):
    """Of the same kind, as retryable, and once only."""
    named = of_table(err, "public.t")
    assert (type(named), named.retryable) == (type(err), err.retryable)
    assert str(err)[:40] in str(named)
    assert "public.t" in str(named)
    assert of_table(named, "public.t") is named


def test_a_named_error_of_a_table_stays_as_it_is():
    """Its text may quote a task's error, which is not the error to report."""
    named = PrivilegeMissing("waldelta.errors.PeekTimeout: quoted")
    assert unexpected_error("public.t", named) is named

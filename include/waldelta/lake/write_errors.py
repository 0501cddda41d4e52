"""Explains from an error why a write to the lake failed, and how to fix that."""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager

from waldelta.errors import TargetNotWritable, raised_as
from waldelta.lake.store_errors import answer_in, store_text
from waldelta.server_errors import texts

_REMEDIES = {
    (errno.ENOSPC,): "free space there (bytes, or inodes)",
    (errno.EDQUOT,): "free space there, or raise the quota of the user that runs {who}",
    (errno.EFBIG,): "raise the limit on the size of files (ulimit -f) of the user that runs {who}",
    (
        errno.EACCES,
        errno.EPERM,
    ): "give the user that runs {who} write permission there, or correct target.root",
    (errno.EROFS,): "mount it for writing, or correct target.root",
    (
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
    ): "remove the file that is in the way, or correct target.root",
    (errno.EMFILE, errno.ENFILE): (
        "raise the limit on open files (ulimit -n) of the user that runs {who}"
    ),
    (errno.EIO, errno.ESTALE): "check the disk, or the mount: the kernel's log has details",
}


def target_not_writable(
    uri: str, err: Exception, who: str = "the job", besides: str = ""
) -> TargetNotWritable:
    """Return the error for a failed write by delta-rs, Arrow or the system, with the fitting
    remedy.

    ``who`` is the writer; ``besides`` is added to the message. It is retryable where an object
    store didn't answer, and where the cause isn't known.
    """
    said = store_text(err)
    remedy, transient = _remedy(err, said)
    error = TargetNotWritable(f"{uri} can't be written ({said}): {remedy.format(who=who)}{besides}")
    error.retryable = transient
    return error


def named_write_errors(
    uri: str,
    who: str = "the job",
    besides: str = "",
    kinds: type[Exception] | tuple[type[Exception], ...] | None = None,
) -> AbstractContextManager[None]:
    """Raise target_not_writable() for errors of these kinds: by default, of delta-rs or the
    system.
    """
    if kinds is None:
        # Loaded only at work: Airflow parses DAGs without delta-rs.
        from deltalake.exceptions import DeltaError

        kinds = (DeltaError, OSError)
    return raised_as(lambda err: target_not_writable(uri, err, who, besides), kinds)


def not_writable_by_spark(
    place: str, err: BaseException, said: str, refused: str | None = None, besides: str = ""
) -> TargetNotWritable:
    """Return the error for a failed write by Spark.

    ``said`` is the first line of Spark's message. ``refused`` has the words in it that decide on
    the remedy (see storage_refusal()). ``besides`` is added to the message. It is retryable where a
    store, or the executor that was writing, didn't answer.
    """
    words, shown = (said, said) if refused is None else (refused, f"{refused}: {said}")
    remedy = _remedy(Exception(words), words)[0].format(who="Spark")
    error = TargetNotWritable(f"{place} can't be written ({shown}): {remedy}{besides}")
    answer = answer_in(str(err))
    error.retryable = answer is not None and answer.error.retryable
    return error


def not_writable_from_text(said: str) -> TargetNotWritable:
    """Rebuild an error of target_not_writable() from its text, which is all that a task returns."""
    error = TargetNotWritable(said)
    _, error.retryable = _remedy(error, said)
    return error


def storage_refusal(text: str) -> str | None:
    """Return the words of a Spark error which say that a place can't be written."""
    found = texts.STORAGE_REFUSES.search(text)
    return None if found is None else found[0]


def _remedy(err: Exception, said: str) -> tuple[str, bool]:
    number = err.errno if isinstance(err, OSError) else None
    if number is None and (found := texts.OS_NUMBER.search(said)):
        number = int(found[1])
    if number is None:
        number = next((number for words, number in texts.OS_TEXTS.items() if words in said), None)
    for numbers, remedy in _REMEDIES.items():
        if number in numbers:
            return remedy, False
    if (answer := answer_in(said)) is not None:
        return answer.remedy, answer.error.retryable
    return "check target.root and the permissions of the user that runs {who}", True

"""Why something of the lake couldn't be written, as far as the error tells, and what mends that."""

from __future__ import annotations

import errno
import os
import re

from waldelta.errors import TargetNotWritable

# As the operating system's error number is printed by delta-rs ("os error 28", "Os { code: 28"),
# and by pyarrow and Python.
_NUMBER = re.compile(r"(?:\bos error |\berrno |\bOs \{ code: )(\d+)", re.IGNORECASE)
_REMEDIES = {
    (errno.ENOSPC,): "make space there (bytes, or inodes)",
    (errno.EDQUOT,): "make space there, or raise the quota of whoever runs {who}",
    (errno.EFBIG,): "raise the limit on the size of files (ulimit -f) of whoever runs {who}",
    (
        errno.EACCES,
        errno.EPERM,
    ): "give whoever runs {who} the right to write there, or correct target.root",
    (errno.EROFS,): "mount it for writing, or correct target.root",
    (
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
    ): "remove the file that is in the way, or correct target.root",
    (errno.EMFILE, errno.ENFILE): "raise the limit on open files (ulimit -n) of whoever runs {who}",
    (errno.EIO, errno.ESTALE): "see to the disk, or to the mount: the kernel's log says more",
}
# What Java prints of such an error, without its number.
_WORDS = {os.strerror(number): number for numbers in _REMEDIES for number in numbers}
# What object stores answer, by what delta-rs and Arrow say of it.
_REFUSED = re.compile(
    r"\b40[13] (?:Forbidden|Unauthorized)|AccessDenied|Access Denied|lacked the necessary"
    r" privileges|valid authentication credentials"
    r"|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|AuthenticationFailed|AuthorizationPermissionMismatch"
)
_ABSENT = re.compile(r"NoSuchBucket|ContainerNotFound|\b404 Not Found")
_NO_ANSWER = re.compile(
    r"\b(?:429|5\d\d) [A-Z][a-z]+|SlowDown|dns error|error sending request|operation timed"
    r" out|connection closed"
    r"|Connection refused|Connection reset"
    # Of Hadoop's file systems, and of Spark Connect.
    r"|Status Code:"
    r" 5\d\d|UnknownHostException|SocketTimeoutException|NoHttpResponseException|\bUNAVAILABLE\b|ExecutorLostFailure",  # noqa: E501
)
_ANSWERS = (
    (
        _REFUSED,
        (
            "check the credentials in the environment (AWS_…, AZURE_…, GOOGLE_…) and what they may"
            " do with target.root"
        ),
    ),
    (_ABSENT, "make the bucket or container, or correct target.root"),
)
# How delta-rs lays out a chain of causes; and what of an address may be a signature.
_LAYOUT = re.compile(r"\x1b\[[0-9;]*m|↳")
_QUERY = re.compile(r"(https?://[^\s?]+)\?\S+")


def target_not_writable(
    uri: str, err: Exception, who: str = "the job", besides: str = ""
) -> TargetNotWritable:
    """The error to raise for what delta-rs, Arrow or the system said: what is known, and the remedy
    that fits.

    ``who`` writes there; ``besides`` is what else is to be said. Retryable where an object store
    didn't answer, and where nobody can tell why.
    """
    said = _QUERY.sub(r"\1?…", " ".join(_LAYOUT.sub("", str(err)).split()))
    remedy, transient = _remedy(err, said)
    error = TargetNotWritable(f"{uri} can't be written ({said}): {remedy.format(who=who)}{besides}")
    error.retryable = transient
    return error


def not_writable_by_spark(
    place: str, err: BaseException, said: str, refused: str | None = None, besides: str = ""
) -> TargetNotWritable:
    """The error for a write of Spark's that failed: ``said`` is its first line, ``refused`` the
    words in it that decide on the remedy (storage_refusal), ``besides`` what else is to be said.

    Retryable where a store, or who was to write there, didn't answer.
    """
    words, shown = (said, said) if refused is None else (refused, f"{refused}: {said}")
    remedy = _remedy(Exception(words), words)[0].format(who="Spark")
    error = TargetNotWritable(f"{place} can't be written ({shown}): {remedy}{besides}")
    error.retryable = _NO_ANSWER.search(str(err)) is not None
    return error


def not_writable_from_text(said: str) -> TargetNotWritable:
    """The error of target_not_writable() again, from its text: all that a task hands over."""
    error = TargetNotWritable(said)
    _, error.retryable = _remedy(error, said)
    return error


# What Hadoop's file systems, their stores and Delta say of a place that can't be written; all else
# may go away by itself.
_STORAGE_REFUSES = re.compile(
    r"Permission denied|AccessDenied|AccessControlException|Access Denied|Forbidden|Read-only file"
    r" system"
    r"|Mkdirs failed|ParentNotDirectory|Not a directory|not a"
    r" directory|FileAlreadyExistsException|No space left on device"
    r"|DELTA_CANNOT_CREATE_LOG_PATH|DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION|NoSuchBucket|UnknownHostException"
)


def storage_refusal(text: str) -> str | None:
    """The words of an error of Spark's that say that a place can't be written."""
    found = _STORAGE_REFUSES.search(text)
    return None if found is None else found[0]


def _remedy(err: Exception, said: str) -> tuple[str, bool]:
    number = err.errno if isinstance(err, OSError) else None
    if number is None and (found := _NUMBER.search(said)):
        number = int(found[1])
    if number is None:
        number = next((number for words, number in _WORDS.items() if words in said), None)
    for numbers, remedy in _REMEDIES.items():
        if number in numbers:
            return remedy, False
    for answer, remedy in _ANSWERS:
        if answer.search(said):
            return remedy, False
    if _NO_ANSWER.search(said):
        return "the store doesn't answer: check its address and the network, and run again", True
    return "check target.root and the rights of whoever runs {who}", True

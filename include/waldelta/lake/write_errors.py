"""Explains from an error why a read or a write of the lake failed, and how to fix that.

delta-rs, Arrow and Hadoop's file systems print an object store's answer within their own message.
"""

from __future__ import annotations

import errno
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass

from waldelta.config.stores import STORE_VARIABLES
from waldelta.errors import (
    VIOLATING_ROW,
    LakeError,
    StoreMissing,
    StoreRefused,
    StoreUnreachable,
    TargetNotWritable,
    raised_as,
    without_values,
)
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
    """Returns the error for a failed write by delta-rs, Arrow or the system, with the fitting
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
    """Returns the error for a failed write by Spark.

    ``said`` is the first line of Spark's message. ``refused`` has the words in it that decide on
    the remedy (see storage_refusal()). ``besides`` is added to the message. It is retryable where a
    store, or the executor that was writing, didn't answer.
    """
    words, text_shown = (said, said) if refused is None else (refused, f"{refused}: {said}")
    remedy = _remedy(Exception(words), words)[0].format(who="Spark")
    error = TargetNotWritable(f"{place} can't be written ({text_shown}): {remedy}{besides}")
    answer = answer_in(str(err))
    error.retryable = answer is not None and answer.error.retryable
    return error


def change_log_write_error(uri: str, err: Exception) -> TargetNotWritable | None:
    """Returns TargetNotWritable when Spark's error means that; else None."""
    refused = storage_refusal(str(err))
    if refused is None:
        return None
    unread = "; nothing was consumed from the slot"
    return not_writable_by_spark(uri, err, without_values(err), refused, unread)


def not_writable_from_text(said: str) -> TargetNotWritable:
    """Rebuild an error of target_not_writable() from its text, which is all that a task returns."""
    error = TargetNotWritable(said)
    _, error.retryable = _remedy(error, said)
    return error


def storage_refusal(text: str) -> str | None:
    """Returns the words of a Spark error which say that a place can't be written."""
    match = texts.STORAGE_REFUSES.search(text)
    return None if match is None else match[0]


def _remedy(err: Exception, said: str) -> tuple[str, bool]:
    number = err.errno if isinstance(err, OSError) else None
    if number is None and (match := texts.OS_NUMBER.search(said)):
        number = int(match[1])
    if number is None:
        number = next((number for words, number in texts.OS_TEXTS.items() if words in said), None)
    for numbers, remedy in _REMEDIES.items():
        if number in numbers:
            return remedy, False
    if (answer := answer_in(said)) is not None:
        return answer.remedy, answer.error.retryable
    return "check target.root and the permissions of the user that runs {who}", True


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """What a store's answer means: the error for it, and what to do."""

    words: re.Pattern[str]
    error: type[LakeError]
    remedy: str


_ANSWERS = (
    StoreAnswer(
        texts.STORE_REGION,
        StoreRefused,
        "set the region of target.root's bucket: AWS_REGION, or region_name in the connection",
    ),
    StoreAnswer(
        texts.STORE_CREDENTIALS,
        StoreRefused,
        f"check the credentials in the environment ({STORE_VARIABLES}) and their permissions for"
        " target.root",
    ),
    StoreAnswer(
        texts.STORE_MISSING,
        StoreMissing,
        "create the bucket or container, or correct target.root",
    ),
    StoreAnswer(
        texts.STORE_UNANSWERED,
        StoreUnreachable,
        "the store doesn't answer: check its address and the network, and run again",
    ),
)


def answer_in(text: str) -> StoreAnswer | None:
    """Returns the store's answer that a message has in it; None without any."""
    return next((answer for answer in _ANSWERS if answer.words.search(text)), None)


def store_text(err: BaseException) -> str:
    """Returns an error's message on one line, without signatures."""
    text = texts.SIGNED_DETAILS.sub("", texts.LAYOUT.sub("", str(err)))
    text = VIOLATING_ROW.sub(r"\1 …", text)
    return texts.ADDRESS_QUERY.sub(r"\1?…", " ".join(text.split()))


def store_error(err: BaseException) -> LakeError | None:
    """Returns the named error for a failed read by delta-rs or Arrow; None for any other error."""
    # Loaded only after an error: Airflow parses DAGs without delta-rs.
    from deltalake.exceptions import DeltaError

    text = store_text(err)
    if not (
        isinstance(err, DeltaError) or (isinstance(err, OSError) and texts.OF_STORE.search(text))
    ):
        return None
    answer = answer_in(text)
    # A file that isn't there has the same number as a bucket that isn't there.
    if answer is None or (answer.error is StoreMissing and not texts.NO_BUCKET.search(text)):
        return None
    return answer.error(f"the lake can't be read ({text}): {answer.remedy}")

"""Recovers named errors that Spark tasks return as text: in a JVM stack trace, or over Connect."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from waldelta import errors
from waldelta.errors import without_values
from waldelta.lake import not_writable_by_spark
from waldelta.lake.write_errors import not_writable_from_text, storage_refusal, store_error
from waldelta.server_errors import texts

DRIVER_MEMORY_VARIABLE = "WALDELTA_DRIVER_MEMORY"


_JVM_ENDED = (
    "Spark's Java process (JVM) ended during the run: what was committed stays, and the next run"
    " continues from there. Most often the machine or the container had no memory left and the"
    " kernel killed the process (dmesg, or the container's events, say so): give it more memory,"
    f" or lower {DRIVER_MEMORY_VARIABLE}, which is the JVM's heap; if Java itself crashed,"
    " hs_err_pid*.log in the working folder has the cause"
)


def named_error(err: BaseException) -> errors.WaldeltaError | None:
    """Returns the error that a task raised, if it is one of ours; SparkUnreachable when Spark's JVM
    ended.

    It is made again from the text, which has no attributes of the raised instance: ``retryable`` is
    the class's default, or follows from the reason of a TargetNotWritable.
    """
    for name, message in texts.NAMED_ERROR.findall(str(err)):
        kind = getattr(errors, name, None)
        if (
            kind is errors.DecodeError
            and (read := errors.DecodeError.parse(message.strip())) is not None
        ):
            return read
        if kind is errors.TargetNotWritable:
            return not_writable_from_text(message.strip())
        if isinstance(kind, type) and issubclass(kind, errors.WaldeltaError):
            try:
                return kind(message.strip())
            except TypeError:  # An error with a structure of its own keeps at least its text.
                return errors.WaldeltaError(f"{name}: {message.strip()}")
    return errors.SparkUnreachable(_JVM_ENDED) if has_lost_jvm(err) else None


def last_error(err: BaseException) -> errors.WaldeltaError | None:
    """Returns the named error for what ends a run: also for a read that the lake's object store
    refuses or doesn't answer.
    """
    return named_error(err) or store_error(err)


def has_lost_jvm(err: BaseException) -> bool:
    """Returns whether the driver's JVM didn't answer: Py4J found its connection closed.

    Python calls the JVM through Py4J.
    """
    return any(
        type(cause).__name__ == "Py4JNetworkError"
        or (
            isinstance(cause, OSError)
            and any(
                "/py4j/" in frame.f_code.co_filename
                for frame, _ in traceback.walk_tb(cause.__traceback__)
            )
        )
        for cause in with_causes(err)
    )


def with_causes(err: BaseException) -> Iterator[BaseException]:
    """Yields an error, and then what it was raised from or while handling."""
    cause: BaseException | None = err
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def is_conflict(err: BaseException) -> bool:
    """Returns whether another writer committed to a Delta table at the same time.

    Spark Connect returns only the names of the exceptions' classes.
    """
    return texts.CONFLICT.search(str(err)) is not None


def is_passing(err: BaseException) -> bool:
    """Returns whether the same statement may succeed on the table's current version.

    That is so when only rows or files changed, and no fence against older writers stopped us.
    """
    return (
        is_conflict(err) or texts.FILE_GONE.search(str(err)) is not None
    ) and texts.FENCED.search(str(err)) is None


def writing_error(table: str, err: BaseException) -> errors.WaldeltaError:
    """Returns a failure to write a target as a named error."""
    if (error := named_error(err)) is not None:
        return error
    if is_conflict(err):
        return errors.LateWriter(
            f"{table}: another writer committed to the target at the same time: run again"
        )
    if (refused := storage_refusal(str(err))) is not None:
        return not_writable_by_spark(f"{table}: its target", err, without_values(err), refused)
    return errors.ApplyError(f"{table}: {without_values(err)}")


def unexpected_error(table: str, err: BaseException) -> errors.WaldeltaError:
    """Returns any failure of one table as a named error; a WaldeltaError is returned as it is.

    An error without a name of its own counts as retryable, because it may be temporary.
    """
    error = err if isinstance(err, errors.WaldeltaError) else named_error(err)
    if error is not None:
        return error
    unnamed = errors.ApplyError(f"{table}: {type(err).__name__}: {without_values(err)}")
    unnamed.retryable = True
    return unnamed


def of_table(err: errors.WaldeltaError, table: str) -> errors.WaldeltaError:
    """Returns the error with the table's name before its message, unless the message contains the
    name.

    A task that decodes or converts rows may know only a column, so its errors don't name the table.
    """
    if table in str(err) or isinstance(err, errors.JavaMissing):
        return err
    if isinstance(err, errors.DecodeError):
        detail = f"{err.detail}, of table {table}" if err.detail else f"of table {table}"
        return errors.DecodeError(err.message, err.field, err.offset, detail).with_traceback(
            err.__traceback__
        )
    try:
        error = type(err)(f"{table}: {err}")
    except TypeError:  # The error has a structure of its own.
        return err
    error.retryable = err.retryable
    return error.with_traceback(err.__traceback__)


def describe_error(err: BaseException) -> dict[str, Any]:
    """Describe an error for a run's result: class, message, whether a retry can help, classes of
    causes.

    An error that a task raised by name gets that name. The message of any other error is its first
    line, without values of rows.
    """
    error = err if isinstance(err, errors.WaldeltaError) else last_error(err)
    if error is None:
        return {"class": type(err).__name__, "message": without_values(err), "retryable": True}
    described = {
        "class": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "retryable": error.retryable,
    }
    if error.causes:
        described["causes"] = sorted({type(cause).__name__ for cause in error.causes})
    return described

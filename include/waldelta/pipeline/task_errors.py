"""Named errors that come back from Spark's tasks as text: inside a JVM stack trace, or over
Connect.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

from waldelta import errors
from waldelta.lake.write_errors import (
    not_writable_by_spark,
    not_writable_from_text,
    storage_refusal,
)

DRIVER_MEMORY_VARIABLE = "WALDELTA_DRIVER_MEMORY"


# As Python prints an exception: qualified class, colon, message. Tasks keep theirs to one line.
_NAMED = re.compile(r"waldelta\.errors\.(\w+): ([^\n]+)")
_JVM_ENDED = (
    "Spark's Java process (JVM) ended during the run: what was committed stays, and the next run"
    " goes on from there. Most often the machine or the container had no memory left and the"
    " kernel killed the process (dmesg, or the container's events, say so): give it more memory,"
    f" or lower {DRIVER_MEMORY_VARIABLE}, which is the JVM's heap; a hs_err_pid*.log in the working"
    " folder says of a crash of Java what it was"
)
# Java has a ConcurrentModificationException too, which is a defect.
_CONFLICT = re.compile(
    r"DELTA_CONCURRENT_|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED"
    r"|Concurrent(?:Transaction|Append|Write|DeleteRead|DeleteDelete)Exception|(?:Metadata|Protocol)ChangedException"
)


# Files that a VACUUM deleted, which kept too little, or that nobody has: Hadoop's and Spark's
# words.
_FILE_GONE = re.compile(
    r"FAILED_READ_FILE\.FILE_NOT_EXIST|FileNotFoundException|DELTA_FILE_NOT_FOUND"
)
# Who had to be told that the table is another one now: no rows were written under what was read.
_FENCED = re.compile(
    r"DELTA_CONCURRENT_TRANSACTION|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED"
    r"|ConcurrentTransactionException|(?:Metadata|Protocol)ChangedException"
)


def named_error(err: BaseException) -> errors.WaldeltaError | None:
    """The error that a task raised, if it is one of ours; also SparkUnreachable where Spark's JVM
    has ended.

    The text says nothing of what one instance alone had: whether it is ``retryable`` is its class's
    rule again, or, of what can't be written, follows from the reason.
    """
    for name, message in _NAMED.findall(str(err)):
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
            except TypeError:  # an error with a structure of its own keeps its text at least
                return errors.WaldeltaError(f"{name}: {message.strip()}")
    return errors.SparkUnreachable(_JVM_ENDED) if has_lost_jvm(err) else None


def has_lost_jvm(err: BaseException) -> bool:
    """Whether the driver's JVM didn't answer: Py4J, through which Python calls it, found its
    connection closed.
    """
    seen: BaseException | None = err
    while seen is not None:
        if type(seen).__name__ == "Py4JNetworkError" or (
            isinstance(seen, OSError) and _is_of_py4j(seen)
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _is_of_py4j(err: BaseException) -> bool:
    frames = traceback.walk_tb(err.__traceback__)
    return any("/py4j/" in frame.f_code.co_filename for frame, _ in frames)


def is_conflict(err: BaseException) -> bool:
    """Whether somebody else committed to a Delta table meanwhile; the classes' names are all that
    Connect hands over.
    """
    return _CONFLICT.search(str(err)) is not None


def is_passing(err: BaseException) -> bool:
    """Whether the same statement may well succeed on the table as others have left it: its rows or
    files changed, and nothing fences us.
    """
    return (is_conflict(err) or _FILE_GONE.search(str(err)) is not None) and _FENCED.search(
        str(err)
    ) is None


def writing_error(table: str, err: BaseException) -> errors.WaldeltaError:
    """What writing a target failed by, as a named error."""
    if (named := named_error(err)) is not None:
        return named
    if is_conflict(err):
        return errors.LateWriter(
            f"{table}: somebody else committed to the target meanwhile: run again"
        )
    if (refused := storage_refusal(str(err))) is not None:
        return not_writable_by_spark(f"{table}: its target", err, first_line(err), refused)
    return errors.ApplyError(f"{table}: {first_line(err)}")


def unexpected_error(table: str, err: BaseException) -> errors.WaldeltaError:
    """What one table failed by anywhere else; what has no name of its own may go away by itself, as
    far as anybody knows.
    """
    if (named := named_error(err)) is not None:
        return named
    unnamed = errors.ApplyError(f"{table}: {type(err).__name__}: {first_line(err)}")
    unnamed.retryable = True
    return unnamed


def of_table(err: errors.WaldeltaError, table: str) -> errors.WaldeltaError:
    """The error with the table's name, for what a task raises that knows only some of its
    columns.
    """
    if table in str(err):
        return err
    if isinstance(err, errors.DecodeError):
        detail = f"{err.detail}, of table {table}" if err.detail else f"of table {table}"
        return errors.DecodeError(err.message, err.field, err.offset, detail).with_traceback(
            err.__traceback__
        )
    try:
        named = type(err)(f"{table}: {err}")
    except TypeError:  # an error with a structure of its own
        return err
    named.retryable = err.retryable
    return named.with_traceback(err.__traceback__)


def describe_error(err: BaseException) -> dict[str, Any]:
    """An error as a run's result carries it: its class, its message, whether trying again can help,
    its causes' classes.

    One that a task raised by name goes by that name; of any other the message is its first line,
    without a stack trace.
    """
    known = err if isinstance(err, errors.WaldeltaError) else named_error(err)
    if known is None:
        return {"class": type(err).__name__, "message": first_line(err), "retryable": True}
    described = {
        "class": type(known).__name__,
        "message": str(known) or type(known).__name__,
        "retryable": known.retryable,
    }
    if known.causes:
        described["causes"] = sorted({type(cause).__name__ for cause in known.causes})
    return described


def first_line(err: BaseException) -> str:
    """What an exception of the JVM says, without its stack trace."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    if not lines:
        return type(err).__name__
    told = next((line for line in lines[1:3] if line.startswith(": ")), lines[0])
    return told.removeprefix(": ")

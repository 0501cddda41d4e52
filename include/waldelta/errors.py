"""Every error a user can meet, as one tree.

::

    WaldeltaError
     +-- ConfigError                 the pipeline file, an expression in it, or the environment
     |    +-- JavaMissing                Spark is needed and finds no Java
     |    +-- FilterNotTranslatable      a row filter that Spark can't evaluate as PostgreSQL does
     +-- SourceError                 the PostgreSQL side
     |    +-- SourceUnreachable          (retryable)
     |    +-- AuthenticationFailed
     |    +-- PrivilegeMissing
     |    +-- SessionAltered             a setting that values depend on was changed
     |    +-- NameUnreadable             UTF-8 lacks a character of an object's name
     |    +-- PreflightFailed            all findings at once
     |    +-- LockHeld                   (retryable) another run works on the same slot or target
     |    +-- TableBusy                  (retryable) another session keeps a table locked
     |    +-- TransactionsStillOpen      (retryable) a snapshot can't be taken yet
     |    +-- NotPrimary                 a standby, where a primary is needed
     |    +-- NotStandby                 source.read_from isn't a standby of this source
     |    +-- SnapshotLost               (retryable) the copy's snapshot or table is gone
     |    +-- SlotError
     |         +-- SlotMissing
     |         +-- SlotForeign           other plugin, database or owner
     |         +-- SlotInUse             (retryable)
     |         +-- SlotLost              WAL it needed is gone
     |         +-- PublicationGone       a listed publication doesn't exist where the slot is read
     |         +-- PeekTimeout           (retryable) a read took longer than the statement timeout
     |         +-- PeekTooLarge          (retryable) a call gives more than the server can hold
     |         +-- SourceDiskFull        (retryable) a disk of the server's is full
     |         +-- NoFreeSlot            (retryable) the server has no free slot for a slot copy
     |         +-- SlotUnreadable        PostgreSQL itself can't decode what comes next
     |         +-- SlotGap               it is past changes that the change log lacks
     |         +-- SlotStuck             it should have moved and did not
     |         +-- SlotCritical          it or the disk is near its limit; no run fails by it
     |         +-- StandbyAway           (retryable) a needed standby is absent or lags behind
     |         +-- SourceChanged         another server, or a timeline that diverges
     |         +-- ConsumeMismatch       what was consumed isn't what was landed
     +-- DecodeError                 a message of the replication protocol that can't be read
     +-- SyncFailed                  some tables couldn't be copied; the others are synced
     +-- LakeError                   the Delta side
     |    +-- TargetNotWritable
     |    |    +-- EmptyPartitionValue
     |    +-- StoreRefused               credentials, permissions or region of the object store
     |    +-- StoreMissing               no such bucket
     |    +-- StoreUnreachable           (retryable) the store doesn't answer
     |    +-- LateWriter                 (retryable) a newer run has already committed
     +-- CatalogError                the catalog that tables are registered in; no run fails by it
     |    +-- CatalogUnreachable         (retryable) the catalog doesn't answer
     |    +-- CatalogRefused             credentials, permissions, or what it can't do
     |    +-- CatalogNameRefused         a name that the catalog can't have
     |    +-- CatalogTableForeign        an entry of that name that the pipeline didn't make
     +-- ApplyError                  changes that can't be merged, or a table's unforeseen failure
     |    +-- StagedLost                 (retryable) staged files are gone or cut short
     |    +-- SchemaChanged
     |         +-- ConsentNeeded         schema_changes: ask waits for an operator's decision
     |         +-- NeedsSync             only a new copy of the table is exact
     +-- SparkUnreachable            (retryable) Spark can't be reached, or its JVM ended
     +-- AlertNotSent                (retryable) a connection of WALDELTA_ALERTS refused a message
     +-- StageTimeout                a stage behind landing took longer than its task may
     +-- QualityFailed               an expectation failed, or a gate stopped a table
     +-- TargetDiffers               a reconciliation found rows that differ from the source's
     +-- StateError                  verbs called out of order
          +-- TargetAltered              an external writer changed its columns or constraints
          +-- ModeRefused                a target's mode forbids it: history would be lost

Messages are lower case without a final dot, name the object and say what to do next.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from waldelta.quantities import counted

if TYPE_CHECKING:
    from waldelta.pgoutput.messages import UnreadMessage


class WaldeltaError(Exception):
    """Base of all named errors. Airflow retries the task if ``retryable``.

    ``causes`` are the errors of single tables or expectations that this error combines.
    """

    retryable = False
    causes: tuple[WaldeltaError, ...] = ()


class ConfigError(WaldeltaError):
    """The pipeline file or the environment is wrong; nothing was changed."""


class JavaMissing(ConfigError):
    """A run has more to do than one process does, and Spark has no Java that it can start."""


class FilterNotTranslatable(ConfigError):
    """Part of a row filter has no certain counterpart in Spark; ``reason`` says which, the message
    where it stands.
    """

    def __init__(self, text: str, where: str, reason: str) -> None:
        self.text, self.where, self.reason = text, where, reason
        super().__init__(f"filter {text!r} can't be evaluated in Spark: at {where}: {reason}")

    def __reduce__(self) -> tuple[type[FilterNotTranslatable], tuple[str, str, str]]:
        return (FilterNotTranslatable, (self.text, self.where, self.reason))


class SourceError(WaldeltaError):
    """Something on the PostgreSQL side."""


class SourceUnreachable(SourceError):
    """No connection to the server."""

    retryable = True


class AuthenticationFailed(SourceError):
    """The server refused user, password, database or address."""


class PrivilegeMissing(SourceError):
    """The role lacks a privilege; the message names the grant."""


class SessionAltered(SourceError):
    """A session lost a setting that values depend on; none of its values was used."""


class NameUnreadable(SourceError):
    """The name of a catalog object has a byte that UTF-8 has no character for, so PostgreSQL can't
    send it.
    """


class PreflightFailed(SourceError):
    """Set-up was refused before anything was changed; ``problems`` lists every reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "set-up refused, nothing was changed:\n" + "\n".join(f"  - {p}" for p in problems)
        )


class LockHeld(SourceError):
    """Another run holds the advisory lock of this slot, target or session."""

    retryable = True


class TableBusy(SourceError):
    """Another session keeps a published table locked; nothing was changed."""

    retryable = True


class TransactionsStillOpen(SourceError):
    """Transactions older than the publication or slot are still running."""

    retryable = True


class SnapshotLost(SourceError):
    """A snapshot can't be used any more; a copy starts again with another one."""

    retryable = True


class NotPrimary(SourceError):
    """The server is a standby; this needs the primary."""


class NotStandby(SourceError):
    """The server of source.read_from isn't a standby of the primary: it was promoted, or belongs to
    another; nothing was read.
    """


class SlotError(SourceError):
    """The replication slot."""


class SlotMissing(SlotError):
    """The slot doesn't exist."""


class SlotForeign(SlotError):
    """The slot belongs to another plugin, database or consumer."""


class SlotInUse(SlotError):
    """Another process holds the slot."""

    retryable = True


class SlotLost(SlotError):
    """The server removed WAL that the slot needed."""


class PublicationGone(SlotError):
    """A listed publication doesn't exist at the WAL position that is decoded; nothing was
    consumed.
    """


class SlotUnreadable(SlotError):
    """PostgreSQL can't decode the slot's next transaction, and never will; everything before it has
    landed.
    """


class PeekTimeout(SlotError):
    """Reading one window of the slot took longer than the statement timeout."""

    retryable = True


class PeekTooLarge(SlotError):
    """A read of the slot exceeds the server's temp_file_limit or memory."""

    retryable = True


class SourceDiskFull(SlotError):
    """A disk of the source's server is full, for a read of the slot or for a query's temporary
    files; a read of the slot consumed nothing.
    """

    retryable = True


class NoFreeSlot(SlotError):
    """The server has no room for the copies of the slot that keep a way back; nothing was
    consumed.
    """

    retryable = True


class SlotGap(SlotError):
    """The slot moved past changes that were never landed, or that the change log has lost.

    ``lost`` is the range of positions that the change log lacks (None: since this slot incarnation
    began); without it, the range behind the landed end.
    """

    def __init__(self, message: str, lost: tuple[int | None, int] | None = None) -> None:
        self.lost = lost
        super().__init__(message)


class SlotStuck(SlotError):
    """The slot should have moved and did not."""


class SlotCritical(SlotError):
    """The slot will be lost soon, or keeps more WAL than slot_limits allow; notifiers receive it,
    and the run goes on.
    """


class StandbyAway(SlotError):
    """A standby that the run needs is unreachable or too far behind; nothing was read.

    It is the standby of source.read_from, or one that must receive changes before a failover slot
    returns them.
    """

    retryable = True


class SourceChanged(SlotError):
    """The server isn't the one that the lake was read from, or its timeline may lack landed
    changes.
    """


class ConsumeMismatch(SlotError):
    """The changes consumed from the slot differ from those landed; a copy of the slot was kept."""


class DecodeError(WaldeltaError):
    """A protocol message that can't be read: which message and field, at which byte.

    ``row`` is its number among the messages read together, where known, ``unread`` the message
    itself where landing met it.
    """

    unread: UnreadMessage | None = None

    def __init__(
        self, message: str, field: str, offset: int, detail: str = "", row: int | None = None
    ) -> None:
        self.message, self.field, self.offset, self.detail, self.row = (
            message,
            field,
            offset,
            detail,
            row,
        )
        text = f"malformed {message} message: {field} at byte {offset}"
        super().__init__(f"{text}: {detail}" if detail else text)

    @classmethod
    def parse(cls, text: str) -> DecodeError | None:
        """Returns the error with this text, as a task of another process printed it."""
        match = re.fullmatch(
            r"malformed (.*?) message: (.*?) at byte (-?\d+)(?:: (.*))?", text, re.DOTALL
        )
        return cls(match[1], match[2], int(match[3]), match[4] or "") if match else None

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, str, int, str, int | None]]:
        return (DecodeError, (self.message, self.field, self.offset, self.detail, self.row))


class SyncFailed(WaldeltaError):
    """Some tables couldn't be copied: ``failures`` by table name; ``copied`` tables were."""

    def __init__(self, failures: Mapping[str, WaldeltaError], copied: int = 0) -> None:
        self.failures = dict(failures)
        self.causes = tuple(self.failures.values())
        # A retry helps the retryable ones; the others are reported again.
        self.retryable = any(err.retryable for err in self.failures.values())
        lines = "\n".join(
            f"  - {name}: {type(err).__name__}: {err}"
            for name, err in sorted(self.failures.items())
        )
        super().__init__(
            f"{len(self.failures)} of {counted(len(self.failures) + copied, 'table')}"
            f" not synced:\n{lines}"
        )


class LakeError(WaldeltaError):
    """Something on the Delta side."""


class TargetNotWritable(LakeError):
    """The target folder can't be written, or what lies there can't be removed.

    ``retryable`` is set on an instance where another attempt can help. By default it is False, so
    that a full disk doesn't make a copy read its whole table again.
    """


class EmptyPartitionValue(TargetNotWritable):
    """A column that divides a target into partitions has an empty text, which Delta reads as
    null.
    """


class StoreRefused(LakeError):
    """The lake's object store refuses the credentials, or they lack a permission."""


class StoreMissing(LakeError):
    """The lake's object store has no such bucket or container."""


class StoreUnreachable(LakeError):
    """The lake's object store doesn't answer, or answers that it has too much to do."""

    retryable = True


class LateWriter(LakeError):
    """A newer run has already committed, or other writers keep committing to a target."""

    retryable = True


class CatalogError(WaldeltaError):
    """Something about the catalog that the targets are registered in; data never waits for it."""


class CatalogUnreachable(CatalogError):
    """The catalog can't be reached or doesn't answer in time; the next run tries again."""

    retryable = True


class CatalogRefused(CatalogError):
    """The catalog refuses the credentials or a request, or they lack a permission."""


class CatalogNameRefused(CatalogError):
    """A target's name is none that the catalog can have, or two targets have the same one there."""


class CatalogTableForeign(CatalogError):
    """The catalog has an entry of that name that this pipeline didn't make; it was left alone."""


class ApplyError(WaldeltaError):
    """Changes that can't be merged into a target, or another unforeseen failure of a table.

    The changes stay in the change log.
    """


class StagedLost(ApplyError):
    """A file that a task staged for another isn't there, or hasn't the rows that were written;
    nothing was committed.
    """

    retryable = True


class SchemaChanged(ApplyError):
    """The source table's columns no longer match the target's."""


@dataclass(frozen=True, slots=True)
class Question:
    """A change of a source table that an operator decides on; ``key`` identifies it.

    ``agreed`` is what a run does to the target once the operator agrees, ``refused`` what happens
    otherwise; ``columns`` are those that a refusal stops.
    """

    kind: str
    key: str
    text: str
    agreed: str
    refused: str
    columns: tuple[str, ...] = ()

    def describe(self) -> str:
        """Returns the change, and what each answer does."""
        return f"{self.text} (if you agree, {self.agreed}; if you refuse, {self.refused})"


class ConsentNeeded(SchemaChanged):
    """With ``schema_changes: ask``: a change that takes data from a target waits for an
    operator.
    """

    def __init__(self, table: str, questions: Sequence[Question]) -> None:
        listed = "; ".join(question.describe() for question in questions)
        super().__init__(
            f"{table}: {listed}; its changes wait in the change log until an operator decides:"
            " waldelta decide FILE list"
        )
        self.questions = questions


class NeedsSync(SchemaChanged):
    """The source changed a table in a way that replication doesn't send; only a new copy of it is
    exact.
    """


class AlertNotSent(WaldeltaError):
    """A connection that WALDELTA_ALERTS names refused a message, or its service didn't answer."""

    retryable = True


class SparkUnreachable(WaldeltaError):
    """No connection to Spark: to its Connect server, or its master, or the driver's JVM, which
    ended.

    ``retryable`` is False on an error for a refused token, or for TLS on one side alone.
    """

    retryable = True


class StageTimeout(WaldeltaError):
    """A stage that follows landing took longer than its task may, and was ended; the next run lands
    first and goes on from there.
    """


class QualityFailed(WaldeltaError):
    """Critical expectations failed; the landed changes are safe and the slot has moved."""


class TargetDiffers(WaldeltaError):
    """A reconciliation found targets that don't hold what their source does; nothing was changed in
    them.
    """


class StateError(WaldeltaError):
    """A verb was called before the one it needs."""


class TargetAltered(StateError):
    """An external writer changed a target's columns, constraints, properties or protocol, so that
    changes can't be merged.
    """


class ModeRefused(StateError):
    """A target's mode doesn't allow what was asked: rows that it keeps on purpose would be lost."""


# Classes of SQLSTATE whose messages repeat values: data exceptions, violated constraints, errors of
# functions and of what they call.
_STATES_WITH_VALUES = ("22", "23", "2F", "38", "39", "P0")
# Spark's messages end with the state. The other classes name objects, and our own raise_error() is
# P0001.
_SPARK_VALUE = re.compile(r"\[([A-Z][A-Z0-9_.]+)\](?:(?!\[[A-Z]).)*?SQLSTATE: (22\w{3})", re.DOTALL)
_FRAGMENT = re.compile(r"^== SQL.*==\n(.*)$", re.MULTILINE)
_COLUMN = re.compile(r"`((?:[^`]|``)+)`")
# What Arrow, Python and delta-rs repeat of a value.
_REPEATED = re.compile(r"(['\"]).*\1|(?<![\w.])[-+]?\d[\w.,:+-]*", re.DOTALL)
# A message may be a JVM's with the whole stack.
_LONGEST = 50_000
# delta-rs adds the row that violates a constraint.
VIOLATING_ROW = re.compile(r"(violated by value in row:).*", re.DOTALL)
_OF_FILES = re.compile(r"Parquet|IPC|file|folder|director|path|No such|Error creating|Kernel error")


def without_values(err: BaseException) -> str:
    """Returns what an error says on its first line, without values of rows.

    Of PostgreSQL's and Spark's errors about a value, the code stays, with the columns that they
    name. Texts in quotes and numbers of Arrow's errors and Python's are left out.
    """
    diag = getattr(err, "diag", None)
    state = str(getattr(err, "sqlstate", None) or "")
    if state.startswith(_STATES_WITH_VALUES):
        of = [getattr(diag, f"{kind}_name", None) for kind in ("table", "column", "constraint")]
        names = "".join(f", {name}" for name in of if name)
        return f"SQLSTATE {state}, {type(err).__name__}{names}"
    text = str(getattr(diag, "message_primary", None) or err)[:_LONGEST]
    if (match := _SPARK_VALUE.search(text)) is not None:
        columns = dict.fromkeys(_COLUMN.findall("\n".join(_FRAGMENT.findall(text))))
        of_columns = f" in an expression of {', '.join(columns)}" if columns else ""
        return f"[{match[1]}] SQLSTATE: {match[2]}{of_columns}"
    line = VIOLATING_ROW.sub(r"\1 …", _first_line(text)) or type(err).__name__
    is_of_value = isinstance(err, (ValueError, LookupError, ArithmeticError, TypeError))
    if is_of_value and not isinstance(err, UnicodeError):
        beginning = _REPEATED.split(text, maxsplit=1)[0]
        return line if _OF_FILES.search(beginning) else _first_line(_REPEATED.sub("…", text))
    return line


def class_and_text(err: BaseException) -> str:
    """Returns an error's class, and without_values() of it, for a line of the log."""
    kind, text = type(err).__name__, without_values(err)
    return kind if text in (kind, "…") else f"{kind}: {text}"


def _first_line(text: str) -> str:
    """Returns the message of a JVM exception without its stack trace, or the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line_of_message = next(
        (line for line in lines[1:3] if line.startswith(": ")), next(iter(lines), "")
    )
    return line_of_message.removeprefix(": ")


def stack_without_values(err: BaseException) -> str:
    """Returns where an error was raised, and without_values() of it; not what it followed from."""
    frames = "".join(traceback.format_tb(err.__traceback__))
    kind = type(err)
    return (
        f"Traceback (most recent call last):\n{frames}"
        f"{kind.__module__}.{kind.__qualname__}: {without_values(err)}"
    )


@contextmanager
def raised_as(
    name: Callable[[Any], WaldeltaError],
    kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
) -> Iterator[None]:
    """Raise errors of these kinds as the named error that ``name`` returns for each.

    Errors that are named already stay. The traceback doesn't show the first error, whose own text
    may have values of rows, a query or credentials.
    """
    try:
        yield
    except WaldeltaError:
        raise
    except kinds as err:
        raise name(err) from None

"""Where work runs: in this process while it is small, on Spark once it is large.

A step is written once, for numbered shares of rows, and is given a Runner. Where its shares run is
the runner's business. What only Spark does takes the runner's session.

Spark would retry a task that raised one of our errors, only to meet it again. So a task returns
such an error as a row where it can. Where rows are the task's result, the error is noted for later
attempts, which raise it at once. A task whose process died is retried.

A RunnerPool works on several targets at once, each piece on a session that no other piece uses.
Settings and temporary views belong to a session, and Great Expectations gives the views of all
queries the same name.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar

import pyarrow as pa

from waldelta.errors import ApplyError, WaldeltaError
from waldelta.permissions import lake_umask, private_files
from waldelta.pipeline import named_error
from waldelta.quantities import counted
from waldelta.spark.arrow_schema import ddl
from waldelta.spark.session import is_connect, open_session, shared_settings, sibling_session
from waldelta.spark.settings import SESSION_SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from waldelta.pipeline import Job

log = logging.getLogger(__name__)

Task = Callable[[int], pa.Table]
# A row that a task returned, by column.
Answer = dict[str, Any]
# Runs tasks with each number up to a count; returns rows of a schema.
Run = Callable[[int, pa.Schema, Task], list[Answer]]

# Fewer rows or bytes aren't worth a task: each one reads what all need, and writes files of its
# own.
ROWS_PER_TASK = 250_000
BYTES_PER_TASK = 64 << 20
# While no session has been started, up to this many tasks run, and up to this many messages are
# applied, in this process, since a JVM takes longer to start. Each task needs as much memory as a
# worker of Spark's.
LOCAL_TASKS, LOCAL_MESSAGES = 16, 1_000_000
# As many of these tasks as Spark's local[*] would run at once, up to what memory is planned for.
TASKS_AT_ONCE = min(4, os.cpu_count() or 1)
# All runners of the process share them, so that tables that are copied at once don't multiply the
# connections to the source and the memory. No task runs others.
_AT_ONCE = threading.BoundedSemaphore(TASKS_AT_ONCE)
# The number of the session for concurrent work, above those of a pool.
CONCURRENT = 9
_FAILED = pa.field("_wd_failed", pa.string())
# Why Spark works where a step names no other reason.
ONLY_SPARK = "a step that only Spark does"


def most_tasks() -> int:
    """Returns how many tasks run in this process; where a Spark server waits for work, as many as
    take as long as four.
    """
    return 4 * TASKS_AT_ONCE if _has_server() else LOCAL_TASKS


def most_messages() -> int:
    """Returns up to how many messages a run applies in this process; fewer where a Spark server
    waits for work.
    """
    return LOCAL_MESSAGES // 10 if _has_server() else LOCAL_MESSAGES


def _has_server() -> bool:
    return "SPARK_REMOTE" in os.environ


class OnSpark:
    """Runs everything on a session: the caller's own, or with ``runner: spark``.

    ``is_started`` as in InProcess; ``uses``, how often the session was asked for, isn't counted.
    ``why`` says why Spark works.
    """

    is_started = True
    uses = None

    def __init__(self, session: SparkSession, why: str = "on the caller's session") -> None:
        self._session, self.why = session, why

    @property
    def session(self) -> SparkSession:
        """The session."""
        return self._session

    def spark(self, why: str = ONLY_SPARK) -> SparkSession:  # noqa: ARG002
        """Returns the session; its first use may open it, and raises what that raises."""
        return self.session

    def run(
        self, count: int, schema: pa.Schema, task: Task, *, stops: bool = False
    ) -> list[Answer]:
        """Run ``task`` with each number from 0 to ``count`` - 1; returns rows of ``schema``.

        A task may run again when its worker died or its stage is repeated. It doesn't after raising
        one of our errors, which this raises once all tasks have ended. With ``stops`` such an error
        ends the other tasks at once, because their work is useless without it.
        """
        if not count:
            return []
        numbered = _by_number(task, schema, stops=stops)
        numbers = self.session.range(0, count, 1, count)
        read = once(numbered) if stops else numbered
        return _without_failure(
            _collect_answers(numbers.mapInArrow(read, ddl(_with_failure(schema))))
        )

    def start(self, why: str) -> None:
        """Do nothing: the session is there."""

    def prepared(self) -> AbstractContextManager[None]:
        """Give the session the settings that values depend on, for the block.

        It may be the caller's own, with other settings, which it has again when its last job has
        ended. Raises ConfigError for a setting that it refuses.
        """
        return shared_settings(self.session, SESSION_SETTINGS)

    @contextmanager
    def sibling(self, number: int, *, reads: bool = False) -> Iterator[OnSpark]:
        """Open a runner with one more session, which has temporary views of its own.

        ``number`` distinguishes several (sibling_session()). Opening it interrupts what a killed
        run left there; with ``reads`` nothing was left that writes, and the first use opens it.
        """
        with ExitStack() as opened:
            sibling = _Sibling(
                lambda: opened.enter_context(sibling_session(self.session, number)), self.why
            )
            if not reads:
                sibling.spark()
            yield sibling

    @property
    def has_siblings(self) -> bool:
        """Whether sibling() can open a session.

        A Connect session made by hand doesn't know its address.
        """
        return not self.is_connect or _has_server()

    @property
    def is_connect(self) -> bool:
        """Whether the session is one of a Spark Connect server, which continues without us."""
        return is_connect(self.session)

    def interrupt(self) -> None:
        """Interrupt what runs in the session; other sessions of its server or JVM continue."""
        with suppress(Exception):  # The session has ended since.
            self.session.interruptAll()


class _Sibling(OnSpark):
    """Runs everything on a session that its first use opens, which takes tenths of a second."""

    def __init__(self, make: Callable[[], SparkSession], why: str) -> None:
        self._make, self._lock, self.why = make, threading.Lock(), why
        self._own: SparkSession | None = None

    @property
    def session(self) -> SparkSession:
        """The session."""
        with self._lock:
            if self._own is None:
                self._own = self._make()
        return self._own

    def interrupt(self) -> None:
        """Interrupt what runs in the session, where it was opened."""
        if self._own is not None:
            super().interrupt()


class InProcess:
    """Runs few tasks in this process, and starts a session when there are more, or at its first
    use.

    ``uses`` is how often the session was asked for, ``why`` why Spark works, or "" while it
    doesn't.
    """

    has_siblings = True

    def __init__(self, make: Callable[[], SparkSession]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._on_spark: OnSpark | None = None
        self._start: threading.Thread | None = None
        self._siblings: list[InProcess] = []
        self._is_closed = False
        self.uses, self.why = 0, ""

    @property
    def is_started(self) -> bool:
        """Whether the session exists, or is being started: work that follows is Spark's."""
        return self._on_spark is not None or self._start is not None

    def spark(self, why: str = ONLY_SPARK) -> SparkSession:
        """Returns the session, which the first call starts; the run prints ``why``.

        Raises SparkUnreachable, JavaMissing or ConfigError when there can't be one.
        """
        return self._log_session_use(why).session

    def _log_session_use(self, why: str) -> OnSpark:
        if not self.why:
            self.why = why
            log.info("starting Spark: %s", why)
        self.uses += 1
        return self._start_session()

    def _start_session(self) -> OnSpark:
        with self._lock:
            if self._on_spark is None:
                if self._is_closed:
                    raise RuntimeError("the run that the session was for has ended")
                self._on_spark = OnSpark(self._make())
        return self._on_spark

    def run(
        self, count: int, schema: pa.Schema, task: Task, *, stops: bool = False
    ) -> list[Answer]:
        """Run up to most_tasks() tasks on threads of this process, unless a session has been
        started; a single one on the caller's.

        The first error ends the tasks that haven't begun, and is raised when the others have ended.
        """
        if count > (most := most_tasks()) or (count and self.is_started):
            why = f"it takes {counted(count, 'task')}, this process runs up to {most}"
            return self._log_session_use(why).run(count, schema, task, stops=stops)
        # A single task may hold what others wait for, such as the slot's lock.
        if count <= 1:
            return run_locally(count, schema, task)
        umask, has_failed = lake_umask(), threading.Event()

        def run_one(number: int) -> list[Answer]:
            with _AT_ONCE:
                if has_failed.is_set():
                    return []
                try:
                    return _answers(task, number, umask)
                except BaseException:
                    has_failed.set()
                    raise

        with ThreadPoolExecutor(min(count, TASKS_AT_ONCE), "task") as pool:
            return [*chain.from_iterable(pool.map(run_one, range(count)))]

    def start(self, why: str) -> None:
        """Start the session in the background; the first use raises why that fails."""

        def start() -> None:
            with suppress(Exception):
                self._start_session()

        if not self.is_started:
            self.why = why
            log.info("starting Spark: %s", why)
            self._start = threading.Thread(target=start, name="start Spark", daemon=True)
            self._start.start()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Give the session the settings that values depend on, for the block.

        One that is started in the block has them.
        """
        with ExitStack() as settings:
            if self._on_spark is not None:
                settings.enter_context(self._on_spark.prepared())
            try:
                yield
            finally:
                self._wait()

    @contextmanager
    def sibling(self, number: int, *, reads: bool = False) -> Iterator[Runner]:
        """Open a sibling, whose session is started at its first use, too, for the same reason."""
        if self._on_spark is not None:
            with self._on_spark.sibling(number, reads=reads) as on_spark:
                yield on_spark
            return
        with _in_process(lambda: sibling_session(self.spark(runner.why), number)) as runner:
            self._siblings.append(runner)
            yield runner

    @property
    def is_connect(self) -> bool:
        """Whether the session exists and is one of a Spark Connect server."""
        return self._on_spark is not None and self._on_spark.is_connect

    def interrupt(self) -> None:
        """Interrupt what runs in the session, where there is one, and in those of siblings.

        These may have been opened before there was a session.
        """
        if self._on_spark is not None:
            self._on_spark.interrupt()
        for sibling in self._siblings:
            sibling.interrupt()

    def close(self) -> None:
        """Let nobody start the session any more, after waiting for one that is being started."""
        self._wait()
        with self._lock:
            self._is_closed = True

    def _wait(self) -> None:
        if self._start is not None:
            self._start.join()


def run_locally(count: int, _schema: pa.Schema, task: Task) -> list[Answer]:
    """Run tasks one after another in this process, on the caller's thread."""
    umask = lake_umask()
    return [row for number in range(count) for row in _answers(task, number, umask)]


# Runs numbered tasks that return Arrow rows, and gives what only Spark does a session.
Runner: TypeAlias = InProcess | OnSpark


@contextmanager
def open_runner(
    name: str, job: Job | None = None, session_key: str | None = None
) -> Iterator[Runner]:
    """Open the runner of a job; its session, if any, ends with the block (open_session()).

    With ``runner: spark`` the session is opened at once, and does all work.
    """
    session = partial(open_session, name, job, session_key)
    if job is not None and job.lake.on_spark:
        with session() as spark:
            yield OnSpark(spark, "runner: spark")
        return
    with _in_process(session) as runner:
        yield runner


@contextmanager
def _in_process(
    session: Callable[[], AbstractContextManager[SparkSession]],
) -> Iterator[InProcess]:
    """Open a runner whose session, if it is ever used, ends with the block."""
    with ExitStack() as opened:
        runner = InProcess(lambda: opened.enter_context(session()))
        opened.callback(runner.close)
        yield runner


class _HasSize(Protocol):
    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...


_Piece = TypeVar("_Piece", bound=_HasSize)


def shares(pieces: Iterable[_Piece], least_rows: int = 0) -> list[list[_Piece]]:
    """Returns pieces, in their order, as tasks of at least ROWS_PER_TASK rows or BYTES_PER_TASK.

    ``least_rows`` is how many rows make a task when that is more.
    """
    tasks: list[list[_Piece]] = []
    most = max(ROWS_PER_TASK, least_rows)
    rows, size = most, 0
    for piece in pieces:
        if rows >= most or size >= BYTES_PER_TASK:
            tasks.append([])
            rows = size = 0
        tasks[-1].append(piece)
        rows, size = rows + piece.rows, size + piece.bytes
    return tasks


def _with_failure(schema: pa.Schema) -> pa.Schema:
    return schema.append(_FAILED)


def _by_number(
    task: Task, row_schema: pa.Schema, *, stops: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns a task as a function of batches of numbers (column ``id``).

    One of our errors is a row, so that Spark doesn't try the task again; with ``stops`` it is
    raised.
    """
    umask, schema = lake_umask(), _with_failure(row_schema)

    def numbered(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            for number in part["id"].to_pylist():
                try:
                    answer = _answer(task, number, umask)
                except WaldeltaError as err:
                    if stops:
                        raise
                    yield pa.RecordBatch.from_pylist(
                        [{_FAILED.name: error_text(err)}], schema=schema
                    )
                    return
                yield from answer.append_column(
                    _FAILED, pa.nulls(len(answer), _FAILED.type)
                ).to_batches()

    return numbered


def _answers(task: Task, number: int, umask: int) -> list[Answer]:
    rows: list[Answer] = _answer(task, number, umask).to_pylist()
    return rows


def _answer(task: Task, number: int, umask: int) -> pa.Table:
    with private_files(umask):
        answer = task(number)
    # Spark keeps the process for later tasks, perhaps for hours.
    pa.default_memory_pool().release_unused()
    return answer


def _without_failure(answers: list[Answer]) -> list[Answer]:
    """Returns what tasks returned; raises the error that one of them met."""
    for answer in answers:
        if (failure := answer.pop(_FAILED.name)) is not None:
            raise named_error(Exception(failure)) or ApplyError(failure)
    return answers


def _collect_answers(answers: DataFrame) -> list[Answer]:
    """Returns the rows; raises a task's error, which ended the others, under its name."""
    try:
        return [row.asDict() for row in answers.collect()]
    except Exception as err:
        if (error := named_error(err)) is not None:
            raise error from None
        raise


_Reader = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def error_text(err: BaseException) -> str:
    """Returns an error as the text that ``named_error`` reads, for a row to the driver."""
    return "".join(traceback.format_exception_only(err)).strip()


def once(read: _Reader) -> _Reader:
    """Wrap a task's function so that later attempts raise the named error that an earlier one met.

    This works on the machine where the error occurred: the note is in the folder that Spark clears
    when the application ends.
    """
    key = uuid.uuid4().hex

    def attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import SparkFiles, TaskContext

        context = TaskContext.get()
        if context is None:
            yield from read(batches)
            return
        name = f"waldelta-{key}-{context.stageId()}-{context.partitionId()}"
        note = Path(SparkFiles.getRootDirectory()) / name
        if context.attemptNumber() and (failure := _read_note(note)) is not None:
            raise failure
        try:
            yield from read(batches)
        except WaldeltaError as err:
            with suppress(OSError):
                note.write_text(error_text(err))
            raise

    return attempt


def _read_note(note: Path) -> WaldeltaError | None:
    try:
        return named_error(Exception(note.read_text()))
    except OSError:
        return None


T = TypeVar("T")
R = TypeVar("R")

# On Spark, small targets are bound by round trips, not by cores, so more run at once than two cores
# could compute. In this process, more than two would wait for each other: Python runs one thread at
# a time.
MOST_AT_ONCE, MOST_IN_PROCESS = 4, 2


@dataclass(frozen=True, slots=True)
class RunnerPool:
    """The given session and as many siblings as the pieces of work need."""

    _size: int
    _free: SimpleQueue[Runner]

    @classmethod
    @contextmanager
    def open(cls, runner: Runner, pieces: int, *, reads: bool = False) -> Iterator[Self]:
        """Open the siblings that ``pieces`` of work need, until the block's end.

        ``reads``: the work writes nothing (Runner.sibling()).
        """
        most = MOST_AT_ONCE if runner.is_started else MOST_IN_PROCESS
        pool = cls(max(1, min(pieces, most)) if runner.has_siblings else 1, SimpleQueue())
        pool._free.put(runner)
        with ExitStack() as siblings:
            for number in range(1, pool._size):
                pool._free.put(siblings.enter_context(runner.sibling(number, reads=reads)))
            yield pool

    def map(self, work: Callable[[Runner, T], R], items: Sequence[T]) -> list[R]:
        """Returns the results in the items' order.

        The first error is raised, and work that hasn't begun by then never does.
        """

        def run(item: T) -> R:
            session = self._free.get()
            try:
                return work(session, item)
            finally:
                self._free.put(session)

        if self._size == 1:
            return [run(item) for item in items]
        executor = ThreadPoolExecutor(self._size, "targets")
        try:
            return list(executor.map(run, items))
        finally:
            # Don't wait: when the run is being ended, leaving the pool interrupts what still runs.
            executor.shutdown(wait=False, cancel_futures=True)

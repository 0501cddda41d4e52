"""The Spark session, classic or Connect; the only module that may know which."""

from __future__ import annotations

import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from waldelta.errors import ConfigError, SparkUnreachable, WaldeltaError
from waldelta.permissions import private_files
from waldelta.pipeline.advisory_locks import session_lock
from waldelta.pipeline.task_errors import DRIVER_MEMORY_VARIABLE, first_line, has_lost_jvm
from waldelta.spark._connect_server import check_reachable, named_refusal
from waldelta.spark.java import check_java
from waldelta.spark.settings import (
    LOCAL_MASTER,
    SETTINGS,
    driver_memory,
    driver_settings,
    jars,
    local_settings,
    log_level,
    log_settings,
)

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    from waldelta.pipeline import Job

log = logging.getLogger(__name__)

# Settings that a session of somebody else's Connect server takes too.
_SESSION_SETTINGS = (
    "spark.sql.session.timeZone",
    "spark.sql.ansi.enabled",
    "spark.sql.variable.substitute",
    "spark.sql.subexpressionElimination.skipForShortcutExpr",
    "spark.sql.execution.arrow.maxRecordsPerBatch",
)
# What tags one statement's commit (merge.tagged); a killed run leaves it behind, and Delta would
# take a later commit for it.
COMMIT_SETTINGS = (TXN_APP, TXN_VERSION, USER_METADATA) = (
    "spark.databricks.delta.write.txnAppId",
    "spark.databricks.delta.write.txnVersion",
    "spark.databricks.delta.commitInfo.userMetadata",
)
# Of sessions beside one another: more than those of a pool.
_CONCURRENT = 9
_IDS_PER_KEY = 10_000
# Set while a run is in the session, and ever after when that was killed.
_IS_OPEN = "spark.waldelta.open"
# What the sequence of a session's ids is made of.
_KEY = "waldelta_key"


def spark_session(
    master: str = LOCAL_MASTER, *, name: str = "waldelta", session_key: str | None = None
) -> SparkSession:
    """A session with Delta: Spark Connect when SPARK_REMOTE is set, spark-submit's own, or a local
    one.

    ``session_key`` fixes the Connect session's id; whatever runs in that session is interrupted, so
    the caller holds the lock of that key (open_session does).
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if remote := os.environ.get("SPARK_REMOTE"):
        return _connect_session(remote, session_key)
    return _classic_session(master, name)


class DeferredSession:
    """A session that is made by the first use of it, so that work which never uses it starts no
    JVM.
    """

    def __init__(self, make: Callable[[], SparkSession]) -> None:
        self._make, self._lock = make, threading.Lock()
        self.made: SparkSession | None = None

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self.made is None:
                self.made = self._make()
        return getattr(self.made, name)


def is_started(spark: SparkSession) -> bool:
    """Whether the session is there already; False where its first use would start a JVM."""
    return not isinstance(spark, DeferredSession) or spark.made is not None


@contextmanager
def deferred_session(
    name: str, job: Job | None = None, session_key: str | None = None
) -> Iterator[SparkSession]:
    """As open_session(), but a session whose JVM would be started here is only made once it is
    used.

    A Spark Connect server is there anyway, as is the JVM that spark-submit has started.
    """
    if "SPARK_REMOTE" in os.environ or _is_submitted():
        with open_session(name, job, session_key) as spark:
            yield spark
        return
    with ExitStack() as opened:
        deferred = DeferredSession(lambda: opened.enter_context(open_session(name)))
        yield cast("SparkSession", deferred)


@contextmanager
def open_session(
    name: str, job: Job | None = None, session_key: str | None = None
) -> Iterator[SparkSession]:
    """A session for one job, stopped at the end whatever happens.

    With a job and a key, a Connect session is one that a later run can find again: that run
    interrupts there what a killed one left running. The key's lock comes first, since only its loss
    shows that the other run is dead: raises LockHeld when that one is alive.
    """
    key = session_key if job is not None and "SPARK_REMOTE" in os.environ else None
    with session_lock(job, key) if job is not None and key is not None else nullcontext():
        spark = spark_session(
            os.environ.get("WALDELTA_MASTER", LOCAL_MASTER), name=name, session_key=key
        )
        try:
            with _marked_open(spark) if key is not None else nullcontext():
                yield spark
        finally:
            # Released, the session's id would be refused for the next run.
            if key is not None:
                _close(spark)
            else:
                _stop(spark)


def read_log_store(spark: SparkSession | None, scheme: str) -> str:
    """The class by which Spark commits to Delta tables of a scheme, as configured; empty where
    Delta's default is.

    Of a session that a job would have, where none is given; raises the named error of one that
    can't be had.
    """
    if (spark := spark or _active_session()) is not None:
        configured = (f"spark.delta.logStore.{scheme}.impl", "spark.delta.logStore.class")
        return next(filter(None, (spark.conf.get(name, "") for name in configured)), None) or ""
    try:
        with open_session("waldelta check") as opened:
            return read_log_store(opened, scheme)
    except WaldeltaError:
        raise
    except Exception as err:  # setup needs no Spark, but for this
        log.warning("Spark can't be asked for its log store: %s", err)
        return ""


def _active_session() -> SparkSession | None:
    if "SPARK_REMOTE" in os.environ:
        from pyspark.sql.connect.session import SparkSession as ConnectSession

        return cast("SparkSession | None", ConnectSession.getActiveSession())
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def _stop(spark: SparkSession) -> None:
    """Stop a session; where it is classic, with its JVM's context.

    PySpark waits up to a second and a half for a thread of its own that looks every so often
    whether it is to end; it may do so later.
    """
    context = None if is_connect(spark) else spark.sparkContext
    accumulators = getattr(context, "_accumulatorServer", None)
    if accumulators is not None:
        setattr(context, "_accumulatorServer", None)  # noqa: B010 - none of PySpark's public names
    try:
        spark.stop()
    except Exception as err:
        if not has_lost_jvm(err):  # the run's own error says so
            raise
    if accumulators is not None:
        threading.Thread(
            target=accumulators.shutdown, name="stop accumulators", daemon=True
        ).start()


def _connect_session(remote: str, session_key: str | None) -> SparkSession:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # pyspark.sql.functions look here for which kind of column to make.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    check_reachable(remote)
    # The classic and the Connect session share their public surface; job code uses nothing else.
    spark: SparkSession
    try:
        if session_key is None:
            spark = cast("SparkSession", ConnectSession.builder.remote(remote).getOrCreate())
        else:
            spark = _keyed_session(ConnectSession.builder, remote, session_key)
        _configure(spark)
    except Exception as err:
        if (refused := named_refusal(remote, err)) is None:
            raise
        # Not chained: the server's own error may repeat what the client sent.
        raise refused from None
    return spark


def _configure(spark: SparkSession) -> None:
    """Give a Connect session the settings that every statement relies on."""
    for key in _SESSION_SETTINGS:
        spark.conf.set(key, SETTINGS[key])
    # The server would keep analysed plans under numbers that each client process counts from the
    # same beginning, so that a later process of a session that goes on is given the columns which a
    # target had in an earlier one.
    spark.conf.set("spark.connect.session.planCache.enabled", "false")
    for key in COMMIT_SETTINGS:
        spark.conf.unset(key)


def _keyed_session(builder: Any, remote: str, session_key: str) -> SparkSession:
    """The first session of this key's sequence that nobody has left open; whatever runs in one that
    is open is interrupted.

    That one is closed for good. The server never takes an id again once its session was closed, or
    has expired, so one fixed id would work only until then.
    """
    separator = (
        "" if remote.endswith(";") else ";" if "/;" in remote or remote.endswith("/") else "/;"
    )
    for attempt in range(_IDS_PER_KEY):
        session_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{session_key}#{attempt}")
        spark: SparkSession = builder.remote(f"{remote}{separator}session_id={session_id}").create()
        try:
            spark.interruptAll()
            was_left = spark.conf.get(_IS_OPEN, "") == "true"
        except Exception as err:
            _close(spark)
            if "SESSION_CLOSED" not in str(err):
                raise
        else:
            if not was_left:
                setattr(spark, _KEY, session_key)
                return spark
            # Whoever left it may not be dead: what it goes on to set would be the settings of this
            # run's commits.
            cast("ConnectSession", spark).release_session_on_close = True
            spark.stop()
    raise ConfigError(
        f"the Spark Connect server has closed all {_IDS_PER_KEY} sessions of {session_key}:"
        " restart it"
    )


@contextmanager
def _marked_open(spark: SparkSession) -> Iterator[None]:
    """Tell who comes next that somebody may be in the session, unless this process says at its end
    that it isn't any more.

    A mark that stays, since the server is gone or has closed an idle session, costs the next run
    one more id.
    """
    spark.conf.set(_IS_OPEN, "true")
    try:
        yield
    except Exception as err:
        if not _was_lost(err):
            _unmark(spark)
        raise
    _unmark(spark)


def _unmark(spark: SparkSession) -> None:
    with suppress(Exception):
        spark.conf.unset(_IS_OPEN)


def _was_lost(err: BaseException) -> bool:
    """Whether a call to the server failed: if it is gone, it would be asked again for minutes."""
    seen: BaseException | None = err
    while seen is not None and not type(seen).__module__.startswith("grpc"):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def _close(spark: SparkSession) -> None:
    """Close the client and leave the server's session as it is."""
    cast("ConnectSession", spark).release_session_on_close = False
    spark.stop()


@contextmanager
def sibling_session(spark: SparkSession, number: int) -> Iterator[SparkSession]:
    """One more session beside this one, with temporary views of its own; ``number`` tells several
    apart.

    Over Connect its id follows from the first one's key, so that a later run interrupts what a
    killed one left there.
    """
    if not is_connect(spark):
        yield spark.newSession()
        return
    key = getattr(spark, _KEY, cast("ConnectSession", spark).session_id)
    sibling = _connect_session(os.environ["SPARK_REMOTE"], f"{key}:{number}")
    try:
        with _marked_open(sibling):
            yield sibling
    except BaseException:
        with suppress(Exception):  # what went wrong comes first
            sibling.interruptAll()
        raise
    finally:
        _close(sibling)


def concurrent_session(spark: SparkSession) -> AbstractContextManager[SparkSession]:
    """One more session, for work beside this one's and its pool's."""
    return sibling_session(spark, _CONCURRENT)


def interrupt(spark: SparkSession) -> None:
    """End what is under way in a session; what others of the same server or JVM do goes on."""
    with suppress(Exception):  # the session has ended meanwhile
        spark.interruptAll()


def has_siblings(spark: SparkSession) -> bool:
    """Whether more sessions beside this one can be had; a Connect session made by hand doesn't say
    where from.
    """
    return not is_connect(spark) or "SPARK_REMOTE" in os.environ


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect server's, which goes on when its client is gone."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _classic_session(master: str, name: str) -> SparkSession:
    import pyspark
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if _is_submitted():
        with _named_start("spark-submit's master"):
            return SparkSession.builder.appName(name).getOrCreate()
    check_java()
    own = {
        "spark.jars": ",".join(str(jar) for jar in jars()),
        "spark.driver.memory": driver_memory(),
    }
    settings = driver_settings() | local_settings() | log_settings() | own
    conf = SparkConf().setMaster(master).setAppName(name).setAll(list(settings.items()))
    if master.startswith("local"):  # else Spark warns of the host's name at each start
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Else spark-submit starts one more Python only to find it.
    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))
    with private_files(), _named_start(master):  # the JVM starts the tasks' Python processes
        context = SparkContext.getOrCreate(conf)
        _quieten(context)
        if master.startswith("local"):
            _start_workers(context)
        return SparkSession.builder.config(conf=conf).getOrCreate()


def _is_submitted() -> bool:
    """Whether spark-submit has started this process."""
    return "SPARK_SUBMIT" in os.environ.get("WALDELTA_LAUNCHER", "")


@contextmanager
def _named_start(master: str) -> Iterator[None]:
    """Raise a named error where the driver's JVM doesn't start, or Spark's master refuses the
    application.
    """
    from pyspark.errors import PySparkRuntimeError

    try:
        yield
    except PySparkRuntimeError as err:
        raise ConfigError(
            "Spark's Java process ended before the job could use it; the lines above have its"
            f" reason: check {DRIVER_MEMORY_VARIABLE} ({driver_memory()}) and JAVA_HOME"
        ) from err
    except Exception as err:
        if not type(err).__module__.startswith("py4j."):
            raise
        raise SparkUnreachable(
            f"Spark doesn't start on {master} ({first_line(err)}): check that the master is up and"
            " reachable from here, and Spark's settings"
        ) from err


def _quieten(context: SparkContext) -> None:
    """Keep PySpark's server of accumulators from printing a stack trace when the JVM, its only
    client, is gone.
    """
    if (
        log_level() != "DEBUG"
        and (server := getattr(context, "_accumulatorServer", None)) is not None
    ):
        server.handle_error = lambda *_: None


def _start_workers(context: SparkContext) -> None:
    """Have the tasks' Python import what it needs while the session is still being made, and the
    driver reads catalogs and the ledger.
    """
    # The thread calls the JVM alone: imports of two threads can meet modules that the other is in
    # the middle of.
    job = context.parallelize([0], 1).mapPartitions(_unchanged)._jrdd  # noqa: SLF001 - what Python makes of it, for the JVM

    def run() -> None:
        with suppress(
            Exception
        ):  # the session has ended already, or its first task tells what is wrong
            job.count()

    threading.Thread(target=run, name="start workers", daemon=True).start()


def _unchanged(values: Iterable[int]) -> Iterable[int]:
    return values

"""Opens the Spark session, classic or Connect; only this module knows which."""

from __future__ import annotations

import logging
import os
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from waldelta.errors import ConfigError, SparkUnreachable, without_values
from waldelta.lake.delta_statements import COMMIT_SETTINGS
from waldelta.permissions import private_files
from waldelta.pipeline.advisory_locks import session_lock
from waldelta.pipeline.task_errors import (
    DRIVER_MEMORY_VARIABLE,
    has_lost_jvm,
    with_causes,
)
from waldelta.server_errors import texts
from waldelta.spark.connect_server import check_reachable, named_refusal
from waldelta.spark.jars import check_java
from waldelta.spark.settings import (
    LOCAL_MASTER,
    NEEDS_SPARK,
    SESSION_SETTINGS,
    WITHOUT_SPARK_VARIABLE,
    authentication,
    check_pyspark,
    driver_memory,
    driver_settings,
    jars,
    local_settings,
    log_level,
    log_settings,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    from waldelta.pipeline import Job

log = logging.getLogger(__name__)

_IDS_PER_KEY = 10_000
# Set while a run uses the session, and left set when that run is killed.
_IS_OPEN = "spark.waldelta.open"
# The attribute with the key that a session's id is made from.
_KEY = "waldelta_key"


def spark_session(
    master: str = LOCAL_MASTER, *, name: str = "waldelta", session_key: str | None = None
) -> SparkSession:
    """Returns a session with Delta: Spark Connect when SPARK_REMOTE is set, spark-submit's own, or
    a local one.

    ``session_key`` fixes the Connect session's id. Everything that runs in that session is
    interrupted, so the caller must hold the lock of that key (open_session does).
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if remote := os.environ.get("SPARK_REMOTE"):
        return _connect_session(remote, session_key)
    spark = _classic_session(master, name)
    set_settings(spark)
    return spark


def check_remote(remote: str, timeout_s: float) -> None:
    """Raise SparkUnreachable where no Spark Connect server answers, and ConfigError for an address
    that sessions refuse.
    """
    check_pyspark("grpc")
    check_reachable(remote, timeout_s)


@contextmanager
def open_session(
    name: str, job: Job | None = None, session_key: str | None = None
) -> Iterator[SparkSession]:
    """Open a session for one job; it is always stopped at the end.

    With a job and a key, a Connect session is one that a later run can find again: that run
    interrupts what a killed run left running there. The key's lock is taken first, since only its
    loss shows that the other run is dead. Raises LockHeld when that run is alive. Ends the process
    as a kill does where WALDELTA_WITHOUT_SPARK is set.
    """
    if WITHOUT_SPARK_VARIABLE in os.environ:
        log.info("this process ends here, and spark-submit runs the rest")
        raise SystemExit(NEEDS_SPARK)
    key = session_key if job is not None and "SPARK_REMOTE" in os.environ else None
    with session_lock(job, key) if job is not None and key is not None else nullcontext():
        spark = spark_session(
            os.environ.get("WALDELTA_MASTER", LOCAL_MASTER), name=name, session_key=key
        )
        try:
            with _marked_open(spark) if key is not None else nullcontext():
                yield spark
        finally:
            # If the session were released, its id would be refused for the next run.
            if key is not None:
                _close(spark)
            else:
                _stop(spark)


def read_log_store(spark: SparkSession, scheme: str) -> str:
    """Returns the configured class by which Spark commits to Delta tables of a scheme.

    It is empty where Delta's default applies.
    """
    configured = (f"spark.delta.logStore.{scheme}.impl", "spark.delta.logStore.class")
    return next(filter(None, (spark.conf.get(name, "") for name in configured)), None) or ""


@contextmanager
def borrowed_session(spark: SparkSession | None) -> Iterator[SparkSession]:
    """Yields the given session, or the active one, or else one as a job would have, for the block.

    Raises the named error when that one can't be opened.
    """
    if (session := spark or _active_session()) is not None:
        yield session
        return
    with open_session("waldelta check") as opened:
        yield opened


def _active_session() -> SparkSession | None:
    """Returns the session of this thread or else of this process, and None where there is none.

    Spark keeps the active session by thread. A job that opens "its own" in another thread would get
    the process's session, and stop it at the end.
    """
    from pyspark.errors import PySparkRuntimeError

    try:
        if "SPARK_REMOTE" in os.environ:
            from pyspark.sql.connect.session import SparkSession as ConnectSession

            return cast("SparkSession", ConnectSession.active())
        from pyspark.sql import SparkSession

        return SparkSession.active()
    except PySparkRuntimeError as err:
        if err.getCondition() != "NO_ACTIVE_OR_DEFAULT_SESSION":
            raise
        return None


def _stop(spark: SparkSession) -> None:
    """Stop a session; for a classic one, also its JVM's context.

    PySpark would wait up to a second and a half for a thread of its own that checks at intervals
    whether it must end. That thread ends later in the background.
    """
    context = None if is_connect(spark) else spark.sparkContext
    accumulators = getattr(context, "_accumulatorServer", None)
    if accumulators is not None:
        setattr(context, "_accumulatorServer", None)  # noqa: B010 - none of PySpark's public names
    try:
        spark.stop()
    except Exception as err:
        if not has_lost_jvm(err):  # The run's own error reports the lost JVM.
            raise
    if accumulators is not None:
        threading.Thread(
            target=accumulators.shutdown, name="stop accumulators", daemon=True
        ).start()


def _connect_session(remote: str, session_key: str | None) -> SparkSession:
    check_pyspark("grpc")
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # pyspark.sql.functions reads this to decide which kind of column to create.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    check_reachable(remote)
    # The classic and the Connect session share their public surface; job code uses nothing else.
    spark: SparkSession
    try:
        if session_key is None:
            spark = cast("SparkSession", ConnectSession.builder.remote(remote).getOrCreate())
        else:
            spark = _keyed_session(ConnectSession.builder, remote, session_key)
        set_settings(spark)
        # The server would cache analysed plans under numbers that each client process counts from
        # the same beginning. A later process in the same session would get the columns that a
        # target had in an earlier process.
        spark.conf.set("spark.connect.session.planCache.enabled", "false")
        for key in COMMIT_SETTINGS:
            spark.conf.unset(key)
    except Exception as err:
        if (refused := named_refusal(remote, err)) is None:
            raise
        # Not chained, because the server's error may repeat what the client sent.
        raise refused from None
    return spark


def _keyed_session(builder: Any, remote: str, session_key: str) -> SparkSession:
    """Returns the first session of this key's sequence that no run has left open.

    Everything that runs in an open one is interrupted, and that session is closed for good. The
    server never accepts an id again once its session was closed or has expired, so one fixed id
    would work only until then.
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
            if texts.SESSION_CLOSED.search(str(err)) is None:
                raise
        else:
            if not was_left:
                setattr(spark, _KEY, session_key)
                return spark
            # The run that left it may be alive: the settings that it sets would apply to this run's
            # commits.
            cast("ConnectSession", spark).release_session_on_close = True
            spark.stop()
    raise ConfigError(
        f"the Spark Connect server has closed all {_IDS_PER_KEY} sessions of {session_key}:"
        " restart it"
    )


@contextmanager
def _marked_open(spark: SparkSession) -> Iterator[None]:
    """Mark the session as in use until this process removes the mark at its end.

    A mark that stays, because the server is gone or has closed an idle session, costs the next run
    one more id.
    """
    spark.conf.set(_IS_OPEN, "true")
    try:
        yield
    except Exception as err:
        if not any(type(cause).__module__.startswith("grpc") for cause in with_causes(err)):
            _unmark(spark)
        raise
    _unmark(spark)


def _unmark(spark: SparkSession) -> None:
    with suppress(Exception):
        spark.conf.unset(_IS_OPEN)


def _close(spark: SparkSession) -> None:
    """Close the client and leave the server's session as it is."""
    cast("ConnectSession", spark).release_session_on_close = False
    spark.stop()


@contextmanager
def sibling_session(spark: SparkSession, number: int) -> Iterator[SparkSession]:
    """Open one more session next to this one, with temporary views of its own.

    ``number`` distinguishes several. Over Connect its id follows from the first one's key, so that
    a later run interrupts what a killed one left there.
    """
    if not is_connect(spark):
        sibling = spark.newSession()
        set_settings(sibling)
        yield sibling
        return
    key = getattr(spark, _KEY, cast("ConnectSession", spark).session_id)
    sibling = _connect_session(os.environ["SPARK_REMOTE"], f"{key}:{number}")
    try:
        with _marked_open(sibling):
            yield sibling
    except BaseException:
        with suppress(Exception):  # The original error is raised, not this one.
            sibling.interruptAll()
        raise
    finally:
        _close(sibling)


def _classic_session(master: str, name: str) -> SparkSession:
    check_pyspark("py4j")
    import pyspark
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if "SPARK_SUBMIT" in os.environ.get("WALDELTA_LAUNCHER", ""):
        with _named_start("spark-submit's master"):
            submitted = SparkConf().setAppName(name)
            for key, value in authentication(submitted.get("spark.master") or "").items():
                submitted.setIfMissing(key, value)
            return SparkSession.builder.config(conf=submitted).getOrCreate()
    check_java()
    jvm_settings = {
        "spark.jars": ",".join(str(jar) for jar in jars()),
        "spark.driver.memory": driver_memory(),
    }
    settings = driver_settings() | local_settings(master) | log_settings() | jvm_settings
    conf = SparkConf().setMaster(master).setAppName(name).setAll(list(settings.items()))
    if master.startswith("local"):  # Otherwise Spark warns about the host's name at each start.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Otherwise spark-submit starts another Python only to find it.
    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))
    # The JVM starts the tasks' Python processes, which inherit the umask.
    with private_files(), _named_start(master):
        with _stdout_as_stderr():
            context = SparkContext.getOrCreate(conf)
        if (
            log_level() != "DEBUG"
            and (server := getattr(context, "_accumulatorServer", None)) is not None
        ):
            server.handle_error = lambda *_: None
        if master.startswith("local"):
            _start_workers(context)
        return SparkSession.builder.config(conf=conf).getOrCreate()


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Give processes that are started inside stderr for their stdout.

    Delta's VACUUM prints to the JVM's stdout, where only the result of a verb belongs.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


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
            f"Spark doesn't start on {master} ({without_values(err)}): check that the master is up"
            " and reachable from here, and Spark's settings"
        ) from err


def _start_workers(context: SparkContext) -> None:
    """Start the tasks' Python processes and their imports in the background.

    In the meantime, the session is completed, and the driver reads catalogs and the ledger.
    """
    # The thread only calls the JVM: imports in two threads can meet modules that the other has half
    # imported.
    # The JVM runs what Python made of the partitions.
    job = context.parallelize([0], 1).mapPartitions(_unchanged)._jrdd  # noqa: SLF001

    def run() -> None:
        with suppress(
            Exception
        ):  # The session has ended already, or its first task will report what is wrong.
            job.count()

    threading.Thread(target=run, name="start workers", daemon=True).start()


def _unchanged(values: Iterable[int]) -> Iterable[int]:
    return values


@dataclass
class _Use:
    """The number of users of a session, and how its earlier settings come back."""

    users: int = 0
    restored: ExitStack = field(default_factory=ExitStack)


_USES: WeakKeyDictionary[SparkSession, _Use] = WeakKeyDictionary()
_USES_LOCK = threading.Lock()


@contextmanager
def session_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set session settings for the statements inside, and restore the earlier ones.

    Raises ConfigError as set_settings() does.
    """
    earlier_values = _different(spark, settings)
    try:
        _set_all(spark, settings, earlier_values)
        yield
    finally:
        for name, value in earlier_values.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


@contextmanager
def shared_settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Set settings as session_settings() does, in a session that others may use at the same time.

    The last user restores the settings that the session had before the first one.
    """
    with _USES_LOCK:
        use = _USES.setdefault(spark, _Use())
        if use.users:
            set_settings(spark, settings)
        else:
            use.restored.enter_context(session_settings(spark, settings))
        use.users += 1
    try:
        yield
    finally:
        with _USES_LOCK:
            use.users -= 1
            if not use.users:
                use.restored.close()


def set_settings(spark: SparkSession, settings: Mapping[str, str] = SESSION_SETTINGS) -> None:
    """Set the settings that differ.

    Raises ConfigError for a setting that the session refuses, or that has another value afterwards.
    """
    _set_all(spark, settings, _different(spark, settings))


def is_connect(spark: SparkSession) -> bool:
    """Returns whether the session is of a Spark Connect server, which continues when its client is
    gone.
    """
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _different(spark: SparkSession, settings: Mapping[str, str]) -> dict[str, str | None]:
    return {
        name: value for name, value in _values(spark, settings).items() if value != settings[name]
    }


def _set_all(spark: SparkSession, settings: Mapping[str, str], names: Mapping[str, object]) -> None:
    for name in names:
        from pyspark.errors import PySparkException

        try:
            spark.conf.set(name, settings[name])
        except PySparkException as err:
            raise ConfigError(_refusal(name, settings[name], without_values(err))) from err
    for name, value in _values(spark, names).items():
        if value != settings[name]:
            raise ConfigError(_refusal(name, settings[name], f"it is {value!r} afterwards"))


def _values(spark: SparkSession, names: Mapping[str, object]) -> dict[str, str | None]:
    if not names:
        return {}
    if is_connect(spark):
        # One request has all settings; asking for each would take a request each.
        values = spark.conf.getAll
        return {name: values.get(name) for name in names}
    return {name: spark.conf.get(name, None) for name in names}


def _refusal(name: str, value: str, reason: str) -> str:
    return (
        f"the Spark session doesn't accept {name} = {value} ({reason}): set it where this session"
        " is created, or let waldelta create the session"
    )

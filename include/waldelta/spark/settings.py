"""How Spark is configured, whoever starts it: a local session, spark-submit or a Connect server.
Needs no pyspark.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from waldelta.errors import ConfigError
from waldelta.permissions import hadoop_settings
from waldelta.pipeline.task_errors import DRIVER_MEMORY_VARIABLE

# The Delta jars that are needed of those that Ivy would fetch; `make setup` puts them into this
# folder.
JARS_VARIABLE = "WALDELTA_JARS"
_DEFAULT_JARS = Path(__file__).resolve().parents[3] / ".cache" / "jars"
# What jobs log: DEBUG adds the stack traces of named errors, Python's and Spark's.
LOG_LEVEL_VARIABLE = "WALDELTA_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_LOG4J = Path(__file__).with_name("log4j2.properties")

# A task whose Python process died is done again, as on a cluster; plain local[n] would end the job
# instead: a table's whole copy.
TASK_ATTEMPTS = 4
LOCAL_MASTER = f"local[*,{TASK_ATTEMPTS}]"

# What every driver needs before its JVM starts, wherever it runs.
SETTINGS: dict[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Row filters fail where PostgreSQL's arithmetic does, instead of giving NULL.
    "spark.sql.ansi.enabled": "true",
    # A name or text with ${env:…} in it is that name, and nobody's environment gets into a
    # statement.
    "spark.sql.variable.substitute": "false",
    # What stands twice behind AND or OR isn't computed before them: in b <> 0 and (a / b > 1 or a /
    # b < -1) it may fail.
    "spark.sql.subexpressionElimination.skipForShortcutExpr": "true",
    # A late second attempt at the same task would read the slot twice.
    "spark.speculation": "false",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
}


# For executors on the driver's machine, whose Python is the driver's; another machine's daemon may
# lack our modules.
LOCAL_WORKERS = {"spark.python.daemon.module": "waldelta.changes.python_daemon"}

# A batch job's JVM lives for seconds and does without the second compiler; without it there would
# be room for 48 MB of compiled code only, and a session that lives longer than that would compile
# the same methods again and again. Left to itself the JVM collects its whole heap at 21 MB of
# classes, and again until it has found out how many there are.
JVM_FLAGS = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseParallelGC"
    " -XX:MetaspaceSize=256m"
)


def driver_settings() -> dict[str, str]:
    """SETTINGS, and whom the files of the lake are for; raises ConfigError when WALDELTA_UMASK is
    no umask.
    """
    return SETTINGS | hadoop_settings()


def local_settings() -> dict[str, str]:
    """What a driver needs besides when its executors are in its own process, for the length of one
    job.
    """
    archive = class_archive()
    archived = (
        f" -XX:SharedArchiveFile={archive}" if archive is not None and archive.exists() else ""
    )
    return {
        "spark.driver.extraJavaOptions": f"{JVM_FLAGS}{archived}",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(shuffle_partitions()),
        # As Spark has it for tasks of SQL: workers whose environment differs, as of those that are
        # started ahead, would be others.
        "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
    } | LOCAL_WORKERS


def log_settings() -> dict[str, str]:
    """How a driver logs: one line a message. Its own stack traces, too, where WALDELTA_LOG_LEVEL is
    DEBUG.

    A log4j2.properties in Spark's own folder of settings counts instead.
    """
    settings = {"spark.log.level": "WARN"}
    if log_level() == "DEBUG" or has_conf_file("log4j2.*"):
        return settings
    return settings | {
        "spark.driver.defaultJavaOptions": f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}"
    }


def log_level() -> str:
    """WALDELTA_LOG_LEVEL, or INFO; raises ConfigError for a level that logging doesn't know."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").upper() or "INFO"
    if level not in _LEVELS:
        raise ConfigError(f"{LOG_LEVEL_VARIABLE} is {level!r}: write one of {', '.join(_LEVELS)}")
    return level


def has_conf_file(pattern: str) -> bool:
    """Whether Spark's own folder of settings (SPARK_CONF_DIR, or conf in SPARK_HOME) has such a
    file.
    """
    home, conf = os.environ.get("SPARK_HOME"), os.environ.get("SPARK_CONF_DIR")
    folder = Path(conf) if conf else Path(home) / "conf" if home else None
    return folder is not None and any(folder.glob(pattern))


def shuffle_partitions() -> int:
    """Partitions of a shuffle on this machine's cores."""
    return max(2, os.cpu_count() or 2)


def driver_memory() -> str:
    """Heap of a driver that lives for one job."""
    return os.environ.get(DRIVER_MEMORY_VARIABLE, "3g")


def jars() -> list[Path]:
    """The Delta jars on this machine; raises ConfigError when there are none."""
    folder = Path(os.environ.get(JARS_VARIABLE) or _DEFAULT_JARS)
    found = sorted(folder.glob("*.jar"))
    if not found:
        raise ConfigError(
            f"no Delta jars in {folder}: run `make setup`, or point {JARS_VARIABLE} at them"
        )
    return found


def class_archive() -> Path | None:
    """Where `make setup` archives the classes of the installed Spark; None when a JVM couldn't be
    told.

    A JVM takes an archive only for the very jars it was made of, and flags that go with it, so that
    its name stands for these.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "jars"
    if not folder.is_dir():
        return None
    made_of = f"{folder} {folder.stat().st_mtime_ns} {JVM_FLAGS}"
    name = f"classes-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.jsa"
    archive = Path(os.environ.get(JARS_VARIABLE) or _DEFAULT_JARS).parent / name
    return None if " " in str(archive) else archive

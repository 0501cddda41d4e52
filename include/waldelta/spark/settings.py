"""Spark's configuration for a local session, spark-submit and a Connect server; needs no
pyspark.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from waldelta.config.stores import STORES
from waldelta.errors import ConfigError
from waldelta.lake.store_connection import s3a_settings
from waldelta.permissions import hadoop_settings
from waldelta.pipeline.task_errors import DRIVER_MEMORY_VARIABLE

# The Delta jars that are needed, of those that Ivy would fetch; `waldelta jars` puts them into this
# folder, and those of each object store into a folder in it.
JARS_VARIABLE = "WALDELTA_JARS"
S3_JARS = "s3"
# The jar with the compiled S3ConditionalLogStore.java, and its class.
LOG_STORE_JAR = "waldelta-log-store.jar"
S3_LOG_STORE = "waldelta.spark.S3ConditionalLogStore"
_OWN_LOG_STORE = re.compile(r"^\s*spark\.delta\.logStore\.", re.MULTILINE)
_CHECKOUT = Path(__file__).resolve().parents[3]
# The log level of jobs: DEBUG adds the stack traces of named errors, Python's and Spark's.
LOG_LEVEL_VARIABLE = "WALDELTA_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
# Where it is set, a process that needs a session ends with this exit code instead of starting one:
# spark-submit then runs the rest as an application.
WITHOUT_SPARK_VARIABLE = "WALDELTA_WITHOUT_SPARK"
NEEDS_SPARK = 75
LOG4J = Path(__file__).with_name("log4j2.properties")

_NO_PYSPARK = (
    "PySpark isn't installed here, or only its client for Spark Connect: run `pip install"
    " 'waldelta[spark]'`, or name a Spark Connect server"
)

# A task whose Python process died is retried, as on a cluster; plain local[n] would end the job
# instead, which may be a table's whole copy.
TASK_ATTEMPTS = 4
LOCAL_MASTER = f"local[*,{TASK_ATTEMPTS}]"
_LOCAL = re.compile(r"local(\[[0-9*]+ *(, *[0-9]+ *)?\])?")

# What every session needs, whoever created it: the values that Spark reads and writes depend on
# these settings.
SESSION_SETTINGS: dict[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    # Row filters fail where PostgreSQL's arithmetic does, instead of returning NULL.
    "spark.sql.ansi.enabled": "true",
    "spark.sql.storeAssignmentPolicy": "ANSI",
    "spark.sql.caseSensitive": "false",
    # A name or text with ${env:…} in it isn't expanded, so environment variables don't get into a
    # statement.
    "spark.sql.variable.substitute": "false",
    # An expression used twice after AND or OR isn't computed before the condition: in b <> 0 and (a
    # / b > 1 or a / b < -1) it may fail.
    "spark.sql.subexpressionElimination.skipForShortcutExpr": "true",
    # Delta's type timestamp is the one of PostgreSQL's timestamptz.
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    # Readers other than Spark read INT96, Spark's default, as nanoseconds: the year 9999 as 1816.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Days before 1582 are those of PostgreSQL's calendar.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
}

# What every driver needs before its JVM starts.
SETTINGS: dict[str, str] = SESSION_SETTINGS | {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A late second attempt at the same task would read the slot twice.
    "spark.speculation": "false",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
}


# For executors on the driver's machine, which use the driver's Python. The daemon of another
# machine may lack our modules.
LOCAL_WORKERS = {"spark.python.daemon.module": "waldelta.changes.python_daemon"}

# A batch job's JVM lives for seconds and needs no second compiler. Without it, the default code
# cache would be 48 MB, and a longer session would compile the same methods repeatedly. By default,
# the JVM also collects its whole heap at 21 MB of classes, and again until it knows their size.
JVM_FLAGS = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseParallelGC"
    " -XX:MetaspaceSize=256m"
)


def driver_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns SETTINGS, the file permissions of the lake, the log stores that its jars have, and
    where the environment says the lake's store is.

    Raises ConfigError for an invalid WALDELTA_UMASK.
    """
    return SETTINGS | hadoop_settings() | log_store_settings() | s3a_settings(environment)


def log_store_settings() -> dict[str, str]:
    """Returns by which class Spark commits on S3.

    It is empty where `waldelta jars --stores s3` hasn't compiled one, and where the operator's
    spark-defaults.conf names another.
    """
    compiled = (jars_folder() / S3_JARS / LOG_STORE_JAR).exists()
    has_log_store = any(
        _OWN_LOG_STORE.search(file.read_text()) for file in conf_files("spark-defaults.conf")
    )
    if has_log_store or not compiled:
        return {}
    return {f"spark.delta.logStore.{scheme}.impl": S3_LOG_STORE for scheme in STORES["s3"].schemes}


def authentication(master: str) -> dict[str, str]:
    """Returns the settings by which Spark's ports on this machine refuse strangers.

    With a local master, Spark makes up a secret that no argument, file or page has. Any other
    master needs one that its operator distributes.
    """
    return {"spark.authenticate": "true"} if _LOCAL.fullmatch(master) else {}


def local_settings(master: str = LOCAL_MASTER) -> dict[str, str]:
    """Returns further settings of a driver with its executors in its own process, for one job."""
    archive = class_archive()
    archived = (
        f" -XX:SharedArchiveFile={archive}" if archive is not None and archive.exists() else ""
    )
    return {
        "spark.driver.extraJavaOptions": f"{JVM_FLAGS}{archived}",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(shuffle_partitions()),
        # Spark sets this for SQL tasks. Workers with another environment, such as those started
        # ahead, couldn't be reused.
        "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
        **authentication(master),
    } | LOCAL_WORKERS


def log_settings() -> dict[str, str]:
    """Returns how a driver logs: one line per message, and stack traces where WALDELTA_LOG_LEVEL is
    DEBUG.

    A log4j2.properties in Spark's own configuration folder takes precedence.
    """
    settings = {"spark.log.level": "WARN"}
    if log_level() == "DEBUG" or conf_files("log4j2.*"):
        return settings
    return settings | {
        "spark.driver.defaultJavaOptions": f"-Dlog4j2.configurationFile={LOG4J.as_uri()}"
    }


def log_level() -> str:
    """Returns WALDELTA_LOG_LEVEL, or INFO; raises ConfigError for a level that logging doesn't
    know.
    """
    level = os.environ.get(LOG_LEVEL_VARIABLE, "").upper() or "INFO"
    if level not in _LEVELS:
        raise ConfigError(f"{LOG_LEVEL_VARIABLE} is {level!r}: write one of {', '.join(_LEVELS)}")
    return level


def conf_files(pattern: str) -> list[Path]:
    """Returns such files of Spark's configuration folder: SPARK_CONF_DIR, or conf in SPARK_HOME."""
    home, conf = os.environ.get("SPARK_HOME"), os.environ.get("SPARK_CONF_DIR")
    folder = Path(conf) if conf else Path(home) / "conf" if home else None
    return [] if folder is None else sorted(folder.glob(pattern))


def shuffle_partitions() -> int:
    """Returns the number of shuffle partitions for this machine's cores."""
    return max(2, os.cpu_count() or 2)


def driver_memory() -> str:
    """Returns the heap size of a driver that lives for one job."""
    return os.environ.get(DRIVER_MEMORY_VARIABLE, "3g")


def jars() -> list[Path]:
    """Returns the jars of Delta and of object stores on this machine.

    Raises ConfigError when Delta's are missing.
    """
    folder = jars_folder()
    delta_jars = sorted(folder.glob("*.jar"))
    if not delta_jars:
        raise ConfigError(
            f"no Delta jars in {folder}: run `waldelta jars`, or set {JARS_VARIABLE} to a folder"
            " that has them"
        )
    return delta_jars + sorted(folder.glob("*/*.jar"))


def jars_folder() -> Path:
    """Returns the folder of jars: WALDELTA_JARS, or .cache/jars of a checkout, or else a folder of
    this Python's environment.
    """
    if folder := os.environ.get(JARS_VARIABLE):
        return Path(folder)
    if (_CHECKOUT / "pyproject.toml").exists():
        return _CHECKOUT / ".cache" / "jars"
    return Path(sys.prefix) / "share" / "waldelta" / "jars"


def check_pyspark(needed: str) -> None:
    """Raise ConfigError where PySpark isn't installed with a package that its session needs.

    That is py4j for a local session, which PySpark's client for Spark Connect lacks, and grpc for
    that client.
    """
    if any(importlib.util.find_spec(name) is None for name in ("pyspark", needed)):
        raise ConfigError(_NO_PYSPARK)


def pyspark_folder() -> Path:
    """Returns the folder of the installed PySpark, which has Spark's programs and jars.

    Raises ConfigError where PySpark isn't installed, or only its client for Spark Connect.
    """
    folder = _pyspark_folder()
    if folder is None or not (folder / "jars").is_dir():
        raise ConfigError(_NO_PYSPARK)
    return folder


def _pyspark_folder() -> Path | None:
    spec = importlib.util.find_spec("pyspark")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def class_archive() -> Path | None:
    """Returns where `make setup` archives the classes of the installed Spark; None if no JVM could
    use it.

    A JVM uses an archive only with the exact jars and flags of which it was made, so its name
    depends on these.
    """
    pyspark = _pyspark_folder()
    if pyspark is None or not (folder := pyspark / "jars").is_dir():
        return None
    made_of = f"{folder} {folder.stat().st_mtime_ns} {JVM_FLAGS}"
    name = f"classes-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.jsa"
    archive = jars_folder().parent / name
    return None if " " in str(archive) else archive

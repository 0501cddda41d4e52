"""Where things are and how long they may take: everything here that an installation may want to change."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from pathlib import Path

from waldelta.errors import ConfigError

_REPOSITORY = Path(__file__).resolve().parent.parent.parent

PIPELINES_VARIABLE = "WALDELTA_PIPELINES"
JARS_VARIABLE = "WALDELTA_JARS"
DRIVER_MEMORY_VARIABLE = "WALDELTA_DRIVER_MEMORY"

RETRIES = 3
RETRY_DELAY = timedelta(seconds=20)
LONGEST_RETRY_DELAY = timedelta(minutes=10)
LOOK_TIMEOUT = timedelta(minutes=5)
SETUP_TIMEOUT = timedelta(minutes=15)
STAGE_TIMEOUT = timedelta(hours=2)
SYNC_TIMEOUT = timedelta(hours=24)

# Airflow kills a task 5 s after it asked it to end, so the job gets a little less to end by itself.
KILL_AFTER_S = 4.0

# What spark-submit needs before the JVM starts; spark_jobs.session.SETTINGS says why (a test holds them equal).
# A connection's own spark-defaults.conf can't switch Delta off, but everything else there counts.
SPARK_SUBMIT_CONF: dict[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.speculation": "false",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "4",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.execution.pythonUDF.arrow.enabled": "true",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
}
# Spark's own story of each start would bury the job's lines in the task's log.
LOG_CONF: dict[str, str] = {"spark.log.level": "WARN"}
LOCAL_CONF: dict[str, str] = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseParallelGC",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
}


def pipelines_folder() -> Path:
    """Where the pipeline files are: WALDELTA_PIPELINES, or include/pipelines of this repository."""
    return Path(os.environ.get(PIPELINES_VARIABLE) or _REPOSITORY / "include" / "pipelines")


def jars() -> list[Path]:
    """Delta's jars, handed to spark-submit; raises ConfigError when there are none."""
    folder = Path(os.environ.get(JARS_VARIABLE) or _REPOSITORY / ".cache" / "jars")
    found = sorted(folder.glob("*.jar"))
    if not found:
        raise ConfigError(f"no Delta jars in {folder}: run `make setup`, or point {JARS_VARIABLE} at them")
    return found


def driver_memory() -> str:
    """Heap of the driver that spark-submit starts."""
    return os.environ.get(DRIVER_MEMORY_VARIABLE, "3g")


def package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigError(f"package {name} is not installed here: run `make setup` with this Python")
    return Path(spec.origin).parent


def application() -> Path:
    """The application that spark-submit runs."""
    return package_folder("spark_jobs") / "app.py"

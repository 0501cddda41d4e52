"""Archives the classes that Spark and Delta load, so that a new JVM maps them instead of verifying
20,000.

``python -m demo.class_archive`` is a step of ``make setup``. It takes half a minute once, and saves
some seconds of every run that starts its own JVM. Where the JVM can't create or use an archive,
everything works without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from demo.java import java_home
from waldelta.spark.settings import JVM_FLAGS, class_archive

# A small version of what a job does: the JVM archives everything that this loads.
PROGRAM = """
import sys
from pathlib import Path
from pyspark import SparkContext
from pyspark.sql import SparkSession
from waldelta.spark.settings import driver_settings, jars, local_settings

folder, flags = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.jars", ",".join(map(str, jars())))
options = driver_settings() | local_settings() | {"spark.driver.extraJavaOptions": flags}
for key, value in options.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
table, staged = f"delta.`{Path(folder).as_uri()}/t`", f"{folder}/staged"
spark.sql(f"create table {table} (id bigint not null, v string) using delta")
rows = spark.range(0, 1000, 1, 1).mapInArrow(lambda parts: parts, "id bigint")
rows = rows.selectExpr("id", "cast(id as string) v")
appended = rows.write.format("delta").mode("append")
appended.option("txnAppId", "a").option("txnVersion", 1).save(f"{folder}/t")
rows.write.parquet(staged)
spark.sql(
    f"merge into {table} t using parquet.`{staged}` s on t.id = s.id "
    "when matched and s.id < 5 then delete "
    "when matched then update set v = s.v when not matched then insert *"
).collect()
spark.sql(f"select count(*), count(distinct id), max(v) from {table} where v is not null").collect()
spark.sql(f"describe history {table}").collect()
spark.stop()
gateway = SparkContext._gateway
gateway.shutdown()
gateway.proc.stdin.close()
gateway.proc.wait()
"""


def make(archive: Path | None = None) -> Path | None:
    """Create the archive unless it exists; None when this JVM can't."""
    archive = archive or class_archive()
    if archive is None or (impossible := archive.with_suffix(".impossible")).exists():
        return None
    if archive.exists():
        return archive
    print("archiving Spark's classes for faster starts (once)", flush=True)
    archive.parent.mkdir(parents=True, exist_ok=True)
    for old in archive.parent.glob("classes-*.jsa"):
        old.unlink()
    draft = archive.with_suffix(".draft")
    environment = {**os.environ, "JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": sys.executable}
    environment.pop("SPARK_REMOTE", None)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            folder,
            f"{JVM_FLAGS} -XX:ArchiveClassesAtExit={draft}",
        ]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, check=False
        )
    if done.returncode or not draft.exists():
        draft.unlink(missing_ok=True)
        impossible.touch()
        return None
    draft.replace(archive)
    return archive


if __name__ == "__main__":
    make()

"""Downloads Delta's jars once into the project's cache.

``python -m demo.delta_jars`` is a step of ``make setup``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from demo.java import java_home

CACHE = Path(__file__).resolve().parents[2] / ".cache"
# The artifact's name has the Spark and Scala versions for which it is built; both follow from the
# pinned pyspark.
ARTIFACT = "io.delta:delta-spark_4.2_2.13"
# Of the 33 jars that Ivy resolves, pyspark lacks only these.
WANTED = (
    "io.delta_*",
    "io.unitycatalog_*",
    "org.locationtech.jts_jts-core-*",
    "org.roaringbitmap_*",
)


def fetch(cache: Path = CACHE) -> Path:
    """Make sure that ``cache/jars`` has the jars of the installed delta-spark; returns that folder.

    The network is used only when they are missing.
    """
    jars, delta = cache / "jars", version("delta-spark")
    if _complete(jars, delta):
        return jars
    print(f"fetching Delta {delta}'s jars into {jars} (once)", flush=True)
    resolve(cache / "ivy", f"{ARTIFACT}:{delta}")
    jars.mkdir(parents=True, exist_ok=True)
    for old in jars.glob("*.jar"):
        old.unlink()
    for pattern in WANTED:
        for found in sorted((cache / "ivy/jars").glob(f"{pattern}.jar")):
            shutil.copy2(found, jars / found.name)
    if not _complete(jars, delta):
        raise RuntimeError(f"Ivy did not download Delta {delta}'s jars to {cache / 'ivy/jars'}")
    return jars


def _complete(jars: Path, delta: str) -> bool:
    main_jar = jars / f"{ARTIFACT.replace(':', '_')}-{delta}.jar"
    return main_jar.exists() and all(any(jars.glob(f"{pattern}.jar")) for pattern in WANTED)


def resolve(ivy: Path, *packages: str, excluded: Sequence[str] = ()) -> None:
    """Download Maven packages and what they depend on into ``ivy/jars``; Ivy checks the sums.

    ``excluded`` are packages without a version. Raises RuntimeError when one can't be downloaded.
    """
    shutil.rmtree(ivy / "jars", ignore_errors=True)  # Removes what an earlier call left.
    environment = {**os.environ, "JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": sys.executable}
    environment.pop("SPARK_REMOTE", None)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "resolved.py"
        # spark-submit resolves the packages before it runs this empty program.
        program.write_text("")
        command = [
            str(Path(sys.executable).with_name("spark-submit")),
            "--conf",
            f"spark.jars.ivy={ivy}",
            "--packages",
            ",".join(packages),
            "--exclude-packages",
            ",".join(excluded),
            str(program),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{', '.join(packages)} can't be fetched: is Maven Central reachable?"
            f"\n{done.stderr[-3000:]}"
        )


if __name__ == "__main__":
    fetch()

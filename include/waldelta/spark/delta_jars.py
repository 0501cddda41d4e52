"""Downloads Delta's jars for a local session and spark-submit; ``waldelta jars`` calls this."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from waldelta.errors import ConfigError
from waldelta.spark.java import check_java
from waldelta.spark.settings import JARS_VARIABLE, pyspark_folder

log = logging.getLogger(__name__)

# The version of Delta that is built for each Spark; other versions of either fail at run time.
DELTA_OF_SPARK = {"4.0": "4.4.0", "4.1": "4.4.0", "4.2": "4.4.0"}
# Of the 33 jars that Ivy resolves, pyspark lacks only these.
WANTED = (
    "io.delta_*",
    "io.unitycatalog_*",
    "org.locationtech.jts_jts-core-*",
    "org.roaringbitmap_*",
)
# As sha256sum writes them, by Ivy's file names.
SUMS = Path(__file__).with_name("jars.sha256")
# The end of an incomplete jar's name.
_PART = ".part"


def fetch_delta_jars(folder: Path) -> None:
    """Make sure that a folder has the jars of Delta for the installed PySpark.

    The network is used only when they are missing. Raises ConfigError where PySpark or Java is
    missing, for a Spark without a Delta, and when a jar can't be downloaded or stored.
    """
    artifact = delta_artifact()
    if has_delta_jars(folder, artifact):
        return
    log.info("fetching the jars of %s into %s", artifact, folder)
    make_jars_folder(folder)
    with resolved(artifact) as downloaded:
        main = _main_jar(artifact)
        found = {jar for pattern in WANTED for jar in downloaded.glob(f"{pattern}.jar")}
        for jar in found:
            check_jar(jar)
        # Without the main jar the folder is incomplete, so a killed download is repeated.
        remove_jars(folder, (main.removesuffix(".jar"), *WANTED))
        for jar in sorted(found, key=lambda jar: (jar.name == main, jar.name)):
            copy_jar(jar, folder)
    if not has_delta_jars(folder, artifact):
        raise ConfigError(
            f"Maven has no complete {artifact}: {', '.join(WANTED)} are needed in {folder}"
        )


def delta_artifact() -> str:
    """Return the Maven package of Delta for the installed PySpark.

    Its name has the Spark and Scala versions for which it is built. Raises ConfigError where there
    is no such PySpark.
    """
    pyspark_folder()
    try:
        installed = version("pyspark")
    except PackageNotFoundError:  # The client alone, with the jars of another PySpark.
        installed = "unknown"
    spark = ".".join(installed.split(".")[:2])
    if (delta := DELTA_OF_SPARK.get(spark)) is None:
        raise ConfigError(
            f"PySpark {installed} is installed, for which no version of Delta is known: install"
            f" PySpark {', '.join(DELTA_OF_SPARK)}"
        )
    return f"io.delta:delta-spark_{spark}_2.13:{delta}"


def _main_jar(artifact: str) -> str:
    """Return the file name that Ivy gives to a package's jar."""
    group, name, delta = artifact.split(":")
    return f"{group}_{name}-{delta}.jar"


def has_delta_jars(folder: Path, artifact: str) -> bool:
    """Return whether a folder has the jars of a version of Delta."""
    return (folder / _main_jar(artifact)).exists() and all(
        any(folder.glob(f"{pattern}.jar")) for pattern in WANTED
    )


def remove_jars(folder: Path, patterns: Iterable[str]) -> None:
    """Delete the jars with these names, in this order; other files of the folder stay."""
    for pattern in patterns:
        for suffix in (".jar", f".jar{_PART}"):
            for old in folder.glob(pattern + suffix):
                old.unlink()


def check_jar(jar: Path) -> None:
    """Raise ConfigError for a downloaded jar that isn't in the table of SHA-256 sums as it is."""
    lines = (line.split() for line in SUMS.read_text(encoding="ascii").splitlines())
    expected = {name: digest for digest, name in lines}.get(jar.name)
    digest = hashlib.sha256(jar.read_bytes()).hexdigest()
    if expected is None:
        raise ConfigError(
            f"{jar.name} (SHA-256 {digest}) isn't in waldelta's table of jars, and wasn't copied:"
            " install a PySpark that docs/reference/versions.md lists, or download the jars"
            f" yourself, and set {JARS_VARIABLE} to their folder"
        )
    if digest != expected:
        raise ConfigError(
            f"{jar.name} isn't the jar that waldelta was tested with (its SHA-256 is {digest}, and"
            f" not {expected}), and wasn't copied: find out where this machine gets its jars from"
        )


def copy_jar(jar: Path, folder: Path) -> None:
    """Copy a jar into a folder, where it has its name only when it is complete."""
    part = folder / f"{jar.name}{_PART}"
    shutil.copy2(jar, part)
    part.replace(folder / jar.name)


def make_jars_folder(folder: Path) -> None:
    """Make a folder of jars that every user of this machine can read; raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath(".writable").touch()
        folder.joinpath(".writable").unlink()
    except OSError as err:
        raise ConfigError(
            f"jars can't be written to {folder} ({err.strerror}): choose another folder with"
            f" `waldelta jars FOLDER`, and set {JARS_VARIABLE} to it"
        ) from None


@contextmanager
def resolved(*packages: str, excluded: Sequence[str] = ()) -> Iterator[Path]:
    """Download Maven packages and what they depend on; yields the folder with all their jars.

    Ivy checks the sums, and the folder is deleted at the end. ``excluded`` are packages without a
    version. Raises ConfigError when one can't be downloaded.
    """
    check_java()
    spark = pyspark_folder()
    environment = {**os.environ, "SPARK_HOME": str(spark), "PYSPARK_PYTHON": sys.executable}
    for other in ("SPARK_REMOTE", "SPARK_CONF_DIR"):
        environment.pop(other, None)
    with tempfile.TemporaryDirectory(prefix="waldelta-jars-") as folder:
        # spark-submit resolves the packages before it runs this empty program.
        program, ivy = Path(folder) / "resolved.py", Path(folder) / "ivy"
        program.write_text("")
        command = [
            str(spark / "bin" / "spark-submit"),
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
            raise ConfigError(
                f"{', '.join(packages)} can't be fetched: let this machine reach Maven Central, or"
                f" copy the jars from one that can, and set {JARS_VARIABLE} to their folder"
                f"\n{done.stderr[-3000:]}"
            )
        yield ivy / "jars"

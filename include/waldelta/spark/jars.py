"""Downloads the jars of Delta and of object stores for a local session and spark-submit, and
compiles the log store of S3; ``waldelta jars`` calls this.

Checks the Java that Spark's launcher will start; the launcher's own messages name no remedy.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from waldelta.errors import ConfigError, JavaMissing
from waldelta.quantities import counted
from waldelta.spark.settings import (
    JARS_VARIABLE,
    LOG_STORE_JAR,
    S3_JARS,
    conf_files,
    pyspark_folder,
)

log = logging.getLogger(__name__)

OLDEST = 17
REMEDY = (
    "install Java 17 or 21 (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew"
    " install openjdk@17)"
)
_RELEASE = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FoundJava:
    """The Java that Spark's launcher starts; ``version`` is None where Java doesn't record it."""

    place: str
    version: int | None


def check_java() -> FoundJava | None:
    """Returns the Java that Spark's launcher starts; raise JavaMissing where there is none, or one
    that is too old for Spark.

    This starts no process. None, and nothing is checked, where a spark-env.sh may set JAVA_HOME.
    """
    if conf_files("spark-env.sh"):
        return None
    home = os.environ.get("JAVA_HOME")
    if home:
        java = shutil.which(str(Path(home) / "bin/java"))
        place = f"JAVA_HOME is {home}"
        if java is None:
            raise JavaMissing(
                f"{place}, which has no bin/java, and Spark needs Java: correct JAVA_HOME, or"
                f" {REMEDY}"
            )
    else:
        java = shutil.which("java")
        if java is None:
            raise JavaMissing(
                "Spark needs Java: JAVA_HOME isn't set, and there is no java on PATH: set"
                f" JAVA_HOME, or {REMEDY}"
            )
        place = f"java on PATH is {java}"
    version = _version(Path(java).resolve().parent.parent)
    if version is not None and version < OLDEST:
        raise JavaMissing(
            f"{place}, which is Java {version}, and Spark needs {OLDEST} or later: {REMEDY}, and"
            " set JAVA_HOME to it"
        )
    return FoundJava(place, version)


def _version(home: Path) -> int | None:
    """Returns the major version recorded in a Java's folder; None where there is no record."""
    try:
        match = _RELEASE.search((home / "release").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(match[1]) if match else None


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
    with resolve_packages(artifact) as downloaded:
        main = _main_jar(artifact)
        jars = {jar for pattern in WANTED for jar in downloaded.glob(f"{pattern}.jar")}
        for jar in jars:
            check_jar(jar)
        # Without the main jar the folder is incomplete, so a killed download is repeated.
        remove_jars(folder, (main.removesuffix(".jar"), *WANTED))
        for jar in sorted(jars, key=lambda jar: (jar.name == main, jar.name)):
            copy_jar(jar, folder)
    if not has_delta_jars(folder, artifact):
        raise ConfigError(
            f"Maven has no complete {artifact}: {', '.join(WANTED)} are needed in {folder}"
        )


def delta_artifact() -> str:
    """Returns the Maven package of Delta for the installed PySpark.

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
    """Returns the file name that Ivy gives to a package's jar."""
    group, name, delta = artifact.split(":")
    return f"{group}_{name}-{delta}.jar"


def has_delta_jars(folder: Path, artifact: str) -> bool:
    """Returns whether a folder has the jars of a version of Delta."""
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
def resolve_packages(*packages: str, excluded: Sequence[str] = ()) -> Iterator[Path]:
    """Download Maven packages and what they depend on; yields the folder with all their jars.

    Ivy checks the sums, and the folder is deleted at the end. ``excluded`` are packages without a
    version. Raises ConfigError when one can't be downloaded.
    """
    check_java()
    spark = pyspark_folder()
    environment = {**os.environ, "SPARK_HOME": str(spark), "PYSPARK_PYTHON": sys.executable}
    for variable in ("SPARK_REMOTE", "SPARK_CONF_DIR"):
        environment.pop(variable, None)
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
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if process.returncode:
            raise ConfigError(
                f"{', '.join(packages)} can't be fetched: let this machine reach Maven Central, or"
                f" copy the jars from one that can, and set {JARS_VARIABLE} to their folder"
                f"\n{process.stderr[-3000:]}"
            )
        yield ivy / "jars"


LOG_STORE = Path(__file__).with_name("S3ConditionalLogStore.java")
_STAMP = "made_of"
# This compiler is one jar and runs on a Java that has no javac.
_COMPILER = "org.eclipse.jdt:ecj:3.40.0"
_SDK = "software.amazon.awssdk"
# The version that hadoop-aws 3.5.0 is built with.
SDK_VERSION = "2.35.4"
# Hadoop's S3A uses these modules of the SDK's bundle, which has all services and 686 MB.
_SDK_MODULES = ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")


@dataclass(frozen=True)
class Store:
    """What an object store needs: Maven packages, and those of their jars that pyspark lacks."""

    packages: tuple[str, ...]
    patterns: tuple[str, ...]
    excluded: tuple[str, ...] = ()


def stores() -> dict[str, Store]:
    """Returns the known stores by their names."""
    hadoop = hadoop_version()
    s3 = Store(
        packages=(
            f"org.apache.hadoop:hadoop-aws:{hadoop}",
            *(f"{_SDK}:{module}:{SDK_VERSION}" for module in _SDK_MODULES),
            _COMPILER,
        ),
        patterns=("org.apache.hadoop_hadoop-aws-*", "software.amazon.*", "org.reactivestreams_*"),
        excluded=(f"{_SDK}:bundle",),
    )
    azure = Store(
        packages=(f"org.apache.hadoop:hadoop-azure:{hadoop}",),
        patterns=("org.apache.hadoop_hadoop-azure-*", "org.wildfly.openssl_*"),
    )
    return {S3_JARS: s3, "azure": azure}


def hadoop_version() -> str:
    """Returns the version of pyspark's Hadoop; its file systems for stores must have the same."""
    return _hadoop_client_jar().stem.removeprefix("hadoop-client-api-")


def fetch_jars(folder: Path, names: Iterable[str] = ()) -> None:
    """Make sure that a folder has Delta's jars, and a folder with the jars of each of these stores.

    The network is used only when they are missing. Raises ConfigError for an unknown store, for a
    store's folder with files of the user, and as fetch_delta_jars() does.
    """
    by_name, store_names = stores(), list(names)
    for name in store_names:
        if name not in by_name:
            raise ConfigError(
                f"there are no jars of a store {name!r}: write {' or '.join(by_name)}"
            )
        _check_own(folder / name)
    fetch_delta_jars(folder)
    for name in store_names:
        _fetch(by_name[name], folder, folder / name)


def _check_own(folder: Path) -> None:
    """Raise ConfigError for a folder with files that this module didn't make."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _STAMP).exists():
        raise ConfigError(
            f"{folder} has files, but `waldelta jars` didn't make it: move or delete it, or choose"
            " another folder with `waldelta jars FOLDER`"
        )


def _fetch(store: Store, delta_jars: Path, folder: Path) -> None:
    stamp = folder / _STAMP
    if has_store_jars(folder, store):
        return
    log.info("fetching the jars of %s into %s", folder.name, folder)
    make_jars_folder(folder)
    with resolve_packages(*store.packages, excluded=store.excluded) as downloaded:
        # Empty until all jars are there: a killed download is repeated, in a folder known as own.
        stamp.write_text("")
        remove_jars(folder, (Path(LOG_STORE_JAR).stem, *store.patterns))
        for pattern in store.patterns:
            if not (jars := sorted(downloaded.glob(f"{pattern}.jar"))):
                raise ConfigError(f"Maven has no {pattern}.jar, which {folder.name} needs")
            for jar in jars:
                check_jar(jar)
                copy_jar(jar, folder)
        for compiler in downloaded.glob("org.eclipse.jdt_ecj-*.jar"):
            check_jar(compiler)
            compile_log_store(folder / LOG_STORE_JAR, compiler, delta_jars)
    stamp.write_text(_fingerprint(store))


def has_store_jars(folder: Path, store: Store) -> bool:
    """Returns whether a folder has the jars of a store as this version fetches them."""
    stamp = folder / _STAMP
    return stamp.exists() and stamp.read_text() == _fingerprint(store)


def _fingerprint(store: Store) -> str:
    """Returns a text that changes exactly when the jars must be fetched and compiled again."""
    made_of = repr((store, delta_artifact().rpartition(":")[2])).encode() + LOG_STORE.read_bytes()
    return hashlib.sha256(made_of).hexdigest()


def compile_log_store(jar: Path, compiler: Path, delta_jars: Path) -> None:
    """Compile S3ConditionalLogStore.java into a jar.

    Raises ConfigError with the compiler's messages, and where ``delta_jars`` hasn't one jar of
    delta-storage.
    """
    storage = list(delta_jars.glob("io.delta_delta-storage-*.jar"))
    if len(storage) != 1:
        raise ConfigError(
            f"{delta_jars} has {counted(len(storage), 'jar')} of delta-storage instead of one:"
            " delete all io.delta_*.jar there and run `waldelta jars` again"
        )
    classpath = f"{storage[0]}{os.pathsep}{_hadoop_client_jar()}"
    with tempfile.TemporaryDirectory() as classes:
        home = os.environ.get("JAVA_HOME")
        command = [
            *(str(Path(home) / "bin" / "java") if home else "java", "-jar", str(compiler)),
            *("-source", "17", "-target", "17", "-encoding", "UTF-8"),
            *("-classpath", classpath, "-d", classes, str(LOG_STORE)),
        ]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise ConfigError(
                f"{LOG_STORE.name} can't be compiled: install Java 17 or 21\n{process.stderr}"
            )
        packed = Path(classes) / jar.name
        with zipfile.ZipFile(packed, "w") as archive:
            for file in sorted(Path(classes).rglob("*.class")):
                archive.write(file, file.relative_to(classes))
        copy_jar(packed, jar.parent)


def _hadoop_client_jar() -> Path:
    """Returns pyspark's jar of Hadoop's client API."""
    (jar,) = (pyspark_folder() / "jars").glob("hadoop-client-api-[0-9]*.jar")
    return jar

"""Downloads the jars by which Spark reaches object stores, and compiles the log store of S3;
``waldelta jars --stores s3`` calls this.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from waldelta.errors import ConfigError
from waldelta.quantities import counted
from waldelta.spark.delta_jars import (
    check_jar,
    copy_jar,
    delta_artifact,
    fetch_delta_jars,
    make_jars_folder,
    remove_jars,
    resolved,
)
from waldelta.spark.settings import LOG_STORE_JAR, S3_JARS, pyspark_folder

log = logging.getLogger(__name__)

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
    wanted: tuple[str, ...]
    excluded: tuple[str, ...] = ()


def stores() -> dict[str, Store]:
    """Return the known stores by their names."""
    hadoop = hadoop_version()
    s3 = Store(
        packages=(
            f"org.apache.hadoop:hadoop-aws:{hadoop}",
            *(f"{_SDK}:{module}:{SDK_VERSION}" for module in _SDK_MODULES),
            _COMPILER,
        ),
        wanted=("org.apache.hadoop_hadoop-aws-*", "software.amazon.*", "org.reactivestreams_*"),
        excluded=(f"{_SDK}:bundle",),
    )
    azure = Store(
        packages=(f"org.apache.hadoop:hadoop-azure:{hadoop}",),
        wanted=("org.apache.hadoop_hadoop-azure-*", "org.wildfly.openssl_*"),
    )
    return {S3_JARS: s3, "azure": azure}


def hadoop_version() -> str:
    """Return the version of pyspark's Hadoop; its file systems for stores must have the same."""
    return _hadoop_client_jar().stem.removeprefix("hadoop-client-api-")


def fetch_jars(folder: Path, names: Iterable[str] = ()) -> None:
    """Make sure that a folder has Delta's jars, and a folder with the jars of each of these stores.

    The network is used only when they are missing. Raises ConfigError for an unknown store, for a
    store's folder with files of the user, and as fetch_delta_jars() does.
    """
    known, wanted = stores(), list(names)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"there are no jars of a store {name!r}: write {' or '.join(known)}")
        _check_own(folder / name)
    fetch_delta_jars(folder)
    for name in wanted:
        _fetch(known[name], folder, folder / name)


def _check_own(folder: Path) -> None:
    """Raise ConfigError for a folder with files that this module didn't make."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _STAMP).exists():
        raise ConfigError(
            f"{folder} has files, but `waldelta jars` didn't make it: move or delete it, or choose"
            " another folder with `waldelta jars FOLDER`"
        )


def _fetch(store: Store, delta_jars: Path, folder: Path) -> None:
    wanted = _fingerprint(store)
    stamp = folder / _STAMP
    if has_store_jars(folder, store):
        return
    log.info("fetching the jars of %s into %s", folder.name, folder)
    make_jars_folder(folder)
    with resolved(*store.packages, excluded=store.excluded) as downloaded:
        # Empty until all jars are there: a killed download is repeated, in a folder known as own.
        stamp.write_text("")
        remove_jars(folder, (Path(LOG_STORE_JAR).stem, *store.wanted))
        for pattern in store.wanted:
            if not (found := sorted(downloaded.glob(f"{pattern}.jar"))):
                raise ConfigError(f"Maven has no {pattern}.jar, which {folder.name} needs")
            for jar in found:
                check_jar(jar)
                copy_jar(jar, folder)
        for compiler in downloaded.glob("org.eclipse.jdt_ecj-*.jar"):
            check_jar(compiler)
            compile_log_store(folder / LOG_STORE_JAR, compiler, delta_jars)
    stamp.write_text(wanted)


def has_store_jars(folder: Path, store: Store) -> bool:
    """Return whether a folder has the jars of a store as this version fetches them."""
    stamp = folder / _STAMP
    return stamp.exists() and stamp.read_text() == _fingerprint(store)


def _fingerprint(store: Store) -> str:
    """Return a text that changes exactly when the jars must be fetched and compiled again."""
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
    with tempfile.TemporaryDirectory() as made:
        command = [
            *(_java(), "-jar", str(compiler)),
            *("-source", "17", "-target", "17", "-encoding", "UTF-8"),
            *("-classpath", classpath, "-d", made, str(LOG_STORE)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"{LOG_STORE.name} can't be compiled: install Java 17 or 21\n{done.stderr}"
            )
        packed = Path(made) / jar.name
        with zipfile.ZipFile(packed, "w") as archive:
            for file in sorted(Path(made).rglob("*.class")):
                archive.write(file, file.relative_to(made))
        copy_jar(packed, jar.parent)


def _java() -> str:
    """Return the Java that Spark's launcher would start, which resolved() has checked."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


def _hadoop_client_jar() -> Path:
    """Return pyspark's jar of Hadoop's client API."""
    (jar,) = (pyspark_folder() / "jars").glob("hadoop-client-api-[0-9]*.jar")
    return jar

"""Downloads the jars by which Spark reaches object stores, and compiles the log store of S3.

``WALDELTA_STORES`` names the stores, e.g. ``s3``. ``python -m demo.store_jars`` is a step of ``make
setup``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pyspark

import waldelta.spark
from demo.delta_jars import CACHE, resolve
from demo.java import java_home
from waldelta.spark.settings import LOG_STORE_JAR, S3_JARS

STORES_VARIABLE = "WALDELTA_STORES"
LOG_STORE = Path(waldelta.spark.__file__).with_name("S3ConditionalLogStore.java")
_PYSPARKS = Path(pyspark.__file__).parent / "jars"
_STAMP = "made_of"
# This compiler is one jar and runs on a Java that has no javac.
_COMPILER = "org.eclipse.jdt:ecj:3.40.0"
_SDK = "software.amazon.awssdk"
# The version that hadoop-aws 3.5.0 is built with.
SDK_VERSION = "2.35.4"
# Hadoop's S3A uses these modules of the SDK's bundle, which has all services and 686 MB.
_SDK_MODULES = ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")


class StoreJarsError(RuntimeError):
    """The jars of an object store can't be made available; the message says what to do."""


@dataclass(frozen=True)
class Store:
    """What an object store needs: Maven packages, and those of their jars that pyspark lacks."""

    packages: tuple[str, ...]
    wanted: tuple[str, ...]
    excluded: tuple[str, ...] = ()


def stores() -> dict[str, Store]:
    """Return the known stores by their names in WALDELTA_STORES."""
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
    return _pysparks("hadoop-client-api").stem.removeprefix("hadoop-client-api-")


def fetch(names: Iterable[str], cache: Path) -> None:
    """Make sure that ``cache/jars`` has a folder with the jars of each of these stores.

    The network is used only when they are missing. Raises StoreJarsError for an unknown store.
    """
    known = stores()
    for name in names:
        if name not in known:
            raise StoreJarsError(
                f"{STORES_VARIABLE} names the store {name!r}: write {' or '.join(known)}"
            )
        _fetch(known[name], cache, cache / "jars" / name)


def _fetch(store: Store, cache: Path, folder: Path) -> None:
    wanted = _fingerprint(store)
    stamp = folder / _STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"fetching the jars of {folder.name} into {folder} (once)", flush=True)
    resolve(cache / "ivy", *store.packages, excluded=store.excluded)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    resolved = cache / "ivy/jars"
    for pattern in store.wanted:
        if not (found := sorted(resolved.glob(f"{pattern}.jar"))):
            raise StoreJarsError(f"Ivy did not download {pattern}.jar to {resolved}")
        for jar in found:
            shutil.copy2(jar, folder / jar.name)
    for compiler in resolved.glob("org.eclipse.jdt_ecj-*.jar"):
        compile_log_store(folder / LOG_STORE_JAR, compiler, cache / "jars")
    stamp.write_text(wanted)


def _fingerprint(store: Store) -> str:
    """Return a text that changes exactly when the jars must be fetched and compiled again."""
    made_of = repr((store, version("delta-spark"))).encode() + LOG_STORE.read_bytes()
    return hashlib.sha256(made_of).hexdigest()


def compile_log_store(jar: Path, compiler: Path, delta_jars: Path) -> None:
    """Compile S3ConditionalLogStore.java into a jar.

    Raises StoreJarsError with the compiler's messages.
    """
    (storage,) = delta_jars.glob("io.delta_delta-storage-*.jar")
    classpath = f"{storage}{os.pathsep}{_pysparks('hadoop-client-api')}"
    with tempfile.TemporaryDirectory() as made:
        command = [
            *(str(java_home() / "bin/java"), "-jar", str(compiler)),
            *("-source", "17", "-target", "17", "-encoding", "UTF-8"),
            *("-classpath", classpath, "-d", made, str(LOG_STORE)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StoreJarsError(f"{LOG_STORE.name} can't be compiled:\n{done.stderr}")
        with zipfile.ZipFile(jar, "w") as archive:
            for file in sorted(Path(made).rglob("*.class")):
                archive.write(file, file.relative_to(made))


def _pysparks(artifact: str) -> Path:
    (jar,) = _PYSPARKS.glob(f"{artifact}-[0-9]*.jar")
    return jar


def main() -> int:
    """Fetch what WALDELTA_STORES names; 0 when all is there."""
    named = os.environ.get(STORES_VARIABLE, "").split(",")
    try:
        fetch((name.strip() for name in named if name.strip()), CACHE)
    except StoreJarsError as err:
        print(err, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

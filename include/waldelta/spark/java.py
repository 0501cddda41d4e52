"""Checks the Java that Spark's launcher will start; the launcher's own messages name no remedy."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from waldelta.errors import JavaMissing
from waldelta.spark.settings import has_conf_file

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
    """Return the Java that Spark's launcher starts; raise JavaMissing where there is none, or one
    that is too old for Spark.

    This starts no process. None, and nothing is checked, where a spark-env.sh may set JAVA_HOME.
    """
    if has_conf_file("spark-env.sh"):
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
    """Return the major version recorded in a Java's folder; None where there is no record."""
    try:
        found = _RELEASE.search((home / "release").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(found[1]) if found else None

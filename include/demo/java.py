"""Finds the Java that Spark needs (17 or 21), or installs it.

``python -m demo.java`` is a step of ``make setup``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VERSIONS = (17, 21)
_PACKAGES = tuple(f"openjdk-{version}-jre-headless" for version in VERSIONS)
_VERSION_LINE = re.compile(r'version "(\d+)')
_USUAL_PLACES = ("/usr/lib/jvm", "/Library/Java/JavaVirtualMachines", "/opt/homebrew/opt", "/opt")


class JavaError(RuntimeError):
    """There is no Java that Spark can use."""


def java_home() -> Path:
    """Returns the home of a Java 17 or 21.

    It is JAVA_HOME's, PATH's, or one in the usual folders; raises JavaError without any.
    """
    for home in _candidates():
        if version(home) in VERSIONS:
            return home
    raise JavaError(
        "Spark needs Java 17 or 21 and there is none: install one (Debian, Ubuntu: apt-get install"
        " openjdk-17-jre-headless; macOS: brew install openjdk@17) or set JAVA_HOME"
    )


def version(home: Path) -> int | None:
    """Returns the major version of the Java in this folder; None when it isn't one."""
    try:
        done = subprocess.run(
            [str(home / "bin/java"), "-version"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    found = _VERSION_LINE.search(done.stderr + done.stdout)
    return int(found[1]) if found else None


def install() -> None:
    """Install a headless Java with apt when run as root on Debian; otherwise do nothing."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=False, env=environment)
    for package in _PACKAGES:
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
        if subprocess.run(command, check=False, env=environment).returncode == 0:
            return


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if java := shutil.which("java"):
        yield Path(java).resolve().parent.parent
    for place in map(Path, _USUAL_PLACES):
        if place.is_dir():
            for folder in sorted(place.iterdir()):
                yield folder
                yield folder / "Contents/Home"


def main(environment_file: str | None = None) -> int:
    """Find or install Java, and write the variables that later steps need as shell assignments."""
    try:
        home = java_home()
    except JavaError:
        install()
        try:
            home = java_home()
        except JavaError as err:
            print(err, file=sys.stderr)
            return 1
    if environment_file:
        Path(environment_file).write_text(f"JAVA_HOME={home}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

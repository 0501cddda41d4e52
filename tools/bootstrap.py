"""What ``make setup`` does: virtual environment, packages, Java, Delta's jars, those of the object
stores in WALDELTA_STORES, Spark's classes; each only when it isn't there yet.

Runs on the machine's own Python with nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_DECIDES = ("requirements.txt", "pyproject.toml", "tools/bootstrap.py")
# what a distribution's Python brings may be years old and builds some source archives the old way
_PIP = "pip==26.3"


class SetupError(RuntimeError):
    """Setup can't go on; the message says what to do."""


def main(repository: Path = REPOSITORY) -> int:
    """Set everything up; 0 when all is there."""
    try:
        python = make_environment(repository / ".venv")
        install(python, repository)
        (repository / ".cache").mkdir(exist_ok=True)
        run(python, "-m", "demo.java", str(repository / ".cache/environment"))
        run(python, "-m", "demo.jars")
        run(python, "-m", "demo.class_archive")
    except SetupError as err:
        print(f"setup: {err}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as err:
        print(
            f"setup: {' '.join(map(str, err.cmd[1:4]))} failed (exit {err.returncode}), see above",
            file=sys.stderr,
        )
        return 1
    return 0


def make_environment(folder: Path) -> Path:
    """Create the virtual environment unless a working one is there; gives its interpreter."""
    python = folder / "bin/python"
    if (
        python.exists()
        and subprocess.run(
            [python, "-c", "import pip"], check=False, capture_output=True
        ).returncode
        == 0
    ):
        return python
    print(f"creating {folder.name} with Python {sys.version.split()[0]}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    if not _venv(folder) and not (_install_venv_package() and _venv(folder)):
        raise SetupError(
            f"{sys.executable} can't create a virtual environment: install its venv module "
            "(Debian, Ubuntu: apt-get install python3-venv) and run make again"
        )
    return python


def install(python: Path, repository: Path) -> None:
    """Install the pinned packages and this project, editable, when what decides about them has
    changed.
    """
    stamp = python.parent.parent / "installed"
    wanted = fingerprint(repository)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print("installing requirements.txt (once; some minutes on a fresh machine)", flush=True)
    pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(python, *pip, _PIP)
    run(python, *pip, "-r", str(repository / "requirements.txt"))
    # No isolation: the build backend is one of the pinned packages.
    run(python, *pip, "--no-build-isolation", "--no-deps", "-e", str(repository))
    stamp.write_text(wanted)


def fingerprint(repository: Path) -> str:
    """Changes exactly when the packages must be installed again."""
    digest = hashlib.sha256()
    for name in _DECIDES:
        digest.update((repository / name).read_bytes())
    return digest.hexdigest()


def run(python: Path, *arguments: str) -> None:
    """Run the environment's Python; raises CalledProcessError."""
    subprocess.run([python, *arguments], check=True)


def _venv(folder: Path) -> bool:
    return (
        subprocess.run(
            [sys.executable, "-m", "venv", str(folder)], check=False, capture_output=True
        ).returncode
        == 0
    )


def _install_venv_package() -> bool:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=False, env=environment)
    command = ["apt-get", "install", "-y", "-qq", f"python3.{sys.version_info.minor}-venv"]
    return subprocess.run(command, check=False, env=environment).returncode == 0


if __name__ == "__main__":
    sys.exit(main())

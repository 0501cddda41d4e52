"""A Python as executors on other machines have it: every package is installed, but ours."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

OURS = ("waldelta",)
_KNOWN = (
    "import importlib.util as i, sys; print(*(name for name in sys.argv[1:] if i.find_spec(name)))"
)


def python_without_ours(folder: Path) -> Path:
    """The interpreter of a new environment there, which has this one's packages; raises
    AssertionError when it has ours too.
    """
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    # A folder that is named there is searched, but its own .pth files aren't read: one of them
    # leads to the checkout.
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = folder / "bin" / "python"
    known = subprocess.run(
        [python, "-c", _KNOWN, *OURS, "pyspark"],
        env={},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert known.stdout.split() == ["pyspark"], known.stdout
    return python

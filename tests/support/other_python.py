"""Pythons that don't see this checkout: an executor's, and one with the wheel installed."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("waldelta",)
DAG_FILE = "from waldelta_airflow import pipelines; globals().update(pipelines())  # DAGs\n"
_KNOWN = (
    "import importlib.util as i, sys; print(*(name for name in sys.argv[1:] if i.find_spec(name)))"
)


def python_without_ours(folder: Path) -> Path:
    """A new environment's interpreter with this one's packages, without ours."""
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    # A folder that is named there is searched without its .pth files: one leads to the checkout.
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = folder / "bin" / "python"
    known = subprocess.run(
        [python, "-c", _KNOWN, *OURS, "pyspark"], env={}, cwd=folder, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert known.stdout.split() == ["pyspark"], known.stdout
    return python


def build_distributions(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it, as ``make release`` builds them."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment with this one's packages, and of ours only the wheel."""
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lstrip("_").startswith("waldelta"):
            (own / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run(
        [*pip, "--no-index", str(wheel)], capture_output=True, env={}, check=True, cwd=folder
    )
    return python


def make_team(folder: Path, pipeline: str) -> dict[str, str]:
    """Writes a team's DAG and pipeline file; returns its processes' environment."""
    for name, file, text in (("dags", "shop.py", DAG_FILE), ("pipelines", "shop.yml", pipeline)):
        (folder / name).mkdir()
        (folder / name / file).write_text(text)
    ours = ("PYTHON", "AIRFLOW", "WALDELTA", "VIRTUAL_ENV", "SPARK")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    return kept | {
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "WALDELTA_PIPELINES": str(folder / "pipelines"),
        "WALDELTA_DRIVER_MEMORY": "1g",
    }

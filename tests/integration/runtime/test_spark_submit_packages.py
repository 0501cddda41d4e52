"""What executors on other machines are sent can do without the checkout."""

import json
import subprocess
from pathlib import Path

import pytest

import waldelta
from tests.support.other_python import python_without_ours
from waldelta_airflow.launchers.spark_submit import shipped_packages

# Prints where each of our modules was found.
IMPORTS = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
found = [pair for pair in sys.modules.items() if pair[0].partition(".")[0] == "waldelta"]
print(json.dumps({name: m.__file__ for name, m in found}))
"""


@pytest.mark.nightly("an archive of all modules; test_release has the wheel's")
def test_every_module_is_found_in_the_zip(tmp_path):
    """Whichever a task imports, at once or within a function."""
    archive, names = (shipped_packages(tmp_path), _modules(waldelta))
    assert {
        "waldelta.slot.read.peek",
        "waldelta.pgoutput.messages",
        "waldelta.changes.stage.stage",
    } <= set(names)
    found = subprocess.run(
        [python_without_ours(tmp_path / "python"), "-c", IMPORTS, *names], cwd=tmp_path,
        env={"PYTHONPATH": str(archive)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    files = json.loads(found.stdout)
    assert {name: file for name, file in files.items() if not file.startswith(f"{archive}/")} == {}
    assert set(names) <= files.keys()


def _modules(package) -> list[str]:
    parent = Path(package.__file__).parents[1]
    paths = [
        path.relative_to(parent).with_suffix("")
        for path in sorted((parent / package.__name__).rglob("*.py"))
    ]
    return [
        ".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"
    ]

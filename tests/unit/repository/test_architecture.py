"""The structure is a promise too: imports point inwards, job code runs over Spark Connect, names are unique."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# folder -> packages of this project that may be imported from there
MAY_IMPORT = {
    "include/waldelta": {"waldelta", "spark_jobs"},
    "spark_jobs": {"waldelta", "spark_jobs"},
    "include/waldelta_airflow": {"waldelta", "waldelta_airflow"},
    "dags": {"waldelta_airflow"},
    "plugins": {"waldelta_airflow"},
}
OURS = {"waldelta", "spark_jobs", "waldelta_airflow", "demo", "tests"}
# What doesn't exist, or isn't the same, over Spark Connect.
CLASSIC_ONLY = {
    "sparkContext",
    "_jvm",
    "_jsparkSession",
    "_jdf",
    "_sc",
    "rdd",
    "toJSON",
    "foreachPartition",
    "DeltaTable",
}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            names.add("<relative>")
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_inwards(folder):
    """Each folder imports only what design's table allows; heavy imports inside functions count too."""
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in modules(folder)
        if (bad := (imported(path) & OURS) - MAY_IMPORT[folder])
    }
    assert wrong == {}


@pytest.mark.parametrize("module", ["waldelta_airflow.factory", "waldelta_airflow.operators", "waldelta_airflow.web"])
def test_airflow_loads_no_pyspark(module):
    """Airflow parses DAGs every few seconds and serves pages: neither pays for what only a job needs."""
    program = (
        f"import sys, {module}\n"
        "sys.exit(str(sorted({'pyspark', 'great_expectations'} & set(sys.modules))) if {'pyspark', 'great_expectations'} & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_relative_imports():
    """One import name everywhere."""
    paths = [path for folder in MAY_IMPORT for path in modules(folder)]
    assert [path.name for path in paths if "<relative>" in imported(path)] == []


def test_job_code_is_connect_clean():
    """Nothing outside session.py touches what only a classic session has."""
    found = {
        f"{path.name}:{node.lineno} {node.attr if isinstance(node, ast.Attribute) else node.id}"
        for folder in ("include/waldelta", "spark_jobs")
        for path in modules(folder)
        if path.name != "session.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in CLASSIC_ONLY and not _is_deltalake(path, node.attr))
        or (isinstance(node, ast.Name) and node.id in CLASSIC_ONLY and not _is_deltalake(path, node.id))
    }
    assert found == set()


def _is_deltalake(path: Path, name: str) -> bool:
    """delta-rs has a class of the same name; it is the JVM's that Connect lacks."""
    return name == "DeltaTable" and "deltalake" in imported(path) and "delta" not in imported(path)


def test_only_wire_reads_integers_out_of_bytes():
    """Bounds are checked in one module."""
    users = {
        path.name
        for path in modules("include/waldelta/pgoutput")
        if {"struct"} & imported(path) or "int.from_bytes" in path.read_text() or '">i' in path.read_text()
    }
    assert users <= {"wire.py"}


def test_no_file_grows_beyond_reading():
    """A file that needs more than 600 lines tells more than one story."""
    folders = [*MAY_IMPORT, "include/demo"]
    long = {path.name: n for f in folders for path in modules(f) if (n := len(path.read_text().splitlines())) > 600}
    assert long == {}


def test_plugin_stems_are_unique_and_importable_nowhere_else():
    """Airflow loads each plugin file under its stem, which must not shadow a module."""
    stems = [path.stem for path in modules("plugins")]
    assert len(stems) == len(set(stems))
    shadowed = [stem for stem in stems if stem in sys.stdlib_module_names or stem in OURS]
    assert shadowed == []


def test_no_job_module_hides_one_of_the_standard_library():
    """spark-submit puts the folder of its application first on the path: a profile.py there is what pyspark's cProfile imports."""
    assert {path.stem for path in (ROOT / "spark_jobs").glob("*.py")} & sys.stdlib_module_names == set()


def test_no_module_is_loaded_under_two_names():
    """An editable install must not make `include.waldelta` a second copy of `waldelta`."""
    program = (
        "import sys, waldelta.config.pipeline_file, waldelta.lake.ledger.ledger, waldelta.jobs.pipeline\n"
        "files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, '__file__', None)]\n"
        f"ours = [f for f in files if f.startswith({str(ROOT)!r}) and '.venv' not in f]\n"
        "doubled = sorted({f for f in ours if ours.count(f) > 1})\n"
        "sys.exit(str(doubled) if doubled else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

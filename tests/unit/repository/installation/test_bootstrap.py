"""make setup does each step once, and says in one line what is missing."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from demo import jars, java

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", REPOSITORY / "tools/bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "requirements.txt").write_text("a==1\n")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/bootstrap.py").write_text("")
    return tmp_path


def fake_java(home: Path, line: str) -> Path:
    program = home / "bin/java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{line}' >&2\n")
    program.chmod(0o755)
    return home


def test_make_prints_every_target():
    makefile = (REPOSITORY / "Makefile").read_text()
    printed = subprocess.run(
        ["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    targets = re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)
    assert {"demo", "test", "bench", "up", "down", "lint", "schema"} <= set(targets)
    assert [t for t in targets if t not in printed] == []


@pytest.fixture
def pip_calls(bootstrap, repository, monkeypatch) -> list[tuple]:
    """What the environment's Python was run with; nothing is run."""
    calls: list[tuple] = []
    monkeypatch.setattr(bootstrap, "run", lambda python, *arguments: calls.append(arguments))
    (repository / ".venv/bin").mkdir(parents=True)
    return calls


def test_packages_are_installed_once(bootstrap, repository, pip_calls):
    """The second setup runs no pip, unless a pin has changed."""
    python = repository / ".venv/bin/python"
    counts = []
    for pin in ("a==1", "a==1", "a==2"):
        (repository / "requirements.txt").write_text(f"{pin}\n")
        bootstrap.install(python, repository)
        counts.append(len(pip_calls))
    assert counts == [3, 3, 6]


def test_a_failed_installation_is_tried_again(bootstrap, repository, monkeypatch):
    def fail(python, *arguments):
        raise subprocess.CalledProcessError(1, ["python", "-m", "pip", "install"])

    monkeypatch.setattr(bootstrap, "run", fail)
    python = repository / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    with pytest.raises(subprocess.CalledProcessError):
        bootstrap.install(python, repository)
    assert not (repository / ".venv/installed").exists()


@pytest.mark.parametrize(
    "line, expected",
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_442"', 1),
        ("The operation could not be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_the_java_version_is_read_from_its_own_words(tmp_path, line, expected):
    assert java.version(fake_java(tmp_path, line)) == expected


def test_java_home_comes_first(tmp_path, monkeypatch):
    home = fake_java(tmp_path, 'openjdk version "21.0.1" 2023-10-17')
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java.java_home() == home


def test_an_unfit_java_is_passed_over_and_the_remedy_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, 'openjdk version "25" 2025-09-16')))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java, "_USUAL_PLACES", ())
    with pytest.raises(
        java.JavaError, match=r"Java 17 or 21.*apt-get install openjdk-17-jre-headless"
    ):
        java.java_home()


@pytest.mark.parametrize(
    "named, wanted", [("", []), (" , ", []), ("s3", ["s3"]), (" s3, azure,", ["s3", "azure"])]
)
def test_stores_are_chosen_by_a_variable(monkeypatch, tmp_path, named, wanted):
    fetched = []
    monkeypatch.setenv("WALDELTA_STORES", named)
    monkeypatch.setattr(jars, "fetch_jars", lambda *given: fetched.append(given))
    assert jars.main(tmp_path) == 0
    assert fetched == [(tmp_path, wanted)]


def test_jars_that_cant_be_fetched_end_setup(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WALDELTA_STORES", "s4")
    assert jars.main(tmp_path) == 1
    assert "no jars of a store 's4': write s3 or azure" in capsys.readouterr().err

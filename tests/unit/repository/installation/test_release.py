"""What make release builds, two packages and no more, and the licences of what these need."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.other_python import ROOT, build_distributions
from tools import licences


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_distributions(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built):
    with zipfile.ZipFile(built[1]) as archive:
        yield archive


def test_the_wheel_has_the_files_of_two_packages(wheel):
    """With templates, pictures and the log store's source."""
    packages = ("waldelta", "waldelta_airflow")
    listed = subprocess.run(
        [
            *("git", "ls-files", "--cached", "--others", "--exclude-standard"),
            *(f"include/{name}" for name in packages),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    here = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert files == {name.removeprefix("include/") for name in here}


def test_the_wheel_has_its_licence_and_entry_points(wheel):
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    for name in ("LICENSE", "NOTICE"):
        assert wheel.read(f"{info}/licenses/{name}") == (ROOT / name).read_bytes()
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    extras = {"airflow", "spark", "cli", "rehearse", "glue", "hive"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    points = wheel.read(f"{info}/entry_points.txt").decode().split()
    assert points == [
        *("[console_scripts]", "waldelta", "=", "waldelta.__main__:main"),
        *("[airflow.plugins]", "waldelta", "=", "waldelta_airflow.plugin:WaldeltaPlugin"),
    ]


def test_the_sdist_has_what_the_wheel_is_built_from(built):
    with tarfile.open(built[0]) as archive:
        paths = [Path(*Path(name).parts[1:]) for name in archive.getnames()]
    assert {path.parts[0] for path in paths} == {
        *("pyproject.toml", "README.md", "LICENSE", "NOTICE", "CHANGELOG.md"),
        *("include", ".gitignore", "PKG-INFO"),
    }
    expected = {"waldelta", "waldelta_airflow"}
    assert {path.parts[1] for path in paths if len(path.parts) > 1} == expected


@pytest.mark.nightly("what make release checks itself")
def test_an_index_would_take_both(built):
    """As make release checks it."""
    for tool in (["twine", "check", "--strict"], ["check_wheel_contents"]):
        files = built if tool[0] == "twine" else built[1:]
        done = subprocess.run(
            [sys.executable, "-m", *tool, *map(str, files)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_dependency_has_an_allowed_licence(capsys):
    assert licences.main() == 0, capsys.readouterr().err


EXPRESSIONS = {
    "MIT": True, "GPL-3.0-only": False, "MIT OR GPL-3.0-only": True, "GPL-3.0-only OR MIT": True,
    "MIT AND GPL-3.0-only": False, "MIT AND (GPL-3.0-only OR ISC)": True,
    "GPL-3.0-only AND (MIT OR ISC)": False, "MIT OR GPL-3.0-only AND AGPL-3.0-only": True,
    "Apache-2.0 WITH LLVM-exception": False, "unknown": False, "MIT License": False, "(MIT": False,
    "MIT OR": False, "": False,
}  # fmt: skip


@pytest.mark.parametrize("expression, expected", EXPRESSIONS.items())
def test_expressions_are_judged_by_their_choices(expression, expected):
    assert licences.is_allowed(expression) is expected


def test_a_licence_that_is_not_allowed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(licences, "ALLOWED", licences.ALLOWED - {"Unlicense"})
    assert licences.main() == 1
    assert "has Unlicense, which isn't allowed" in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named(monkeypatch, tmp_path, capsys):
    other = tmp_path / "pyproject.toml"
    other.write_text(
        '[project]\ndependencies = ["waldelta-of-another-world"]\n'
        "[project.optional-dependencies]\nmore = []\n"
    )
    monkeypatch.setattr(licences, "PYPROJECT", other)
    assert licences.main() == 1
    assert (
        "waldelta-of-another-world isn't installed here: run make setup" in capsys.readouterr().err
    )

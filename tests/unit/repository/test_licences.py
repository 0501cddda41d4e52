"""Every package that waldelta needs at run time has a licence that is allowed."""

from __future__ import annotations

import pytest

from tools import licences


def test_every_dependency_has_an_allowed_licence(capsys):
    assert licences.main() == 0, capsys.readouterr().err


EXPRESSIONS = {
    "MIT": True,
    "GPL-3.0-only": False,
    "MIT OR GPL-3.0-only": True,
    "GPL-3.0-only OR MIT": True,
    "MIT AND GPL-3.0-only": False,
    "MIT AND (GPL-3.0-only OR ISC)": True,
    "GPL-3.0-only AND (MIT OR ISC)": False,
    "MIT OR GPL-3.0-only AND AGPL-3.0-only": True,
    "Apache-2.0 WITH LLVM-exception": False,
    "unknown": False,
    "MIT License": False,
    "(MIT": False,
    "MIT OR": False,
    "": False,
}


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

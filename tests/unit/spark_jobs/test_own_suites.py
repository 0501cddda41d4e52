"""The engineer's expectation files: what is refused, and which table a file belongs to."""

from __future__ import annotations

import pytest

from spark_jobs.own_suites import assign_suites, read_own_suites
from waldelta.errors import ConfigError

GOOD = "expectations:\n  - {type: expect_column_to_exist, kwargs: {column: id}}\n"
REFUSED = [
    ("expectations: []", "expectations: Tuple should have at least 1 item"),
    ("", "expectations: missing: add it"),
    ("[1]", "(top level): Input should be a valid dictionary"),
    ("expectations:\n  - {kwargs: {}}", "expectations[0].type: missing: add it"),
    ("expectations:\n  - {type: x, severty: warning}", "expectations[0].severty: unknown key: use type"),
    ("expectations:\n  - {type: x, severity: fatal}", "expectations[0].severity: Input should be 'critical'"),
    ("expectations:\n  - {type: x, gate: maybe}", "expectations[0].gate: Input should be 'warn'"),
    ("a: [", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[c[1] for c in REFUSED])
def test_refused(tmp_path, text, message):
    """A wrong file is named with the place in it."""
    (tmp_path / "public.t.yml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_own_suites(tmp_path)
    assert message in str(caught.value)
    assert "public.t.yml" in str(caught.value)


def test_all_problems_at_once(tmp_path):
    """Every refused file is listed."""
    (tmp_path / "a.yml").write_text("x: 1")
    (tmp_path / "b.yml").write_text("y: 1")
    with pytest.raises(ConfigError, match=r"(?s)a\.yml.*b\.yml"):
        read_own_suites(tmp_path)


def test_no_folder_no_suites(tmp_path):
    """A pipeline without own suites has no folder for them."""
    assert read_own_suites(None) == {}
    with pytest.raises(ConfigError, match="there is no folder"):
        read_own_suites(tmp_path / "absent")


@pytest.mark.parametrize(
    ("stem", "tables", "expected"),
    [
        ("public.t", ["public.t", "other.t"], "public.t"),
        ("t", ["public.t", "public.u"], "public.t"),
        ('public."A b"', ['public."A b"'], 'public."A b"'),
        ("public.A b", ['public."A b"'], 'public."A b"'),
    ],
)
def test_assign_suites(tmp_path, stem, tables, expected):
    """A file belongs to the table its name says, with the schema or without."""
    (tmp_path / f"{stem}.yml").write_text(GOOD)
    assigned, unused = assign_suites(read_own_suites(tmp_path), tables)
    assert list(assigned) == [expected]
    assert unused == []


def test_ambiguous_and_unused(tmp_path):
    """A bare name that two schemas have is refused; one that none has is reported."""
    (tmp_path / "t.yml").write_text(GOOD)
    suites = read_own_suites(tmp_path)
    with pytest.raises(ConfigError, match=r"name it schema\.table\.yml"):
        assign_suites(suites, ["a.t", "b.t"])
    assert assign_suites(suites, ["a.u"]) == ({}, [f"{tmp_path / 't.yml'} fits no table that has been synced"])

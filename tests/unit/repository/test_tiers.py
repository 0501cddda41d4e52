"""The tiers of the tests, CI's share of them, a night's report, and the mutations' texts."""

import json

import pytest

from tests import share, tiers
from tests.mutations import MUTATIONS
from tests.nightly import _FAILURE
from tests.support.source_code import ROOT, modules


@pytest.mark.parametrize(
    ("marks", "tier"),
    [((), "test"), (("pg",), "test"), (("nightly",), "test-all"), (("nightly", "soak"), "soak")],
)
def test_the_longest_tier_that_a_test_is_marked_with_counts(marks, tier, monkeypatch):
    monkeypatch.setattr(tiers, "is_on_spark", lambda: False)
    assert tiers.tier(marks) == tier


def test_the_shares_cover_the_tier_and_keep_files_together():
    tests = [f"tests/{file}.py::{test}" for file in "abcdefg" for test in range(ord(file) % 5 + 1)]
    shares = [share.share(tests, number, 3) for number in range(10, 13)]
    assert sorted(test for own in shares for test in own) == sorted(tests)
    files = [{test.partition("::")[0] for test in own} for own in shares]
    assert sum(map(len, files)) == 7
    orders = {tuple(share.share(tests, number, 3)) for number in range(12, 100, 3)}
    # In an order that the number chooses: a share of three files has six.
    assert len(orders) == 6


@pytest.mark.parametrize(
    ("line", "is_failure"),
    [
        ("FAILED tests/unit/test_x.py::test_y - AssertionError", True),
        ("failed      tests/integration/test_x.py::test_y", True),
        ("129 of 130 mutations caught; not caught: 7", True),
        ("130 of 130 mutations caught", False),
        ("1 cells aren't well: ['land.begun | driver']", True),
        ("not reached tests/integration/test_x.py::test_y", False),
        ("seed 7: repair: the targets differ; 3 kills", True),
        ("seed 7: 200 kills, 0 differences", False),
        ("3. Python 3.13, Airflow 3.3.2, Spark 4.2.0, PostgreSQL 15: fails (9 s)", True),
        ("13. Python 3.12, Airflow 3.0.6, Spark 4.2.0, PostgreSQL 18: refused (9 s)", False),
    ],
)
def test_a_nights_report_names_what_failed(line, is_failure):
    assert bool(_FAILURE.findall(line)) == is_failure


def test_make_test_chooses_what_the_mutations_are_caught_by():
    assert f'"{tiers.ORDINARY}"' in (tiers.ROOT / "Makefile").read_text()


def test_make_test_keeps_its_budget():
    """As `make test-profile` recorded it; a machine that was slower then has as much more.

    A record of a few files, or of files that are gone, says nothing about the budget.
    """
    record = json.loads(tiers.RECORD.read_text())
    print(*tiers.sizes(record), sep="\n")
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(files & record["test"].keys()) > 0.75 * len(files), "make test; make test-profile"
    pace = max(1, record["import pandas"] / 0.5)
    assert sum(record["test"].values()) <= tiers.BUDGET_S * pace


def test_every_mark_of_a_tier_has_a_reason():
    assert [mark for path in modules("tests") for mark in tiers.bare_marks(path)] == []


@pytest.mark.parametrize(
    ("marks", "limit_s"),
    [((), None), (("e2e", "nightly"), None), (("e2e", "long"), 600), (("long", "soak"), 7_200)],
)
def test_a_test_hangs_after_two_minutes_unless_it_is_marked(marks, limit_s, monkeypatch):
    monkeypatch.setattr(tiers, "is_long", lambda: False)
    assert tiers.limit_s(marks) == limit_s


# Only an entry less is a change for the better: a test that is as long is cut instead.
MARK = ".".join(("pytest", "mark", "long("))
LONG = [
    "e2e/test_browser.py",
    "e2e/test_cdc_dag.py",
    "e2e/test_demo.py",
    "integration/rehearsal/test_migrations.py",
    "integration/sync/test_continued_copy.py",
]


def test_few_tests_may_take_longer_than_two_minutes():
    files = [path for path in modules("tests") if MARK in path.read_text()]
    assert [str(path.relative_to(ROOT / "tests")) for path in files] == LONG
    assert [path.read_text().count(MARK) for path in files] == [1] * len(LONG)


def test_a_mark_without_a_reason_is_found(tmp_path):
    file = tmp_path / "test_x.py"
    file.write_text(
        "import pytest\nA = pytest.mark.soak\nB = pytest.mark.nightly('too few')\n"
        "C = pytest.mark.soak('a reason of five words')\n"
    )
    assert tiers.bare_marks(file) == ["test_x.py:2", "test_x.py:3"]


def test_each_text_is_there_once_and_its_tests_exist():
    """The mutated file still is a Python module."""
    for number, mutation in enumerate(MUTATIONS, 1):
        source = mutation.path(ROOT).read_text()
        mutated = mutation.mutated(source)
        assert mutated != source, number
        compile(mutated, mutation.file, "exec")
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert (ROOT / "tests" / file).is_file(), (number, test)
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), (number, test)

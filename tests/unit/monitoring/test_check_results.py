"""The expectations that checks found not met, from a long history of checks."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.cases import cases
from tests.support.bookkeeping import result
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, now
from waldelta.lake.ledger.check_records import REFERENCES_HOLD
from waldelta.lake.ledger.table import LedgerTable
from waldelta.monitoring.check_results import (
    read_failed,
    read_failed_in_run,
    read_latest_checks,
)

MEANINGS = ("key (id) is unique", "name is never null")


@pytest.fixture
def examples_read(monkeypatch):
    """How many rows were read with their examples."""
    read, scan = [], LedgerTable.scan

    def count(table, columns, *args, **kwargs):
        rows = scan(table, columns, *args, **kwargs)
        read.append(rows.num_rows if "examples" in columns else 0)
        return rows

    monkeypatch.setattr(LedgerTable, "scan", count)
    return read


@pytest.fixture
def book(lake):
    """Checks of two tables each hour, the last of which is 100 days older for one of them."""
    ledger, at = Ledger(Lake(lake)), now()
    rows = []
    for table, age in (("public.a", timedelta()), ("public.b", timedelta(days=100))):
        for n in range(20):
            rows += [
                result(at - age - timedelta(hours=20 - n), f"r{n}", table, False, meaning=meaning)
                for meaning in MEANINGS
            ]
    ledger.append_all(rows)
    return ledger


@pytest.mark.parametrize("tables", [["public.a"], ["public.b"], ["public.a", "public.b"]])
def test_examples_are_read_of_the_last_check_alone(book, examples_read, tables):
    found = read_failed(book, [*tables, "public.never_checked"])
    assert [(one.table_name, one.run_id, one.meaning) for one in found] == [
        (table, "r19", meaning) for table in tables for meaning in MEANINGS
    ]
    assert sum(examples_read) == len(found)


def test_examples_are_read_of_one_run_alone(book, examples_read):
    found = read_failed_in_run(book, "r7")
    assert [one.run_id for one in found] == ["r7"] * 4
    assert read_failed_in_run(book, "unknown") == []
    assert sum(examples_read) == len(found)


def test_what_maintenance_found_before_the_last_check_counts(book):
    """The check doesn't judge it."""
    at = now() - timedelta(hours=5, minutes=30)
    found = result(at, "m", "public.a", False, meaning="fk")
    book.append(replace(found, expectation=REFERENCES_HOLD))
    assert [one.meaning for one in read_failed(book, ["public.a"])] == ["fk", *MEANINGS]


# Hours ago of an expectation's results, and whether each met it; since when it isn't met.
SINCE = [
    ("from the first check on", [(5, False), (3, False)], 5),
    ("since a check that met it", [(5, False), (4, True), (3, False), (2, False)], 3),
    ("since one that couldn't evaluate it", [(4, True), (3, None), (2, False)], 3),
    ("for longer than a page looks back first", [(500, True), (400, False), (2, False)], 400),
]


@cases("results, since", SINCE)
def test_since_when_an_expectation_fails(lake, results, since):
    """On a table's page and that of a run, the later results of which don't count."""
    ledger, at = Ledger(Lake(lake)), now()
    for n, met in results:
        ledger.append(result(at - timedelta(hours=n), f"r{n}", "public.a", met))
    ledger.append(result(at - timedelta(hours=1), "r1", "public.b"))
    begin = at - timedelta(hours=since)
    assert [one.since for one in read_failed(ledger, ["public.a"])] == [begin]
    assert [one.since for one in read_failed_in_run(ledger, f"r{results[-1][0]}")] == [begin]
    (check,) = read_latest_checks(ledger, at - timedelta(days=7), (), "public.a").values()
    assert [one.since for one in check.unmet] == [begin]

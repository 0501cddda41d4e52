"""The expectations that checks found not met, from a long history of checks."""

from dataclasses import replace
from datetime import timedelta

import pytest

from tests.support.bookkeeping import result
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, now
from waldelta.lake.ledger.check_records import REFERENCES_HOLD
from waldelta.lake.ledger.table import LedgerTable
from waldelta.monitoring.check_results import read_failed, read_failed_in_run

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

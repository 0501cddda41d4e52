"""Several targets checked at once: each on its own session, each judged by its own version."""

import threading

import pytest

from tests.integration.check.test_quality import GOOD, Scene
from waldelta.spark import RunnerPool
from waldelta.spark.runner import MOST_AT_ONCE

QUERY = """
expectations:
  - type: unexpected_rows_expectation
    kwargs: {unexpected_rows_query: "select * from {batch} where id > 3"}
    notes: no id above 3
"""


@pytest.fixture
def lake(runner, tmp_path):
    return Scene(runner, tmp_path)


@pytest.mark.soak("two checks at one moment")
def test_query_expectations_see_their_own_table(lake):
    """Great Expectations gives all its queries' views one name; one session would mix them up."""
    wrong = {f"public.t{number}" for number in range(0, 2 * MOST_AT_ONCE, 3)}
    for number in range(2 * MOST_AT_ONCE):
        table = f"public.t{number}"
        lake.target(
            [*GOOD, (4, "JFK", "1", None)] if table in wrong else GOOD, table=table, row_filter=None
        )
        lake.own(QUERY, f"{table}.yml")
    report = lake.check()
    assert set(report.failed_tables) == wrong
    assert [verdict.table for verdict in report.tables] == sorted(
        verdict.table for verdict in report.tables
    )


def test_each_piece_of_work_has_a_session_to_itself(runner):
    """Results come in the items' order, and as many run at once as there are sessions."""
    runner.spark()
    busy, seen, together = set(), set(), threading.Barrier(MOST_AT_ONCE)

    def work(sibling, item):
        assert id(sibling) not in busy
        busy.add(id(sibling))
        seen.add(id(sibling))
        together.wait(timeout=60)
        sibling.spark().range(item).createOrReplaceTempView("tmp_view")
        together.wait(timeout=60)
        rows = sibling.spark().sql("select count(*) as n from tmp_view").collect()[0].n
        busy.discard(id(sibling))
        return rows

    items = list(range(2 * MOST_AT_ONCE))
    with RunnerPool.open(runner, len(items)) as pool:
        assert pool.map(work, items) == items
    assert len(seen) == MOST_AT_ONCE


def test_the_first_error_ends_the_work(runner):
    """What hasn't begun never does."""
    begun = []

    def work(_, item):
        begun.append(item)
        raise ValueError(item)

    with RunnerPool.open(runner, 2) as pool, pytest.raises(ValueError, match="0"):
        pool.map(work, list(range(50)))
    assert len(begun) < 50

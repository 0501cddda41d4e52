"""Where a check's error leads: to the pages of the tables that it is about."""

import pytest

from waldelta.errors import QualityFailed
from waldelta.stages.check.suite.expectation import (
    Outcome,
    PlannedExpectation,
    QualityReport,
    TableVerdict,
)


def verdict(table: str, severity: str | None = None, page: str | None = None) -> TableVerdict:
    """A table whose one expectation of this severity failed, or that passed."""
    planned = PlannedExpectation("kind", {}, severity or "critical", "key", "key (id) is unique")
    return TableVerdict(table, 1, (Outcome(planned, severity is None, None, None),), (), page)


LINKS = [
    ("none failed", [verdict("a", page="a")], None),
    ("one", [verdict("a", page="a"), verdict("b", "critical", "b")], ["b"]),
    ("each that failed", [verdict("a", "critical", "a"), verdict("b", "critical", "b")],
     ["a", "b"]),
    ("one without a page, beside a page with warnings",
     [verdict("a", "warning", "a"), verdict("b", "critical")], ["index"]),
    ("one of two without a page", [verdict("a", "critical"), verdict("b", "critical", "b")],
     ["b", "index"]),
]  # fmt: skip


@pytest.mark.parametrize("tables, pages", [c[1:] for c in LINKS], ids=[c[0] for c in LINKS])
def test_an_error_leads_to_the_pages_of_its_own_tables(tables, pages):
    report = QualityReport("r", tuple(tables), "index")
    if pages is None:
        report.raise_if_critical()
        return
    with pytest.raises(QualityFailed) as failed:
        report.raise_if_critical()
    lines = str(failed.value).splitlines()
    assert [line for line in lines if line.startswith("report: ")] == [
        f"report: {page}" for page in pages
    ]
    assert report.location == pages[0]

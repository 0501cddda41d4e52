"""The list of reports: what it keeps, in which order, and an index that needs only itself."""

import re
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.bookkeeping import add_reports
from tests.support.pipelines import pipeline_file
from waldelta.lake import Lake
from waldelta.stages.check.reports.docs_store import CHECKS, DocsStore
from waldelta.stages.check.reports.entries import ReportEntry, checked_runs, dump_entry, parse_entry
from waldelta.stages.check.reports.page import static_index, table_index

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def docs(tmp_path):
    pipeline = pipeline_file(tmp_path.as_uri(), "shop", ["public.t"])
    return DocsStore(pipeline, Lake(tmp_path.as_uri()))


def made(table="public.t", at=NOON, failures=(), warnings=(), run_id="run", **other):
    one = ReportEntry(at, "shop", run_id, table, 3, 4, failures, warnings, "x.html")
    return replace(one, **other)


def entry(docs, *given, **named):
    return add_reports(docs.pipeline, made(*given, **named))[0]


def test_entries_come_back_as_they_were(docs, tmp_path):
    """Until they are pruned; only their owner reads them."""
    entry(docs, "public.a")
    kept = entry(docs, "public.b", NOON + timedelta(minutes=1), ("ü",))
    assert docs.prune(CHECKS, 1) == 1
    assert docs.read_entries() == [kept]
    folder = tmp_path / "_waldelta" / "data_docs"
    for path in (folder, (folder / kept.page).parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    empty = pipeline_file((tmp_path / "absent").as_uri(), "shop", ["public.t"])
    assert DocsStore(empty, Lake(empty.target.root)).read_entries() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("at", "2026-01-01T12:00:00"),
        ("at", 5),
        ("expectations", "<script>"),
        ("version", "<script>"),
        ("result", {}),
        ("page", None),
    ],
)
def test_what_no_entry_can_have_is_no_entry(docs, name, value):
    """Another writer of a store could list it: no page breaks, and none shows its markup."""
    row = dump_entry(entry(docs))
    assert parse_entry(row) is not None
    assert parse_entry(row | {name: value}) is None


def test_a_folders_checks_go_with_their_runs(docs, tmp_path):
    """Also those without a page; those of others who share the folder stay."""
    at = [NOON + timedelta(minutes=minute) for minute in range(4)]
    entry(docs, at=at[0], page="")
    entry(docs, at=at[0], page="", pipeline="other")
    others = entry(docs, at=at[1], pipeline="shop_2")
    kept = [entry(docs, at=at[2], page=""), entry(docs, at=at[3])]
    assert docs.prune(CHECKS, 2) == 1
    left = docs.read_entries()
    assert [e for e in left if e.pipeline == "shop"] == kept
    assert others in left
    assert len(left) == 4
    (tmp_path / "_waldelta/data_docs" / Path(others.page).parent / "entries.json").unlink()
    fresh = pipeline_file(docs.pipeline.target.root, "shop_2", ["public.t"])
    assert DocsStore(fresh, Lake(fresh.target.root)).prune(CHECKS, 0) == 1


def test_runs_are_newest_first_and_failures_first():
    """A run is as bad as the worst of its tables."""
    late = NOON + timedelta(minutes=1)
    of_tables = {"a": {}, "b": {"warnings": ("w",)}, "c": {"failures": ("f",)}}
    entries = [made(name, late, run_id="late", **of) for name, of in of_tables.items()]
    runs = checked_runs([*entries, made("a", run_id="early")])
    assert [(run.run_id, run.verdict) for run in runs] == [("late", "failed"), ("early", "passed")]
    assert [(e.table, e.verdict) for e in runs[0].entries] == [
        ("c", "failed"),
        ("b", "warning"),
        ("a", "passed"),
    ]


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '"><img src=x>'])
def test_the_index_is_text_and_needs_no_network(docs, text):
    """Every name is escaped, there is no script, and nothing is fetched from anywhere."""
    entry(docs, failures=(text,), run_id=text)
    index = static_index(text, checked_runs(docs.read_entries()))
    assert text not in index
    assert not re.search(r"<script|<img|https?://|@import|url\(", index)
    assert index.count("public.t") == 4  # by table and by time, with links


def test_the_index_shows_control_characters_as_escapes(docs):
    entry(docs, failures=("a\u202eb\x9b",))
    index = static_index("shop", checked_runs(docs.read_entries()))
    assert r"a\u202eb\x9b" in index


def test_the_index_by_table_has_the_newest_at_the_right():
    """A table that wasn't checked has none; those that failed last come first."""
    late = NOON + timedelta(minutes=1)
    runs = checked_runs(
        [
            made("a", run_id="early", failures=("f",)),
            made("a", late, run_id="late"),
            made("b", late, run_id="late", failures=("f",), page=""),
        ]
    )
    index = table_index(runs, lambda entry: f"{entry.run_id}/{entry.table}")
    assert index.index(">b<") < index.index(">a<")
    assert re.findall(r'href="([^"]+)">(.)<', index) == [("early/a", "✕"), ("late/a", "✓")]
    assert "<td></td><td><span" in index

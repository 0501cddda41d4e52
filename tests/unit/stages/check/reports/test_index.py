"""The list of reports: what it keeps, in which order, and an index that needs nothing but
itself.
"""

from __future__ import annotations

import re
import stat
from datetime import UTC, datetime, timedelta

import pytest

from waldelta.stages.check.reports.index import (
    ReportEntry,
    add_entry,
    checked_runs,
    drop_old_pageless,
    dump_entry,
    parse_entry,
    read_entries,
    remove_entry,
)
from waldelta.stages.check.reports.page import static_index

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def entry(folder, table="public.t", at=NOON, failures=(), warnings=(), run_id="run"):
    page = f"validations/{table}/{run_id}.html"
    (folder / page).parent.mkdir(parents=True, exist_ok=True)
    (folder / page).touch()
    made = ReportEntry(at, "shop", run_id, table, 3, 4, failures, warnings, page)
    add_entry(folder, made)
    return made


def test_entries_come_back_as_they_were(tmp_path):
    """Until they are removed or their page is gone; only their owner reads them."""
    kept, removed, lost = (
        entry(tmp_path, f"public.{name}", failures=("ü",)) for name in ("a", "b", "c")
    )
    remove_entry(tmp_path, removed.page)
    (tmp_path / lost.page).unlink()
    assert read_entries(tmp_path) == [kept]
    assert stat.S_IMODE((tmp_path / ".entries").stat().st_mode) == 0o700
    assert read_entries(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("at", "2026-01-01T12:00:00"),
        ("at", 5),
        ("expectations", "<script>"),
        ("version", "<script>"),
        ("told", {}),
        ("page", None),
    ],
)
def test_what_no_entry_can_have_is_no_entry(tmp_path, name, value):
    """Another writer of a store could list it: no page breaks, and none shows its markup."""
    row = dump_entry(entry(tmp_path))
    assert parse_entry(row) is not None
    assert parse_entry(row | {name: value}) is None


def test_checks_without_a_page_go_with_their_runs(tmp_path):
    """Or before, where runs without any page are many; those of others who share the folder
    stay.
    """
    at = [NOON + timedelta(minutes=minute) for minute in range(4)]
    checks = [(at[0], "shop"), (at[1], "shop"), (at[3], "shop"), (at[0], "other")]
    for when, pipeline in checks:
        add_entry(
            tmp_path,
            ReportEntry(when, pipeline, "run", "public.gone", None, 1, ("it isn't there",), (), ""),
        )
    paged = {entry(tmp_path, at=when, run_id=str(when)).at for when in (at[0], at[2])}
    assert len(read_entries(tmp_path)) == 6
    assert drop_old_pageless(tmp_path, "shop", 3) == 1
    left = read_entries(tmp_path)
    assert {e.at for e in left if e.page} == paged
    assert {(e.at, e.pipeline) for e in left if not e.page} == set(checks[1:])


def test_runs_are_newest_first_and_failures_first(tmp_path):
    """A run is as bad as the worst of its tables."""
    late = NOON + timedelta(minutes=1)
    for table, found in {"a": {}, "b": {"warnings": ("w",)}, "c": {"failures": ("f",)}}.items():
        entry(tmp_path, table, late, run_id="late", **found)
    entry(tmp_path, "a", run_id="early")
    runs = checked_runs(read_entries(tmp_path))
    assert [(run.run_id, run.verdict) for run in runs] == [("late", "failed"), ("early", "passed")]
    assert [(e.table, e.verdict) for e in runs[0].entries] == [
        ("c", "failed"),
        ("b", "warning"),
        ("a", "passed"),
    ]


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '"><img src=x>'])
def test_the_index_is_text_and_needs_no_network(tmp_path, text):
    """Every name is escaped, there is no script, and nothing is fetched from anywhere."""
    entry(tmp_path, failures=(text,), run_id=text.replace("/", "|"))
    index = static_index(text, checked_runs(read_entries(tmp_path)))
    assert text not in index
    assert not re.search(r"<script|<img|https?://|@import|url\(", index)
    assert index.count("public.t") == 2  # a link and its text


def test_the_index_shows_control_characters_as_escapes(tmp_path):
    entry(tmp_path, failures=("a\u202eb\x9b",))
    index = static_index("shop", checked_runs(read_entries(tmp_path)))
    assert r"a\u202eb\x9b" in index

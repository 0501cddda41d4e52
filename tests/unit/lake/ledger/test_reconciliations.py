"""What a reconciliation found, in the lake and as a page."""

from __future__ import annotations

from datetime import timedelta

import pytest
import tenacity

from waldelta.errors import LateWriter
from waldelta.lake import Lake
from waldelta.lake.ledger import Reconciliation, RowDifference, now
from waldelta.lake.ledger.reconciliations import ColumnDifference, Reconciliations, last_answers
from waldelta.stages.check.reports._reconciliation_page import prune_pages, write_pages
from waldelta.stages.check.reports.index import ReportEntry, add_entry, checked_runs, read_entries
from waldelta.stages.check.reports.page import static_index

HOSTILE = "<script>alert(1)</script>"


def list_pages(folder, pipeline, names, found):
    for entry in write_pages(folder, pipeline, names, found):
        add_entry(folder, entry)


def row(run_id, table="public.t", status="equal", **details):
    at = details.pop("at", now())
    details = {"version": 3, **details}
    return Reconciliation(
        at, run_id, table, status, source_rows=5, target_rows=5, position=16, **details
    )


def latest(kept):
    """The last result of each table, with the differing rows."""
    return kept.in_full(last_answers(kept.history())[0])


def test_the_latest_answer_of_each_table_counts(tmp_path):
    """Of a run that was tried again the last; earlier ones stay for as long as promised."""
    kept = Reconciliations(Lake(tmp_path.as_uri()))
    assert latest(kept) == {}
    odd = RowDifference("different", '{"id": "1"}', 1, [ColumnDifference("v", None, "x")], 9)
    kept.add([row("r1", at=now() - timedelta(days=40)), row("r1", "public.u", "failed")])
    kept.add([row("r2", status="different", different=1, differences=[odd])])
    kept.add([row("r2", status="repaired", repaired=1, left_out=["w"], differences=[odd])])
    assert {name: found.status for name, found in latest(kept).items()} == {
        "public.t": "repaired",
        "public.u": "failed",
    }
    found = latest(kept)["public.t"]
    assert (found.status, found.differences, found.left_out) == ("repaired", [odd], ["w"])
    assert len(kept.history(now() - timedelta(days=1))) == 3
    assert kept.prune(now() - timedelta(days=30)) == 1
    assert {name: found.status for name, found in latest(kept).items()} == {
        "public.t": "repaired",
        "public.u": "failed",
    }


MEANWHILE = {
    "one of an earlier version": ("equal", 3, "different", 4, ("different", "this")),
    "one of the same": ("equal", 4, "different", 4, ("different", "this")),
    "one of a later version": ("equal", 5, "different", 4, ("equal", "other")),
    "a repair of the same": ("repaired", 4, "different", 4, ("repaired", "other")),
    "a repair of an earlier version": ("repaired", 3, "different", 4, ("different", "this")),
    "a repair, and what this one has repaired": (
        "repaired",
        5,
        "repaired",
        4,
        ("repaired", "this"),
    ),
    "no answer": ("failed", None, "different", 4, ("different", "this")),
    "one of another table": ("other", 5, "different", 4, ("different", "this")),
}


@pytest.mark.parametrize("late", [False, True], ids=["before it looks", "once it has looked"])
@pytest.mark.parametrize(
    "status, version, found, held, expected", MEANWHILE.values(), ids=MEANWHILE
)
def test_an_answer_of_before_what_another_run_has_entered_is_not_the_last_word(
    tmp_path, monkeypatch, status, version, found, held, expected, late
):
    """A run over many tables enters at its end what it found of the first."""
    kept, began = Reconciliations(Lake(tmp_path.as_uri())), now()
    table, status = ("public.u", "equal") if status == "other" else ("public.t", status)
    read, others = Reconciliations.history, [row("other", table, status, version=version)]
    if not late:
        kept.add([others.pop()])

    def history(self, since=None):
        rows = read(self, since)
        if others:
            kept.add([others.pop()])
        return rows

    monkeypatch.setattr(Reconciliations, "history", history)
    kept.add([row("this", status=found, version=held)], began)
    last = latest(kept)["public.t"]
    assert (last.status, last.run_id) == expected


def test_whoever_is_always_too_late_gives_up(tmp_path, monkeypatch):
    """Others enter what they found behind each look: nothing is entered by what was looked at."""
    kept, began, read = Reconciliations(Lake(tmp_path.as_uri())), now(), Reconciliations.history

    def history(self, since=None):
        rows = read(self, since)
        kept.add([row("other", status="failed")])
        return rows

    monkeypatch.setattr(Reconciliations, "history", history)
    monkeypatch.setattr(Reconciliations._add_behind.retry, "stop", tenacity.stop_after_attempt(2))
    with pytest.raises(LateWriter):
        kept.add([row("this")], began)
    assert "this" not in {row.run_id for row in read(kept)}


def test_the_last_answer_of_each_table_is_kept(tmp_path):
    """However old it is, as are the last attempt since and the last answer of all columns; a table
    that nobody compares any more differs still.
    """
    kept = Reconciliations(Lake(tmp_path.as_uri()))
    long_ago = [
        ("public.t", "different"),
        ("public.t", "failed"),
        ("public.t", "not compared"),
        ("public.u", "different"),
        ("public.u", "equal"),
        ("public.v", "not compared"),
        ("public.v", "failed"),
        ("public.x", "equal"),
        ("public.x", "equal"),
        ("public.x", "equal", "v"),
        ("public.x", "equal", "v"),
    ]
    for n, (table, status, *left_out) in enumerate(long_ago):
        kept.add(
            [row(f"r{n}", table, status, at=now() - timedelta(days=400 - n), left_out=left_out)]
        )
    kept.add([row("new", "public.w", at=now() - timedelta(days=2)), row("newer", "public.w")])
    assert kept.prune(now() - timedelta(days=30)) == 5
    assert kept.prune(now() - timedelta(days=30)) == 0
    assert {name: found.status for name, found in latest(kept).items()} == {
        "public.t": "different", "public.u": "equal", "public.v": "failed", "public.w": "equal",
        "public.x": "equal",
    }  # fmt: skip
    assert len(kept.history()) == 8


def test_an_attempt_without_an_answer_takes_none_away(tmp_path):
    """The table was locked, or its source away: what differed differs still."""
    kept = Reconciliations(Lake(tmp_path.as_uri()))
    odd = RowDifference("missing", '{"id": "1"}')
    kept.add([row("r1", status="different", missing=1, differences=[odd]), row("r1", "public.u")])
    kept.add([row("r2", status="not compared", reason="locked"), row("r2", "public.v", "failed")])
    kept.add([row("r3", status="failed", reason="gone"), row("r3", "public.v", "not compared")])
    known = latest(kept)
    assert {name: (found.run_id, found.status) for name, found in known.items()} == {
        "public.t": ("r1", "different"),
        "public.u": ("r1", "equal"),
        "public.v": ("r3", "not compared"),
    }
    assert known["public.t"].differences == [odd]
    _, attempts = last_answers(kept.history())
    assert {name: said.reason for name, said in attempts.items()} == {"public.t": "gone"}
    kept.add([row("r4")])
    assert (latest(kept)["public.t"].status, last_answers(kept.history())[1]) == (
        "equal",
        {},
    )


def test_pages_are_listed_and_pruned_with_their_runs(tmp_path):
    """Nothing in them is markup; the run whose table differs is a failed one."""
    names = {"public.t": "public.t", HOSTILE: "hostile"}
    odd = RowDifference(
        "different", f'{{"id": "{HOSTILE}"}}', 1, [ColumnDifference(HOSTILE, HOSTILE, None)]
    )
    for n in range(3):
        at = now() - timedelta(hours=3 - n)
        found = [
            row(f"r{n}", at=at),
            row(
                f"r{n}",
                HOSTILE,
                "different",
                different=3,
                differences=[odd],
                at=at,
                reason=HOSTILE,
                by=HOSTILE,
            ),
        ]
        list_pages(tmp_path, "shop", names, found)
        if n == 0:
            list_pages(tmp_path, "other", names, found)
    assert prune_pages(tmp_path, "other", 1) == 0
    assert len({entry.page for entry in read_entries(tmp_path)}) == 8
    runs = checked_runs(entry for entry in read_entries(tmp_path) if entry.pipeline == "shop")
    assert [(run.run_id, run.verdict, len(run.entries)) for run in runs] == [
        (f"r{n}", "failed", 2) for n in (2, 1, 0)
    ]
    text = (tmp_path / runs[0].entries[0].page).read_text()
    assert "<script" not in text
    assert "and 2 more" in text
    assert prune_pages(tmp_path, "shop", 1) == 2
    left = checked_runs(read_entries(tmp_path))
    assert [(run.pipeline, run.run_id) for run in left] == [("shop", "r2"), ("other", "r0")]


def test_pruning_removes_no_file_outside_the_folder(tmp_path):
    """An entry is a file that another account may have written: neither dots, links nor absolute
    paths lead elsewhere.
    """
    folder, outside = tmp_path / "docs", tmp_path / "outside"
    outside.mkdir()
    (folder / "reconciliations").mkdir(parents=True)
    (folder / "reconciliations" / "link").symlink_to(outside)
    (folder / "index.html").touch()
    names = ["dots.html", "link.html", "absolute.html"]
    pages = [
        "../../outside/dots.html",
        "link/link.html",
        f"/{outside}/absolute.html",
        "../index.html",
    ]
    for name in names:
        (outside / name).touch()
    for n, page in enumerate(pages):
        at = now() - timedelta(hours=n)
        listed = f"reconciliations/{page}"
        add_entry(folder, ReportEntry(at, "shop", f"r{n}", "public.t", 1, 1, (), (), listed))
    prune_pages(folder, "shop", 0)
    assert sorted(path.name for path in outside.iterdir()) == sorted(names)
    assert (folder / "index.html").exists()


LISTED = [
    ("equal", {}, "passed", "reconciliation of 5 rows: equal, Delta version 3"),
    (
        "repaired",
        {"different": 1, "repaired": 1},
        "passed",
        "reconciliation of 5 rows: repaired: 1 different, Delta version 3",
    ),
    (
        "different",
        {"missing": 2},
        "failed",
        "reconciliation of 5 rows: different: 2 missing, Delta version 3",
    ),
    (
        "not compared",
        {"reason": "locked", "version": None},
        "warning",
        "reconciliation: not compared: locked",
    ),
]


@pytest.mark.parametrize("status, details, verdict, told", LISTED, ids=[case[0] for case in LISTED])
def test_the_list_says_what_was_found(tmp_path, status, details, verdict, told):
    """What was repaired is so; nothing is an expectation that wasn't met."""
    list_pages(tmp_path, "shop", {"public.t": "public.t"}, [row("r", status=status, **details)])
    (run,) = checked_runs(read_entries(tmp_path))
    assert run.verdict == verdict
    assert f"<td>{told}</td>" in static_index("shop", [run])
    assert f'class="mark {verdict}"' in (tmp_path / run.entries[0].page).read_text()

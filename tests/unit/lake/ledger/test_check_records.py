"""What a reconciliation found, in the lake and as a page."""

from datetime import timedelta
from pathlib import Path

import pytest
import tenacity

from tests.support.pipelines import pipeline_file
from waldelta.errors import LateWriter
from waldelta.lake import Lake
from waldelta.lake.ledger import Reconciliation, RowDifference, now
from waldelta.lake.ledger.check_records import ColumnDifference, Reconciliations, last_answers
from waldelta.stages.check.reports.data_docs import list_reconciliation
from waldelta.stages.check.reports.docs_store import RECONCILIATIONS, DocsStore
from waldelta.stages.check.reports.entries import checked_runs
from waldelta.stages.check.reports.page import static_index

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def lake(tmp_path):
    return Lake(tmp_path.as_uri())


def docs_of(lake, pipeline="shop"):
    return DocsStore(pipeline_file(lake.root, pipeline, ["public.t"]), lake)


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
    kept.add([row("r2", status="repaired", repaired=1, skipped_columns=["w"], differences=[odd])])
    expected = {"public.t": "repaired", "public.u": "failed"}
    assert {name: found.status for name, found in latest(kept).items()} == expected
    found = latest(kept)["public.t"]
    assert (found.status, found.differences, found.skipped_columns) == ("repaired", [odd], ["w"])
    assert len(kept.history(now() - timedelta(days=1))) == 3
    assert kept.prune(now() - timedelta(days=30)) == 1
    expected = {"public.t": "repaired", "public.u": "failed"}
    assert {name: found.status for name, found in latest(kept).items()} == expected


MEANWHILE = {
    "one of an earlier version": ("equal", 3, "different", 4, ("different", "this")),
    "one of the same": ("equal", 4, "different", 4, ("different", "this")),
    "one of a later version": ("equal", 5, "different", 4, ("equal", "other")),
    "a repair of the same": ("repaired", 4, "different", 4, ("repaired", "other")),
    "a repair of an earlier version": ("repaired", 3, "different", 4, ("different", "this")),
    "a repair, and what this one has repaired": ("repaired", 5, "repaired", 4,
     ("repaired", "this")),
    "no answer": ("failed", None, "different", 4, ("different", "this")),
    "one of another table": ("other", 5, "different", 4, ("different", "this")),
}  # fmt: skip


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
    """And the last attempt since, and the last of all columns, however old."""
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
            [
                row(f"r{n}", table, status, at=now() - timedelta(days=400 - n),
                    skipped_columns=left_out),
            ]
        )  # fmt: skip
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
    expected = ("equal", {})
    assert (latest(kept)["public.t"].status, last_answers(kept.history())[1]) == expected


def test_pages_are_listed_and_pruned_with_their_runs(lake):
    """Nothing in them is markup; the run whose table differs is a failed one."""
    odd = RowDifference(
        "different", f'{{"id": "{HOSTILE}"}}', 1, [ColumnDifference(HOSTILE, HOSTILE, None)]
    )
    hostile, docs = f'public."{HOSTILE}"', docs_of(lake)
    for n in range(3):
        at = now() - timedelta(hours=3 - n)
        of_hostile = {"different": 3, "differences": [odd], "reason": HOSTILE, "by": HOSTILE}
        found = [row(f"r{n}", at=at), row(f"r{n}", hostile, "different", at=at, **of_hostile)]
        list_reconciliation(docs.pipeline, lake, found)
        if n == 0:
            list_reconciliation(docs_of(lake, "other").pipeline, lake, found)
    assert docs_of(lake, "other").prune(RECONCILIATIONS, 1) == 0
    assert len({entry.page for entry in docs.read_entries()}) == 8
    runs = checked_runs(entry for entry in docs.read_entries() if entry.pipeline == "shop")
    assert [(run.run_id, run.verdict, len(run.entries)) for run in runs] == [
        (f"r{n}", "failed", 2) for n in (2, 1, 0)
    ]
    text = docs.read_page(runs[0].entries[0].page).decode()
    assert "<script" not in text
    assert "and 2 more" in text
    assert docs.prune(RECONCILIATIONS, 1) == 2
    left = checked_runs(docs.read_entries())
    assert [(run.pipeline, run.run_id) for run in left] == [("shop", "r2"), ("other", "r0")]


def test_pruning_removes_no_file_outside_the_folder(lake, tmp_path):
    """Another account may have linked a run's folder, or the folder of all."""
    docs, outside = docs_of(lake), tmp_path / "outside"
    (run,) = {Path(entry.page).parent for entry in listed(docs, row("r"))}
    folder = tmp_path / "_waldelta/data_docs"
    (folder / run).rename(outside)
    (folder / run).symlink_to(outside)
    assert (docs.read_entries(), docs.prune(RECONCILIATIONS, 0)) == ([], 0)
    (folder / run).unlink()
    (folder / run.parent).rename(outside / "all")
    (folder / run.parent).symlink_to(outside / "all")
    (outside / "all" / run.name).mkdir()
    assert docs.prune(RECONCILIATIONS, 0) == 0
    names = {path.name for path in outside.rglob("*")}
    assert names == {"all", run.name, "entries.json", "public.t.html"}


def listed(docs, *found):
    """Returns what the list says of these comparisons, read for the first time."""
    list_reconciliation(docs.pipeline, Lake(docs.pipeline.target.root), found)
    return [e for e in docs.read_entries() if e.run_id == found[0].run_id]


LISTED = [
    ("equal", {}, "passed", "reconciliation of 5 rows: equal, Delta version 3"),
    ("repaired", {"different": 1, "repaired": 1}, "passed",
     "reconciliation of 5 rows: repaired: 1 different, Delta version 3"),
    ("different", {"missing": 2}, "failed",
     "reconciliation of 5 rows: different: 2 missing, Delta version 3"),
    ("not compared", {"reason": "locked", "version": None}, "warning",
     "reconciliation: not compared: locked"),
]  # fmt: skip


@pytest.mark.parametrize("status, details, verdict, told", LISTED, ids=[case[0] for case in LISTED])
def test_the_list_says_what_was_found(lake, status, details, verdict, told):
    """What was repaired is so; nothing is an expectation that wasn't met."""
    docs = docs_of(lake)
    (run,) = checked_runs(listed(docs, row("r", status=status, **details)))
    assert run.verdict == verdict
    assert f"<td>{told}</td>" in static_index("shop", [run])
    assert f'class="mark {verdict}"' in docs.read_page(run.entries[0].page).decode()

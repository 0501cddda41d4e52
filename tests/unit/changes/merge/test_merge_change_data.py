"""The change data feed of each merge is the difference between two versions of the target."""

from __future__ import annotations

import random
import shutil

import pytest
from deltalake import write_deltalake

from tests.oracles.change_feed import TYPE, changes_by_delta_rs, compare_change_feed
from tests.support.data.merges import held, merge_large, merge_small, rows, table, table_uri
from tests.support.seeds import rounds
from waldelta.changes.merge import file_merge as module
from waldelta.lake import delta_target, local_path
from waldelta.lake.commit_files import commit_files
from waldelta.lake.layout import CHANGE_DATA_FEED, CHANGE_FOLDER

pytestmark = pytest.mark.usefixtures("small_parts")

MERGES = {"small": merge_small, "large": merge_large}
A, B, C = (1, "a", "A"), (2, "b", "B"), (3, "c", "C")
INSERT, DELETE = ("I", None, 4, "d", "D"), ("D", 1, None, None, None)
UPDATE, EQUAL, MOVE = ("U", 2, 2, "b2", "B2"), ("U", 3, 3, "c", "C"), ("U", 3, 7, "c7", "C7")
# Changes, options of the merge, and how often each type of change is shown.
CASES = {
    "new rows": ([INSERT], {}, {"insert": 1}),
    "a deleted row": ([DELETE], {}, {"delete": 1}),
    "an updated row": ([UPDATE], {}, {"update": 1}),
    "an update to the same values": ([EQUAL], {}, {"update": 1}),
    "a row with a new key": ([MOVE], {}, {"update": 1}),
    "all of them": ([INSERT, DELETE, UPDATE, EQUAL], {}, {"insert": 1, "delete": 1, "update": 2}),
    "a change of no row": ([("D", 9, None, None, None)], {}, {}),
    "a truncate": ([], {"truncated": True}, {"delete": 3}),
    "a row after a truncate": ([INSERT], {"truncated": True}, {"insert": 1, "delete": 3}),
    "a row again after it": ([("I", None, *C)], {"truncated": True}, {"insert": 1, "delete": 3}),
}


def shown(job, version) -> dict[str, int]:
    feed = changes_by_delta_rs(table_uri(job), version, version)
    kinds = [row[TYPE].removesuffix("_preimage") for row in feed]
    return {k: kinds.count(k) for k in {*kinds} if k != "update_postimage"}


def create(job, *files) -> None:
    """The target with a change data feed, of so many files."""
    table(job).alter.set_table_properties({CHANGE_DATA_FEED: "true"})
    for held_rows in files:
        write_deltalake(table_uri(job), rows(*held_rows), mode="append")


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("case", CASES)
def test_a_merge_shows_the_net_changes(job, merge, case):
    changes, options, counts = CASES[case]
    create(job, [A, B], [C])
    before = table(job).version()
    done = MERGES[merge](job, changes, **options)
    assert done is not None
    assert (shown(job, table(job).version()), table(job).version()) == (counts, before + 1)
    replaced = [before + 1] if options else []
    assert compare_change_feed(table_uri(job), before, replaced) == []


def test_many_small_files_become_one_without_showing_their_rows(job, monkeypatch):
    monkeypatch.setattr(module, "_MOST_FILES", 2)
    create(job, [A, B], [C])
    merge_small(job, [INSERT])
    assert (len(table(job).file_uris()), shown(job, table(job).version())) == (1, {"insert": 1})
    files = table(job).file_uris()
    merge_small(job, [("D", 9, None, None, None)], batch=2)
    assert (table(job).file_uris(), shown(job, table(job).version())) == (files, {})


@pytest.mark.parametrize("merge", MERGES)
def test_a_target_without_a_feed_has_no_files_for_it(job, merge):
    write_deltalake(table_uri(job), rows(A, B), mode="append")
    MERGES[merge](job, [INSERT, UPDATE])
    assert not (local_path(table_uri(job)) / CHANGE_FOLDER).exists()


@pytest.mark.parametrize("merge", MERGES)
def test_a_partitioned_target_shows_rows_that_move(job, merge):
    """Files of changed rows are divided by partition, as Delta reads the values from the log."""
    shutil.rmtree(local_path(table_uri(job)))
    options = {"partition_by": ["it's.big"], "configuration": {CHANGE_DATA_FEED: "true"}}
    write_deltalake(table_uri(job), rows(A, B, C, (5, "e", None)), **options)
    moved, null = ("U", 2, 2, "b", "C"), ("U", 5, 5, "e", "a/b=ü")
    assert MERGES[merge](job, [moved, null, DELETE, INSERT]) is not None
    assert shown(job, 1) == {"update": 2, "delete": 1, "insert": 1}
    assert compare_change_feed(table_uri(job)) == []
    assert {key: big for key, (_, big) in held(job).items()} == {2: "C", 3: "C", 4: "D", 5: "a/b=ü"}


class Killed(BaseException):
    """Ends a run as a signal does."""


def killing(moment: str):
    """A commit during which the run is killed."""

    def commit(*given) -> None:
        if moment == "after":
            commit_files(*given)
        raise Killed

    return commit


def test_random_changes_are_shown_by_both_merges(job, monkeypatch):
    """Also those of runs that were killed before or after their commit, and began again."""
    rng = random.Random(46)
    create(job, [A, B], [C])
    begin = table(job).version()
    for batch in [number + 1 for number in rounds(48)]:
        keys = rng.sample(range(12), rng.randrange(1, 6))
        there = held(job)
        events = [
            ("I", None, key, f"v{batch}", "x")
            if key not in there
            else rng.choice([("U", key, key, f"v{batch}", "y"), ("D", key, None, None, None)])
            for key in keys
        ]
        merge = rng.choice([*MERGES])
        truncated = rng.random() < 0.1
        if truncated:
            events = [event for event in events if event[0] == "I"]
        if moment := rng.choice([None, "before", "after"]):
            with monkeypatch.context() as patch:
                patch.setattr(delta_target, "commit_files", killing(moment))
                with pytest.raises(Killed):
                    MERGES[merge](job, events, batch, truncated=truncated)
            merge = rng.choice([*MERGES])
        assert MERGES[merge](job, events, batch, truncated=truncated) is not None
        assert table(job).version() == begin + batch
    assert compare_change_feed(table_uri(job)) == []
    assert shown(job, table(job).version())

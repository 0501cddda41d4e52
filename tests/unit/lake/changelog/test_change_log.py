"""What the change log knows of batches without reading rows, and how it forgets them."""

import os
import time

import pytest
from deltalake import DeltaTable

from tests.support import pgoutput_encoder as enc
from tests.support.data.messages import plain, written
from waldelta.errors import SlotGap
from waldelta.lake import DeltaTarget, local_path
from waldelta.lake.changelog import Snapshot
from waldelta.lake.ledger.records import ConsumedBatch

ROWS = plain(7, enc.insert(16400, ["1", "x"]))
TRUNCATE, OTHERS = plain(8, enc.truncate([16399, 16400])), plain(8, enc.truncate([16401]))


@pytest.mark.parametrize(
    "after, upto, expected",
    [(0, 5, 2), (1, 2, 2), (2, 5, 4), (2, 3, None), (4, 5, None), (0, 0, None)],
)
def test_the_first_truncate(tmp_path, after, upto, expected):
    """However far back it is looked for, nothing else is read."""
    log = written(tmp_path, OTHERS + ROWS, TRUNCATE, ROWS + OTHERS, TRUNCATE, ROWS)
    assert log.first_truncate(after, upto, [16400]) == expected


# What slot moves say of batches 1 to 5; the log holds 1, 2, 4 and 5, of which 5 is empty.
HOLES = {
    "what had landed": ({1: 3, 2: 3, 4: 3}, 0, 5, None),
    "an empty batch": ({4: 3, 5: 0}, 0, 5, None),
    "a batch of which no move says how many messages it had": ({3: None}, 0, 5, None),
    "a batch that no move says anything of": ({2: 3, 4: 3}, 0, 5, None),
    "a batch is gone": ({2: 3, 3: 7}, 0, 5, ["batch 3 holds 0 messages, but 7 had landed"]),
    "messages are gone": ({1: 4, 3: 7}, 0, 5,
     ["batch 1 holds 3 messages, but 4 had landed", "batch 3 holds 0"]),
    "more than had landed": ({1: 2}, 0, 5, ["batch 1 holds 3 messages, but 2 had landed"]),
    "in front of the range": ({1: 4, 2: 3}, 1, 5, None),
    "behind the range": ({2: 3, 3: 7}, 0, 2, None),
    "many": (dict.fromkeys(range(1, 6), 9), 0, 5,
     ["batch 1 holds", "batch 3 holds", "and 2 more batches"]),
}  # fmt: skip


@pytest.mark.parametrize("case", HOLES)
def test_a_range_with_a_hole(tmp_path, case):
    """Told by the counts that slot moves have of it, from the files' statistics."""
    consumed, after, upto, expected = HOLES[case]
    log = written(tmp_path, ROWS, ROWS, ROWS, ROWS)
    DeltaTable(log.uri).delete("batch = 3")
    consumed = {batch: ConsumedBatch(batch * 100, messages) for batch, messages in consumed.items()}
    if expected is None:
        assert log.whole_sizes(consumed, after, upto) == log.sizes(after, upto)
        return
    with pytest.raises(SlotGap) as gap:
        log.whole_sizes(consumed, after, upto)
    assert all(text in str(gap.value) for text in expected), gap.value


def test_where_what_is_lost_was_committed(tmp_path):
    """Behind the batch before it; None when the log lacks all since this life of the slot began."""
    log = written(tmp_path, ROWS, ROWS)
    consumed = {batch: ConsumedBatch(batch * 100, 9 if batch > 1 else 3) for batch in (1, 2, 3)}
    with pytest.raises(SlotGap) as gap:
        log.whole_sizes(consumed, 0, 9)
    assert gap.value.lost == (100, 300)
    with pytest.raises(SlotGap) as gap:
        log.whole_sizes({2: consumed[2]}, 0, 9)
    assert gap.value.lost == (None, 200)


@pytest.mark.parametrize(
    ("snapshot", "after", "expected"),
    [
        ("7:7:", 0, 0),
        ("8:8:", 0, 1),
        ("9:12:9", 0, 1),
        ("10:12:11", 0, 2),
        ("20:20:", 0, 3),
        ("20:20:", 2, 3),
        ("8:8:", 2, 2),
    ],
)
def test_how_far_a_copy_has_all_that_landed(tmp_path, snapshot, after, expected):
    """Up to the first batch with a transaction that may have been running."""
    log = written(tmp_path, *(plain(xid, enc.insert(16400, ["1", "x"])) for xid in (7, 9, 12)))
    assert log.visible_upto(Snapshot.parse(snapshot), after) == expected


def test_batches_are_forgotten_while_another_lands(tmp_path, monkeypatch):
    """Both commits count; files of the last week stay, orphans and empty folders go."""
    log = written(tmp_path, ROWS, ROWS, ROWS)
    stale, open_log = log.place.open(), log.place.open
    folder = local_path(log.uri)
    old = time.time() - 8 * 24 * 3600
    for name, at in (("batch=2/killed.parquet", old), ("batch=4/landing.parquet", time.time())):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
        os.utime(folder / name, (at, at))
    for number in (0, 4):
        (folder / f"batch={number}").mkdir(exist_ok=True)
    rows = stale.dataset().to_table().drop_columns("batch").slice(0, 3)
    log.add(4, log.write(4, rows.to_batches(), rows.schema), "{}")
    with monkeypatch.context() as late:
        late.setattr(DeltaTarget, "open", lambda _: stale)
        log.prune(2, 168)
    assert log.sizes(0, 9) == {3: 3, 4: 3}
    expected = (4, 4)
    assert (log.last_batch(), open_log().version) == expected
    assert open_log().committed("waldelta:pruned") == 2
    left = sorted(str(path.relative_to(folder)) for path in folder.glob("batch=*/*"))
    assert [name for name in left if "part-" not in name] == ["batch=4/landing.parquet"]
    expected = ["batch=1", "batch=2", "batch=3", "batch=4", "batch=4"]
    assert [name.partition("/")[0] for name in left] == expected
    assert not (folder / "batch=0").exists()
    consumed = {batch: ConsumedBatch(batch * 100, 3) for batch in (1, 2, 3, 4)}
    assert log.whole_sizes(consumed, 0, 9) == {3: 3, 4: 3}

"""What apply decides without Spark: cuts worth publishing, and what may be merged."""

import logging
from types import SimpleNamespace

import pytest

import waldelta.changes.merge.merge as merge_module
from tests.support.data.merges import plan
from waldelta.changes.merge.statements import CommitTag
from waldelta.changes.stage.stage import Staged, tasks_for
from waldelta.errors import LockHeld
from waldelta.lake.changelog.row_messages import Volume
from waldelta.lake.ledger import BatchCut, TableState, TargetCut, now
from waldelta.stages.apply._apply_batches import plan_apply_batches, reported_batches
from waldelta.stages.apply.apply_targets import is_published
from waldelta.stages.apply.outcome import Applied


def cut(batch: int, **generations: int) -> BatchCut:
    return BatchCut(
        now(), "r", batch, 0, None,
        [TargetCut(name, number, 0) for name, number in generations.items()],
    )  # fmt: skip


@pytest.mark.parametrize(
    "ours, newest, told",
    [
        (cut(7, a=1, b=1), cut(7, a=1, b=1), True),
        (cut(7, a=1, b=2), cut(7, a=1, b=1), False),  # one of them was copied again
        (cut(8, a=1, b=1), cut(7, a=1, b=1), False),
        (cut(7, a=1, b=1), cut(8, a=1, b=1), True),  # a run that woke up behind another
        (cut(7, a=1, b=1), cut(8, a=1, b=2), True),
        (cut(1, a=2, b=2), cut(900, a=1, b=1), False),  # another life of the slot
        (cut(1, a=1), cut(900, b=1), False),
    ],
)
def test_a_cut_is_published_once_and_never_behind_a_later_one(ours, newest, told):
    """Readers take the newest row of the ledger: it must not go back."""
    assert is_published(ours, newest) == told


def test_spark_merges_only_what_this_run_may_still_write(monkeypatch):
    """Another run that committed meanwhile may have copied the target again."""
    merged = []
    monkeypatch.setattr(merge_module, "merge_files", lambda *_: None)
    monkeypatch.setattr(merge_module, "_merge", lambda *_: merged.append(1))

    def taken() -> None:
        raise LockHeld("by another run")

    fence = SimpleNamespace(verify=taken)
    job = SimpleNamespace(pipeline=SimpleNamespace(target=SimpleNamespace(metadata_columns=True)))
    changes = Staged("folder", {})
    with pytest.raises(LockHeld):
        merge_module._merge_staged(None, job, changes, plan(), CommitTag("app", 1), fence)
    assert merged == []


def test_what_has_no_name_fails_one_table(caplog):
    """A defect in one table's way is named and may go away; whatever comes after it is done."""
    job = SimpleNamespace(
        pipeline=SimpleNamespace(target=SimpleNamespace(policy_of=lambda _: "evolve"))
    )
    applied, state = Applied(job), TableState(now(), "r", "public.t", 1, "synced")
    with applied.isolated(state):
        raise KeyError("c1")
    failure = applied.failures["public.t"]
    assert (str(failure), failure.retryable) == ("public.t: KeyError: …", True)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


SIZES = {1: 40, 2: 50, 3: 20, 4: 500, 6: 1}


@pytest.mark.parametrize(
    ("weights", "ends"),
    [
        ({}, [2, 3, 4, 6]),
        ({1: 3, 2: 3, 3: 3, 4: 3, 6: 3}, [2, 3, 4, 6]),
        ({1: 5, 2: 6, 3: 1, 4: 90, 6: 2}, [1, 3, 4, 6]),
    ],
    ids=["messages alone", "light ones", "heavy ones"],
)
def test_a_step_takes_no_more_than_the_most_of_anything(weights, ends):
    """A batch that is more by itself is a step of its own."""
    assert plan_apply_batches((SIZES, 100), (weights, 10)) == ends


@pytest.mark.parametrize(
    ("rows", "bytes_", "tasks"),
    [
        (0, 0, 1),
        (500_000, 128 << 20, 1),
        (500_001, 0, 2),
        (20_000, 20 << 30, 160),
        (2_000_000, 300 << 20, 4),
    ],
)
def test_tasks_divide_rows_and_bytes(rows, bytes_, tasks):
    """Few large rows are as many tasks as many small ones."""
    assert tasks_for(Volume(rows, moves=False, bytes=bytes_)) == tasks


def test_a_step_ends_with_what_is_left(caplog):
    """One line after each step but the last; a single step says nothing."""
    caplog.set_level(logging.INFO)
    assert list(reported_batches({1: 40}, [1])) == [1]
    assert caplog.messages == []
    assert list(reported_batches({1: 40, 2: 50, 3: 20, 4: 500}, [2, 3, 4])) == [2, 3, 4]
    assert [message.partition(", about")[0] for message in caplog.messages] == [
        "apply batch 1 of 3 done, up to batch 2: 520 messages left",
        "apply batch 2 of 3 done, up to batch 3: 500 messages left",
    ]

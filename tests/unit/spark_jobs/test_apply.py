"""Apply's decisions that need no Spark: which cuts are worth publishing, and what may still be merged."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pytest

import spark_jobs.apply as apply_module
from spark_jobs.apply import _is_told
from spark_jobs.merge import CommitTag
from spark_jobs.stage import Staged
from waldelta.errors import LockHeld
from waldelta.ledger import BatchCut, TargetCut, now


def cut(batch: int, **generations: int) -> BatchCut:
    return BatchCut(now(), "r", batch, 0, None, [TargetCut(name, number, 0) for name, number in generations.items()])


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
    assert _is_told(ours, newest) == told


def test_spark_merges_only_what_this_run_may_still_write(monkeypatch):
    """Whoever committed while the target was merged here may have taken it over, and copied it again."""
    merged = []
    monkeypatch.setattr(apply_module, "merge_here", lambda *_: None)
    monkeypatch.setattr(apply_module, "_merge", lambda *_: merged.append(1))

    def taken() -> None:
        raise LockHeld("by another run")

    changes = Staged("folder", "source", {}, net=pa.table({"action": ["insert"]}))
    with pytest.raises(LockHeld):
        apply_module._merge_staged(SimpleNamespace(job=None), changes, None, CommitTag("app", 1), taken)
    assert merged == []

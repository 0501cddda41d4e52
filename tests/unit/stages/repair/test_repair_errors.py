"""What a repair and a reconciliation report of a table that fails."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from psycopg.errors import DiskFull

from waldelta.errors import ApplyError, LateWriter, PeekTimeout, TargetNotWritable
from waldelta.jobs.reconcile import ReconcileRequest, ReconciliationProgress
from waldelta.lake import Lake
from waldelta.lake.ledger import TableState, now
from waldelta.lake.ledger.check_records import COMPARISON_FAILED
from waldelta.pipeline import RunResult
from waldelta.stages.repair import repair as stage


@pytest.mark.parametrize(
    ("err", "kind"),
    [
        (LateWriter("public.t: as it is"), LateWriter),
        (RuntimeError("waldelta.errors.PeekTimeout: a task's"), PeekTimeout),
        (KeyError("a defect"), ApplyError),
    ],
    ids=["named", "named by a task", "a defect"],
)
def test_a_failed_comparison_is_reported_by_name_and_tried_again(err, kind):
    """As a failed apply is; the reconciliation's record has the same name."""
    job = SimpleNamespace(run_id="run")
    work = ReconciliationProgress(
        None, job, ReconcileRequest(by="me"), RunResult("reconcile", "run")
    )
    work.fail("public.t", err)
    failure, row = work.failures["public.t"], work.results["public.t"]
    assert (type(failure), failure.retryable) == (kind, True)
    assert "public.t" in str(failure)
    assert row.status == COMPARISON_FAILED
    assert row.reason.startswith(f"{kind.__name__}: ")


@pytest.mark.parametrize(
    ("err", "kind", "retryable", "remedy"),
    [
        (RuntimeError("[DELTA_CONCURRENT_APPEND] a conflict"), LateWriter, True, "run again"),
        (RuntimeError("No space left on device"), TargetNotWritable, False, "free space there"),
        (OSError(27, "File too large"), TargetNotWritable, False, "ulimit -f"),
        (OSError(122, "Disk quota exceeded"), TargetNotWritable, False, "raise the quota"),
        (RuntimeError("Input/output error"), TargetNotWritable, False, "the kernel's log"),
        (OSError("Permission denied (os error 13)"), TargetNotWritable, False, "write permission"),
        (RuntimeError("waldelta.errors.PeekTimeout: a task's"), PeekTimeout, True, "a task's"),
        (RuntimeError("a defect"), ApplyError, False, "public.t: a defect"),
        (DiskFull("No space left on device"), ApplyError, True, "public.t: DiskFull: No space"),
    ],
)
def test_a_failed_write_of_a_repair_has_its_remedy(
    monkeypatch, tmp_path, err, kind, retryable, remedy
):
    """The same as in a replay or an apply. A full disk of the source isn't the target's."""

    def write(*_):
        raise err

    monkeypatch.setattr(stage, "obstacle", lambda _: None)
    monkeypatch.setattr(stage, "target_lock", lambda *_: nullcontext())
    monkeypatch.setattr(stage, "check_same_copy", lambda *_: None)
    monkeypatch.setattr(stage, "check_target", write)
    drifted = SimpleNamespace(state=TableState(now(), "r", "public.t", 1, "synced"))
    job = SimpleNamespace(lake=Lake(tmp_path.as_uri()))
    again = stage.Again("reason", "me", frozenset())
    with pytest.raises(kind, match=remedy) as failed:
        stage.repair(None, job, drifted, again)
    assert type(failed.value) is kind
    assert failed.value.retryable is retryable

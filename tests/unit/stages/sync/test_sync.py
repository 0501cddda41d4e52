"""Which tables a sync leaves, as another run has copied them, and what it reports of failures."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.data.suites import ID, state
from waldelta.errors import ApplyError, LateWriter, PeekTimeout, SparkUnreachable
from waldelta.lake.ledger import COPYING, SYNCED
from waldelta.postgres import TableId
from waldelta.stages.sync import sync as stage
from waldelta.stages.sync.sync import CopyRequest

LIFE = "2026-01-01T00:00:00"
OLD = replace(state([ID]), incarnation=LIFE, status=SYNCED)
COPIED = replace(OLD, generation=OLD.generation + 1)
CASES = [
    ("never copied", None, None, False, False),
    ("as it was chosen", OLD, OLD, False, False),
    ("copied since", OLD, COPIED, False, True),
    ("copied first", None, OLD, False, True),
    ("being copied", OLD, replace(COPIED, status=COPYING), False, False),
    ("a copy ended that was under way", replace(COPIED, status=COPYING), COPIED, False, True),
    ("it ended in an earlier life of the slot", replace(COPIED, status=COPYING),
     replace(COPIED, incarnation="earlier"), False, False),
    ("somebody named the table", OLD, COPIED, True, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "last", "insists", "done"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_another_run_has_done(known, last, insists, done):
    """Asked under the table's lock, of the ledger's row then; an earlier life's copy isn't one."""
    assert (
        CopyRequest(TableId("public", "t"), None, None, known, insists).is_done(last, LIFE) is done
    )


class Py4JNetworkError(Exception):
    """Has the name of the error that Py4J raises once the JVM is gone."""


@pytest.mark.parametrize(
    ("err", "kind"),
    [
        (LateWriter("public.t: as it is"), LateWriter),
        (RuntimeError("waldelta.errors.PeekTimeout: public.t: a task's"), PeekTimeout),
        (Py4JNetworkError("Answer from Java side is empty"), SparkUnreachable),
        (KeyError("a defect"), ApplyError),
    ],
    ids=["named", "named by a task", "a dead JVM", "a defect"],
)
def test_a_failed_copy_is_reported_by_name_and_tried_again(monkeypatch, err, kind):
    """As a failed apply is, whatever the cause; the other tables are copied."""

    def copy(_spark, _job, order, *_):
        if order.target.id.name == "t":
            raise err
        return str(order.target.id)

    monkeypatch.setattr(stage, "_sync_locked", copy)
    table = SimpleNamespace(size_bytes=0, key_columns=())
    mode = SimpleNamespace(keeps_rows=False)
    pipeline = SimpleNamespace(target=SimpleNamespace(mode_of=lambda _: mode))
    job = SimpleNamespace(pipeline=pipeline, source=SimpleNamespace(conninfo=""))
    orders = [
        CopyRequest(
            SimpleNamespace(id=TableId("public", name), table=table), None, None, None, False
        )
        for name in ("t", "other")
    ]
    results: list = []
    failures = stage._copy_each(None, job, orders, None, results)
    assert results == ["public.other"]
    failure = failures["public.t"]
    assert (type(failure), failure.retryable) == (kind, True)
    assert "public.t" in str(failure) or kind is SparkUnreachable

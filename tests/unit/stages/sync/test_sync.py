"""Which tables a sync leaves as they are, since another run has copied them meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.stages.check.suite.test_plan import ID, state
from waldelta.lake.ledger.records import COPYING, SYNCED
from waldelta.postgres import TableId
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
    (
        "it ended in an earlier life of the slot",
        replace(COPIED, status=COPYING),
        replace(COPIED, incarnation="earlier"),
        False,
        False,
    ),
    ("somebody named the table", OLD, COPIED, True, False),
]


@pytest.mark.parametrize(
    ("known", "last", "insists", "done"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_another_run_has_done(known, last, insists, done):
    """Asked under the table's lock, of the ledger's row then; a copy of an earlier life lacks what
    the slot doesn't know.
    """
    assert (
        CopyRequest(TableId("public", "t"), None, None, known, insists).is_done(last, LIFE) is done
    )

"""A target whose Delta log can't be read is that target's trouble alone."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.pipelines import pipeline_file
from waldelta.errors import StateError
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import SlotMove, now
from waldelta.pipeline import Job, SlotIdentity
from waldelta.pipeline.targets import Watermarks

LIFE = SlotMove(now(), "r", "created", "s", "1", 1, "0/1", 1)
STATE = TableState(now(), "r", "public.t", 1, "synced")


def _gone(log: Path) -> None:
    for file in [*log.iterdir()]:
        file.unlink()


def _garbled(log: Path) -> None:
    (log / f"{1:020}.json").write_text('{"add": {"pa')


def _not_text(log: Path) -> None:
    (log / f"{1:020}.json").write_bytes(bytes(range(256)))


def _missing(log: Path) -> None:
    (log / f"{0:020}.json").unlink()


def _of_the_future(log: Path) -> None:
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["nobody's"],
        "writerFeatures": ["nobody's"],
    }
    (log / f"{2:020}.json").write_text(json.dumps({"protocol": protocol}) + "\n")


@pytest.mark.parametrize("damage", [_gone, _garbled, _not_text, _missing, _of_the_future])
def test_a_damaged_target_is_named(lake, damage):
    """Looks would fail for all tables, and nothing leave the slot, until somebody had mended this
    one.
    """
    job = Job(pipeline_file(lake, "s"), "", "run")
    job.ledger.append(LIFE)
    uri = job.lake.target(STATE.table_name).uri
    for value in (1, 2):
        write_deltalake(uri, pa.table({"a": [value]}), mode="append")
    watermarks = Watermarks(job, SlotIdentity("s", "1", 1, "0/1"))
    assert watermarks.of(STATE) == 0
    damage(Path(uri.removeprefix("file://")) / "_delta_log")
    with pytest.raises(
        StateError, match=r"public\.t: its target file:.* run the initial sync for it again"
    ):
        watermarks.of(STATE)

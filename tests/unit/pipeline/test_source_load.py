"""The source's load: parts of a run add up, and are said in one line."""

import pytest

from waldelta.config import Source
from waldelta.config.source import Options
from waldelta.pipeline import RunResult, SourceLoad
from waldelta.pipeline.source import moves, peeks


def test_parts_add_up():
    """Calls and bytes are summed, of snapshots the longest counts."""
    load = SourceLoad(2, 100, 50, 1, 2, 1.5, 3.0, 10, 1, 1.25, 7)
    load.add(SourceLoad(1, 10, 5, 0, 1, 0.5, 1.0, 20, 2, 0.25, 3))
    assert load == SourceLoad(3, 110, 55, 1, 3, 2.0, 3.0, 20, 3, 1.5, 10)


SAID = {
    "nothing asked": (SourceLoad(), ""),
    "a slot read": (
        SourceLoad(3, 48 << 20, 2048, 0, 0, 2.25, server_seconds=1.9, database_temp_bytes=3 << 20),
        (
            "48 MB of WAL read in 3 calls (2.2 s, the server 1.9 s), 2 kB decoded, 0 bytes spilled,"
            " at most 3 MB of temporary files"
        ),
    ),
    "a slow server": (SourceLoad(timeouts=2, server_seconds=1200),
     "2 calls ended by the statement timeout"),
    "a copy": (SourceLoad(snapshot_seconds=60, xmin_age=12345),
     "a snapshot held for 60.0 s, 12,345 transactions"),
}  # fmt: skip


@pytest.mark.parametrize("load, said", SAID.values(), ids=SAID)
def test_the_line(load, said):
    assert load.describe() == said


def test_the_result_keeps_it():
    result = RunResult("consume", "r")
    result.source.add(SourceLoad(slot_calls=2, wal_read_bytes=7))
    assert RunResult.from_json(result.to_json()).source == result.source


PASSES = {
    "plain": ({}, 1, 1),
    "verified by a peek": ({"acknowledge": "peek"}, 1, 2),
    "unverified": ({"acknowledge": "advance"}, 1, 1),
    "streamed messages": ({"streaming": "on", "messages": True}, 2, 1),
    "messages": ({"messages": True}, 1, 1),
}


@pytest.mark.parametrize("options, landing, moving", PASSES.values(), ids=PASSES)
def test_how_often_the_wal_of_a_bite_is_read(options, landing, moving):
    source = Source.model_construct(options=Options(**options))
    assert (peeks(source), moves(source)) == (landing, moving)

"""The planned switchover of docs/how-to/failover.md: its commands lose nothing."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from tests.support.servers.standby import (
    SCHEMA,
    ask,
    configure,
    follow,
    held,
    insert,
    keep_slot,
    pipeline_on,
    servers,
    there,
)
from waldelta.jobs import Pipeline

pytestmark = [pytest.mark.pg, pytest.mark.spark]

PAGE = (Path(__file__).parents[3] / "docs/how-to/failover.md").read_text(encoding="utf-8")
KEPT = re.search(r"```sql\n(select slot_name, synced, .*?;)", PAGE, re.DOTALL)[1].replace(
    "flights_cdc", "flights"
)
SECTION = re.search(r"## Planned switchover\n(.*?)\n## ", PAGE, re.DOTALL)[1]


def steps() -> list[tuple[str, list[str]]]:
    """The section's blocks in order: their language, and their statements or commands."""
    found = re.findall(r"```(\w+)\n(.*?)```", SECTION, re.DOTALL)
    blocks = [(kind, textwrap.dedent(text)) for kind, text in found]
    split = {"sql": ";", "sh": "\n"}
    return [
        (
            kind,
            [
                part.strip().replace("flights_cdc", "flights")
                for part in text.split(split[kind])
                if part.strip()
            ],
        )
        for kind, text in blocks
    ]


def execute(server, command: str) -> None:
    """A command of the page's on the old primary's machine."""
    program, *arguments = shlex.split(command)
    if program == "touch":
        (path,) = arguments
        (server.data / path.removeprefix("OLD/")).touch()
        return
    assert program == "pg_ctl"
    if arguments == ["start", "-D", "OLD"]:
        server.start()  # with the port and the log of a test
        return
    server._run(
        program,
        *(str(server.data) if argument == "OLD" else argument for argument in arguments),
        "-w",
    )


@pytest.mark.soak("two switches between two servers")
def test_the_page(runner, postgres, lake, lead_to):
    """There, and back again, while nobody notices but by the connection."""
    if postgres.version < 17:
        pytest.skip("PostgreSQL keeps slots on standbys from 17 on")
    pipeline = pipeline_on(lake, failover=True)
    with servers(postgres.version) as (old, new):
        ask(old.start(), SCHEMA)
        lead_to(old)
        pipeline.setup()
        ask(
            old, "alter system set synchronized_standby_slots = 'standby'"
        )  # comes along to the standby
        follow(new, old)
        ask(old, "select pg_reload_conf()")
        pipeline.sync(runner)
        insert(old, 2, "read before")
        pipeline.consume(runner, "first")
        keep_slot(new, old, pipeline)
        insert(old, 3, "read, and the kept slot lags behind")
        pipeline.consume(runner, "second")
        insert(old, 4, "not read yet")

        stop, promote, consume, keep_wal, rejoin, keep = steps()
        ((_, synced, temporary, why, _),) = ask(new, KEPT)
        assert (synced, temporary, why) == (True, False, None)
        for command in stop[1]:
            execute(old, command)
        for statement in promote[1]:
            ask(new, statement)
        lead_to(new)
        insert(new, 5, "after")
        assert consume[1] == ["waldelta consume FILE"]  # in this session instead of one of its own
        assert pipeline.consume(runner, "third").landed.changes == 4
        assert held(lake) == there(new)
        (promoted,) = [
            move for move in pipeline.job().ledger.slot_moves() if move.event == "promoted"
        ]
        assert promoted.timeline == 2

        for statement in keep_wal[1]:
            ask(new, statement)
        old_again(old, new)
        for command in rejoin[1]:
            execute(old, command)
        drop, synchronize = keep[1]
        ask(old, drop)
        insert(new, 6, "with a standby again")
        pipeline.consume(runner, "fourth")
        assert kept_again(old, new, pipeline, synchronize)
        assert held(lake) == there(new)


def old_again(old, new) -> None:
    """The settings of a standby, which the page names."""
    conninfo = new.conninfo().replace("'", "")
    configure(
        old, primary_conninfo=conninfo, primary_slot_name="standby", hot_standby_feedback="on"
    )


def kept_again(old, new, pipeline: Pipeline, synchronize: str) -> bool:
    """Waits until the standby keeps the slot; the statement may come too early."""
    keep_slot(old, new, pipeline)
    ask(old, synchronize)
    ((_, synced, temporary, why, _),) = ask(old, KEPT)
    return (synced, temporary, why) == (True, False, None)

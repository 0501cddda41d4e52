"""docs/how-to/emergency.md: its statements free the WAL, and the pipeline comes back."""

import re
from pathlib import Path

import pytest

from tests.oracles.target_rows import read_target
from tests.support.pipelines import copied_pipeline, new_pipeline
from tests.support.servers.standby import (
    SCHEMA,
    ask,
    catch_up,
    follow,
    held,
    insert,
    pipeline_on,
    servers,
    there,
)
from waldelta.errors import SlotMissing
from waldelta.pipeline.run_result import RunFailed

PAGE = (Path(__file__).parents[3] / "docs/how-to/emergency.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())


def statements(slot):
    """The page's SQL, its example slot being this one."""
    blocks = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    return [
        s.strip()
        for block in blocks
        for s in block.replace("flights_cdc", slot).split(";")
        if s.strip()
    ]


OLDEST_WAL = "select min(name) from pg_ls_waldir() where name ~ '^[0-9A-F]{24}$'"


def oldest_wal(database):
    ((name,),) = database.execute(OLDEST_WAL)
    return name


@pytest.mark.nightly("every command of a page of the docs")
def test_the_page(runner, database, lake):
    slot = f"s_{database.name}"
    database.execute("create table t(id int primary key); insert into t values (1)")
    pipeline = copied_pipeline(runner, new_pipeline(database, lake))
    for number in range(2, 8):
        database.execute(f"insert into t values ({number})")
        database.execute("select pg_switch_wal()")
    look, blocked, drop, checkpoint = statements(slot)
    held = {row[0]: row for row in database.execute(look)}
    assert held[slot][1:3] == (False, "reserved")
    database.execute("begin; insert into t values (0)")
    other = database.connect(autocommit=True)
    assert [row[0] for row in other.execute(blocked)] == [database.connection.info.backend_pid]
    other.close()
    database.execute("rollback")
    before = oldest_wal(database)
    database.execute(drop)
    database.execute(checkpoint)
    assert oldest_wal(database) > before
    assert slot not in {row[0] for row in database.execute(look)}
    with pytest.raises(RunFailed) as caught:
        pipeline.consume(runner)
    assert isinstance(caught.value.__cause__, SlotMissing)
    (shell,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in shell.splitlines():
        command, verb, named = re.fullmatch(r"(waldelta) (\w+) (FILE)", line).groups()
        assert (command, named) == ("waldelta", "FILE")
        assert verb == "resync"  # in this session instead of one of its own
        assert pipeline.resync(runner).tables["public.t"].inserted == 6
    assert len(read_target(pipeline.target_path("public.t"))) == 7
    database.execute("insert into t values (8)")
    pipeline.consume(runner)
    assert len(read_target(pipeline.target_path("public.t"))) == 8


@pytest.mark.soak("the same page on a standby")
def test_the_page_on_a_standby(runner, postgres, lake, lead_to, monkeypatch):
    """With source.read_from the same statements free the standby's disk."""
    replaced = re.search(r"run this there, with `(\w+)\(\)` in place of `(\w+)\(\)`", FLAT)
    with servers(max(postgres.version, 16)) as (primary, standby):
        ask(
            primary.start(),
            f"{SCHEMA}; reset role; grant execute on function pg_log_standby_snapshot() to app",
        )
        follow(standby, primary)
        lead_to(primary)
        monkeypatch.setenv("AIRFLOW_CONN_TEST_STANDBY", standby.uri(user="app", password="p"))
        pipeline = copied_pipeline(runner, pipeline_on(lake, read_from="test_standby"))
        for number in range(2, 8):
            insert(primary, number, "not read")
            ask(primary, "select pg_switch_wal()")
        catch_up(standby, primary)
        look, blocked, drop, checkpoint = (
            s.replace(replaced[2], replaced[1]) for s in statements("flights")
        )
        held_back = {row[0]: row for row in ask(standby, look)}
        assert held_back["flights"][1:3] == (False, "reserved")
        assert ask(primary, blocked) == []
        before = ask(standby, OLDEST_WAL)
        ask(standby, drop)
        assert "`checkpoint` first on the primary, then there" in FLAT
        ask(primary, checkpoint)
        catch_up(standby, primary)
        ask(standby, checkpoint)
        assert ask(standby, OLDEST_WAL) > before
        with pytest.raises(RunFailed, match="does not exist"):
            pipeline.consume(runner)
        pipeline.resync(runner)
        insert(primary, 8, "after")
        catch_up(standby, primary)
        pipeline.consume(runner)
        assert held(lake) == there(primary)

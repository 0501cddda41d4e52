"""docs/how-to/failover.md's runbooks for a restore and a major upgrade end exact."""

import shutil
import subprocess

import pytest

from tests.support.servers.standby import (
    SCHEMA,
    accepted_resync,
    ask,
    configure,
    held,
    insert,
    pipeline_on,
    servers,
    there,
)
from tests.support.waiting import wait_until
from waldelta.errors import PreflightFailed, SlotMissing, SourceChanged
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.land.idle_check import check_idle

pytestmark = [pytest.mark.pg, pytest.mark.soak("the steps of whole runbooks")]


def mended(runner, pipeline, server, lake, number: int) -> None:
    """The runbook's steps, and a run after them."""
    with pytest.raises(PreflightFailed, match="run resync"):
        pipeline.setup()
    if ask(
        server, "select 1 from pg_replication_slots"
    ):  # made by pg_upgrade, as far as anybody can tell
        with pytest.raises(RunFailed, match="this pipeline did not create it"):
            accepted_resync(runner, pipeline)
        ask(server, "select pg_drop_replication_slot(slot_name) from pg_replication_slots")
    accepted_resync(runner, pipeline)
    assert pipeline.status()["gaps"] == []
    assert held(lake) == there(server)
    insert(server, number, "after the copy")
    pipeline.consume(runner, "last")
    assert held(lake) == there(server)


def test_restore(runner, postgres, lake, lead_to):
    """A base backup, rolled forward to a restore point before what the lake has seen last."""
    pipeline = pipeline_on(lake)
    with servers(postgres.version) as (server, restored):
        ask(server.start(), SCHEMA)
        lead_to(server)
        pipeline.setup()
        pipeline.sync(runner)
        restored._make_readable()
        shutil.copy(server.folder / "password", restored.folder / "password")
        restored._run(
            "pg_basebackup", "-d", server.conninfo(), "-D", str(restored.data), "-c", "fast"
        )
        insert(server, 2, "kept")
        ask(server, "select pg_create_restore_point('noon')")
        insert(server, 3, "lost")
        pipeline.consume(runner, "first")
        ask(server, "select pg_switch_wal()")
        server.stop()

        configure(
            restored,
            restore_command=f"cp {server.data}/pg_wal/%f %p",
            recovery_target_name="noon",
            recovery_target_action="promote",
        )
        (restored.data / "recovery.signal").touch()
        shutil.chown(
            restored.data / "recovery.signal", restored.data.owner(), restored.data.group()
        )
        restored.start()
        wait_until(lambda: ask(restored, "select pg_is_in_recovery()") == [(False,)])
        lead_to(restored)
        insert(restored, 3, "instead")
        for verb in (
            lambda: check_idle(pipeline.job()),
            lambda: pipeline.consume(runner, "second"),
        ):
            with pytest.raises((SlotMissing, RunFailed), match="does not exist"):
                verb()
        mended(runner, pipeline, restored, lake, 4)


@pytest.mark.parametrize("version", [16, 18], ids=["slots lost", "slots kept"])
def test_major_upgrade(runner, lake, lead_to, version):
    """pg_upgrade drops logical slots before 17; the system identifier is new either way."""
    pipeline = pipeline_on(lake)
    with servers(version, 1) as (old,), servers(18, 1) as (new,):
        ask(old.start(), SCHEMA)
        lead_to(old)
        pipeline.setup()
        pipeline.sync(runner)
        insert(old, 2, "before")
        pipeline.consume(runner, "first")
        assert not check_idle(pipeline.job()).has_work
        assert held(lake) == there(old)
        old.stop()
        upgrade(old, new)
        lead_to(new.start())
        insert(new, 3, "after")
        for verb in (
            lambda: check_idle(pipeline.job()),
            lambda: pipeline.consume(runner, "second"),
        ):
            with pytest.raises((SourceChanged, RunFailed), match="now leads to system"):
                verb()
        mended(runner, pipeline, new, lake, 4)


def upgrade(old, new) -> None:
    """Run pg_upgrade."""
    new.folder.mkdir(parents=True, exist_ok=True)
    new._make_readable()
    new._initdb()
    if old.version < 18:  # whose initdb makes no checksums by default
        new._run("pg_checksums", "--disable", "-D", str(new.data))
    owner = new.data.owner()
    subprocess.run(
        [str(new.bin / "pg_upgrade"),
         *f"-U postgres -b {old.bin} -B {new.bin} -d {old.data} -D {new.data}".split(),
         "--no-sync"], cwd=new.folder, user=owner, group=owner, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    shutil.copy(old.folder / "password", new.folder / "password")

"""Slots that no pipeline file names: listed by what made them, dropped only by name."""

import pytest
import yaml

from waldelta.cli.command_line import main
from waldelta.errors import ConfigError, LockHeld
from waldelta.pipeline.advisory_locks import advisory_lock, slot_lock_name
from waldelta.postgres import connect
from waldelta.stages.setup.slots_without_pipeline import (
    drop_slots_without_pipeline,
    find_slots_without_pipeline,
)


@pytest.fixture
def folder(database, tmp_path, lake):
    """Three pipelines of one source, set up; the file of one is gone since."""
    database.execute("create table t(id int primary key)")
    for name in ("kept", "gone", "other"):
        source = {
            "conn_id": "test_source",
            "slot": f"{name}_{database.name}",
            "publications": [{"name": f"{name}_pub", "tables": [{"name": "public.t"}]}],
        }
        document = {"pipeline": name, "source": source, "target": {"root": f"{lake}/{name}"}}
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(document))
        assert main(["setup", str(tmp_path / f"{name}.yml")]) == 0
    (tmp_path / "gone.yml").unlink()
    database.execute(
        "select pg_create_logical_replication_slot(%s, 'pgoutput')", (f"nobody_{database.name}",)
    )
    database.execute(
        "select pg_create_logical_replication_slot(%s, 'pgoutput')",
        (f"kept_{database.name}_mismatch",),
    )
    return tmp_path


def slots(database):
    rows = database.execute(
        "select slot_name::text from pg_replication_slots where database = current_database() order"
        " by 1"
    )
    return [
        name.removesuffix(database.name).rstrip("_")
        for (name,) in rows
        if not name.endswith("_mismatch")
    ]


def test_from_the_command_line(database, folder, capsys):
    """Listing changes nothing; only a named slot of waldelta's without a file is dropped."""
    file, gone, nobody = (
        str(folder / "kept.yml"),
        f"gone_{database.name}",
        f"nobody_{database.name}",
    )
    capsys.readouterr()
    assert main(["teardown", file, "--orphans"]) == 0
    lines = dict(zip(("gone", "nobody"), capsys.readouterr().out.splitlines(), strict=True))
    assert lines["gone"].startswith(f"slot {gone} keeps ")
    assert (
        f"made by pipeline 'gone', whose file isn't here; --drop {gone} drops it and publication"
        " gone_pub" in lines["gone"]
    )
    assert f"ask before you run select pg_drop_replication_slot('{nobody}')" in lines["nobody"]
    assert slots(database) == ["gone", "kept", "nobody", "other"]

    for refused in (nobody, f"other_{database.name}", "no_such_slot"):
        assert main(["teardown", file, "--drop", f"{gone},{refused}"]) == 1
    (folder / "broken.yml").write_text("pipeline: [")
    assert main(["teardown", file, "--drop", gone]) == 1  # whose slots that file names isn't known
    assert slots(database) == ["gone", "kept", "nobody", "other"]

    (folder / "broken.yml").unlink()
    capsys.readouterr()
    assert main(["teardown", file, "--drop", gone]) == 0
    assert capsys.readouterr().out.splitlines() == [f"slot {gone}", "publication gone_pub"]
    assert slots(database) == ["kept", "nobody", "other"]
    assert database.execute("select pubname::text from pg_publication order by 1") == [
        ("kept_pub",),
        ("other_pub",),
    ]


def test_a_slot_at_work_stays(database, folder):
    """A deployment elsewhere may have the file: while it runs, its lock says so."""
    gone = f"gone_{database.name}"
    named = [f"kept_{database.name}", f"other_{database.name}"]
    with connect(database.conninfo, "test") as connection:
        orphans = find_slots_without_pipeline(connection, named)
        with (
            advisory_lock(database.conninfo, slot_lock_name(gone), "test"),
            pytest.raises(LockHeld),
        ):
            drop_slots_without_pipeline(connection, database.conninfo, orphans, [gone])
        with pytest.raises(ConfigError, match="wasn't made by waldelta"):
            drop_slots_without_pipeline(
                connection, database.conninfo, orphans, [f"nobody_{database.name}"]
            )
    assert "gone" in slots(database)
    assert database.execute("select count(*) from pg_publication") == [(3,)]

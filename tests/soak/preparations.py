"""What is done before a run, so that it comes by a step of the fault matrix."""

import pyarrow as pa
import yaml

from tests.oracles.random_workload import BIG
from tests.soak.scene import COPIES, KEYED, PLAIN, Scene, kill_driver
from tests.support.fixtures.postgres import new_postgres
from tests.support.servers.standby import SETTINGS, ask, catch_up, follow, keep_slot, promote
from waldelta.jobs import Pipeline
from waldelta.lake import Lake, staging_folder, write_parquet
from waldelta.lake.ledger import now


def changes(scene: Scene) -> None:
    """Random transactions."""
    scene.write()


def many_changes(scene: Scene) -> None:
    """Random transactions of several steps, of all tables."""
    scene.focus()
    scene.write(20)


def columns(scene: Scene) -> None:
    """Columns that come with a value, go, or are renamed."""
    scene.alter(*(["drop", "rename"] if scene.is_wide() else ["add default"]))


def rewritten(scene: Scene) -> None:
    """An ALTER that gives rows other values, of which the stream says nothing."""
    scene.alter("rewrite" if scene.is_wide() else "add volatile")


def copy_killed(scene: Scene) -> None:
    """A new copy that was killed when it had a part, and changes since."""
    rewritten(scene)
    process = scene.start("consume")
    scene.listener.arm("sync.staged", lambda _: kill_driver(scene, process.pid))
    scene.release(process)
    process.wait()
    scene.settle()
    scene.write()


def refiltered(scene: Scene) -> None:
    """Another row filter."""
    scene.refilter()


def renamed(scene: Scene) -> None:
    """The pipeline files give a target another name, or take it back."""
    for path in scene.files.values():
        document = yaml.safe_load(path.read_text())
        own = document["target"].setdefault("tables", {}).setdefault(f"public.{COPIES}", {})
        if own.pop("name", None) is None:
            own["name"] = "moved.{schema}_{table}"
        path.write_text(yaml.safe_dump(document))
    scene.write()


def divided(scene: Scene) -> None:
    """The pipeline files divide a target's rows into partitions, or no longer do."""
    for path in scene.files.values():
        document = yaml.safe_load(path.read_text())
        own = document["target"].setdefault("tables", {}).setdefault(f"public.{COPIES}", {})
        own["partition_by"] = [] if own.get("partition_by") else ["n"]
        path.write_text(yaml.safe_dump(document))
    scene.write()


def returned(scene: Scene) -> None:
    """A table that left the publication and is back: its next copy counts as a first one."""
    for verb in ("drop", "add"):
        scene.connection.execute(
            f"alter publication {scene.name}_pub {verb} table {COPIES}".encode()
        )
        scene.write(2)
        scene.run("consume")
    scene.write()


def unpublished(scene: Scene) -> None:
    """WAL that holds nothing for the pipeline: another database's."""
    for _ in range(3):
        ask(scene.server, "select pg_logical_emit_message(false, 'x', repeat('x', 8000000))")
        ask(scene.server, "select pg_switch_wal()")


def written_down(scene: Scene) -> None:
    """The slot's position, without which maintenance forgets nothing; and then changes, as ever."""
    scene.connection.execute(b"checkpoint")
    scene.write()


def slot_dropped(scene: Scene) -> None:
    """Somebody has dropped the slot between changes."""
    scene.write(4)
    scene.connection.execute(
        b"select pg_drop_replication_slot(slot_name) from pg_replication_slots where database ="
        b" current_database()"
    )
    scene.write(4)


def behind(scene: Scene) -> None:
    """A run that landed and didn't live to consume: the slot stands behind the lake."""
    scene.write()
    scene.break_off("consume.landed")
    scene.write(4)


def left_staged(scene: Scene) -> None:
    """Changes that a killed run had staged for a target, and others behind them."""
    scene.rows(KEYED[0], "1, 'small'")
    write_parquet(
        staging_folder(Lake(scene.root), f"public.{KEYED[0]}", 1, 1, "killed"),
        pa.table({"action": ["insert"]}),
    )


def emitted(scene: Scene) -> None:
    """Logical messages between changes."""
    scene.write(4)
    scene.emit()
    scene.write(4)


def incomplete(scene: Scene) -> None:
    """Rows that move into the filter without their large values."""
    scene.write(4)
    _move_in(scene)


def quarantined(scene: Scene) -> None:
    """Such rows that couldn't be completed: applied while their column had another name."""
    _move_in(scene)
    scene.run("consume", stage="land")
    scene.connection.execute(f"alter table {KEYED[0]} rename column big to hidden".encode())
    scene.run("consume", stage="apply")
    scene.connection.execute(f"alter table {KEYED[0]} rename column hidden to big".encode())
    scene.details["decide"] = {"action": "retry"}
    if not Pipeline.load(scene.files[PLAIN]).waiting():
        raise AssertionError("no row is in quarantine")


def _move_in(scene: Scene) -> None:
    low, *_ = scene.rows(KEYED[0], f"5, {BIG.format('i')}")
    scene.connection.execute(f"update {KEYED[0]} set part = 1 where id >= {low}".encode())


def damaged(scene: Scene) -> None:
    """Rows that a run brought are gone from a target; the run's time is what is to be replayed."""
    keys, began = scene.rows(KEYED[1], "1, 'small'"), now()
    scene.run("consume")
    scene.details["replay"] = {"start": began, "end": now(), "tables": [f"public.{KEYED[1]}"]}
    _execute(scene, KEYED[1], f"delete from {{}} where id in ({', '.join(map(str, keys))})")


def written_by_others(scene: Scene) -> None:
    """Somebody else writes to a target, and takes it back."""
    _execute(scene, COPIES, "insert into {} (n, t) values (-1, 'theirs')")
    _execute(scene, COPIES, "delete from {} where n = -1")
    scene.write()


def with_vectors(scene: Scene) -> None:
    """A target has deletion vectors, which the pipeline file doesn't want."""
    scene.run("consume")
    _execute(
        scene, COPIES, "alter table {} set tblproperties ('delta.enableDeletionVectors' = 'true')"
    )
    scene.write()


def failed_over(scene: Scene) -> None:
    """A standby has become the primary; the lake has some of the changes."""
    scene.write(4)
    primary, pipeline = scene.server, Pipeline.load(scene.files[PLAIN])
    standby = new_postgres(primary.version, dict(SETTINGS))
    scene.at_end(standby.delete)
    follow(standby, primary, f"standby_{standby.folder.name[-8:]}".lower())
    scene.run("consume")  # keep_slot moves an idle slot
    keep_slot(standby, primary, pipeline)
    scene.write(4)
    scene.run("consume")
    scene.write(4)
    catch_up(standby, primary)
    scene.lead_to(standby)
    promote(standby)
    scene.write(4)
    # Nobody reads it there any more, and other pipelines still use that server.
    ask(primary, f"select pg_drop_replication_slot('{pipeline.file.source.slot}')")


def _execute(scene: Scene, table: str, statement: str) -> None:
    """SQL of somebody else's on a target."""
    scene.spark.sql(statement.format(scene.target(table).relation)).collect()

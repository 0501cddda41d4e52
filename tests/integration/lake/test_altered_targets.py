"""An external writer alters targets: the run names the commit, and other tables go on."""

import re

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.pipelines import copied_pipeline, new_pipeline
from waldelta.pipeline.run_result import RunFailed


def without_note(uri):
    rows = DeltaTable(uri).to_pyarrow_table().drop_columns(["note"])
    write_deltalake(uri, rows, mode="overwrite", schema_mode="overwrite")


def add_extra(uri):
    rows = pa.table({"id": pa.array([], pa.int32()), "extra": pa.array([], pa.string())})
    write_deltalake(uri, rows, mode="append", schema_mode="merge")


ALTERATIONS = {
    "overwritten": (without_note, r"column `note` is missing by version \d+ \(WRITE by "),
    "extended": (add_extra, r"column `extra` was added, and the source has .* \(WRITE by "),
}
TABLES = [*ALTERATIONS, "fine"]


def copied(runner, database, lake, names):
    """The pipeline of tables with two rows each, which are in the lake."""
    for name in names:
        database.execute(f"create table {name}(id int primary key, note text)")
        database.execute(f"insert into {name} values (1, 'a'), (2, 'b')")
    target = {"root": lake, "metadata_columns": False}
    tables = [f"public.{name}" for name in names]
    return copied_pipeline(runner, new_pipeline(database, lake, tables, target=target))


def test_an_altered_target_is_named_and_the_others_go_on(runner, database, lake):
    pipeline = copied(runner, database, lake, TABLES)
    for name, (act, _) in ALTERATIONS.items():
        act(pipeline.target_path(f"public.{name}"))
    missing = (
        r"public\.overwritten: an external writer altered its target: column `note` is missing"
    )
    warnings = [one.text for one in pipeline.check(estimate=False).findings]
    assert [text for text in warnings if re.match(missing, text)]
    assert not [text for text in warnings if text.startswith(("public.fine", "public.extended"))]
    with pytest.raises(RunFailed, match=missing):
        pipeline.reconcile(runner, ["public.overwritten"])
    for name in TABLES:
        database.execute(f"update {name} set note = 'd' where id = 2")
        database.execute(f"insert into {name} values (4711, 'e')")
    database.execute("alter table extended add extra int; update extended set extra = 5")
    with pytest.raises(RunFailed) as failed:
        pipeline.consume(runner)
    told = str(failed.value)
    for name, (_, what) in ALTERATIONS.items():
        assert re.search(rf"public\.{name}: an external writer altered its target: {what}", told)
    assert "public.fine: " not in told
    assert "4711" not in told
    rows = DeltaTable(pipeline.target_path("public.fine")).to_pyarrow_table().sort_by("id")
    assert rows["note"].to_pylist() == ["a", "d", "e"]


# What the writer does, and what the run says.
REFUSED = {
    "checked": ("alter table {t} add constraint few check (id < 3)",
                r"CHECK constraint `few` was added by version \d+ \(ADD CONSTRAINT by "),
    "append_only": ("alter table {t} set tblproperties ('delta.appendOnly' = 'true')",
                    r"delta.appendOnly was set by version \d+ \(SET TBLPROPERTIES by "),
}  # fmt: skip
# Delta computes what the source doesn't have, or waldelta needs nothing.
HARMLESS = {
    "further": "alter table {t} add column extra string",
    "defaulted": "alter table {t} set tblproperties ('delta.feature.allowColumnDefaults' ="
    " 'supported'); alter table {t} alter column note set default 'x'",
    "fed": "alter table {t} set tblproperties ('delta.enableChangeDataFeed' = 'true')",
    "partitioned": "create or replace table {t} using delta partitioned by (note) as select * from"
    " {t}",
}


@pytest.mark.usefixtures("on_spark")
@pytest.mark.nightly("further alterations, by Spark")
def test_what_delta_refuses_is_named_and_other_alterations_stop_nothing(runner, database, lake):
    tables = [*REFUSED, *HARMLESS]
    pipeline = copied(runner, database, lake, tables)

    def sql(statement, name):
        uri = pipeline.target_path(f"public.{name}")
        return runner.spark().sql(statement.format(t=f"delta.`{uri}`")).collect()

    acts = {name: act for name, (act, _) in REFUSED.items()} | HARMLESS
    for name, statements in acts.items():
        for statement in statements.split("; "):
            sql(statement, name)
    for name in tables:
        database.execute(f"update {name} set note = 'd' where id = 2")
        database.execute(f"insert into {name} values (4711, 'e')")
    with pytest.raises(RunFailed) as failed:
        pipeline.consume(runner)
    told = str(failed.value)
    for name, (_, what) in REFUSED.items():
        assert re.search(rf"public\.{name}: an external writer altered its target: {what}", told)
    assert told.count(": an external writer altered") == len(REFUSED)
    assert "4711" not in told
    for name in HARMLESS:
        rows = sql("select id, note from {t} order by id", name)
        assert [tuple(row) for row in rows] == [(1, "a"), (2, "d"), (4711, "e")], name

"""An external writer alters targets: runs name what it did, and the way out works."""

import re

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.fixtures.postgres import new_database
from tests.support.pipelines import copied_pipeline, new_pipeline
from waldelta.pipeline.run_result import RunFailed
from waldelta.spark import OnSpark

pytestmark = [
    pytest.mark.pg,
    pytest.mark.spark,
    pytest.mark.nightly("further alterations than those of test_altered_targets.py"),
]

MAPPED = (
    "alter table {t} set tblproperties ('delta.columnMapping.mode' = 'name',"
    " 'delta.minReaderVersion' = '2', 'delta.minWriterVersion' = '5')"
)


def by_spark(*statements):
    def act(runner, uri):
        for statement in statements:
            runner.spark().sql(statement.format(t=f"delta.`{uri}`")).collect()

    return act


def with_further_column(_, uri):
    rows = DeltaTable(uri).to_pyarrow_table()
    further = pa.field("extra", pa.string(), nullable=False)
    schema = rows.schema.append(further)
    rows = pa.table([*rows.columns, pa.array(["x"] * len(rows))], schema=schema)
    write_deltalake(uri, rows, mode="overwrite", schema_mode="overwrite")


# What the writer does, what the run says, and what the operator does then; None: copies again.
ALTERATIONS = {
    "dropped": (by_spark(MAPPED, "alter table {t} drop column note"),
                r"column `note` is missing by version \d+ \(DROP COLUMNS by .*RESTORE", None),
    "renamed": (by_spark(MAPPED, "alter table {t} rename column note to text"),
                r"column `note` is missing by version \d+ \(RENAME COLUMN by ",
                by_spark("alter table {t} rename column text to note")),
    "checked": (by_spark("alter table {t} add constraint few check (id < 3)"),
        r"CHECK constraint `few` was added by version \d+ \(ADD CONSTRAINT by .*DROP CONSTRAINT",
        by_spark("alter table {t} drop constraint few")),
    "append_only": (by_spark("alter table {t} set tblproperties ('delta.appendOnly' = 'true')"),
                    r"delta.appendOnly was set by version \d+ \(SET TBLPROPERTIES by ",
                    by_spark("alter table {t} set tblproperties ('delta.appendOnly' = 'false')")),
    "required": (with_further_column, r"column `extra` is NOT NULL by version \d+ \(WRITE", None),
}  # fmt: skip
# They don't stop a table: Delta computes what the source doesn't have, or waldelta needs nothing.
HARMLESS = {
    "further": by_spark("alter table {t} add column extra string"),
    "defaulted": by_spark(
        "alter table {t} set tblproperties ('delta.feature.allowColumnDefaults' = 'supported')",
        "alter table {t} alter column note set default 'x'",
    ),
    "fed": by_spark("alter table {t} set tblproperties ('delta.enableChangeDataFeed' = 'true')"),
    "partitioned": by_spark(
        "create or replace table {t} using delta partitioned by (note) as select * from {t}"
    ),
}
TABLES = [*ALTERATIONS, *HARMLESS, "restored"]


@pytest.fixture(scope="module")
def database(postgres):
    with pytest.MonkeyPatch.context() as patch, new_database(postgres, patch) as made:
        yield made


def rows_of(runner, pipeline, name):
    uri = pipeline.target_path(f"public.{name}")
    return [
        tuple(row)
        for row in runner.spark().sql(f"select id, note from delta.`{uri}` order by id").collect()
    ]


@pytest.fixture(scope="module")
def runner(spark_jvm):
    return OnSpark(spark_jvm())


@pytest.fixture(scope="module")
def pipeline(runner, database, tmp_path_factory):
    """Copied, changed once, altered by others, and with changes that wait."""
    lake = (tmp_path_factory.mktemp("altered") / "lake").as_uri()
    for name in TABLES:
        database.execute(f"create table {name}(id int primary key, note text)")
        database.execute(f"insert into {name} values (1, 'a'), (2, 'b')")
    target = {"root": lake, "metadata_columns": False}
    tables = [f"public.{name}" for name in TABLES]
    made = copied_pipeline(runner, new_pipeline(database, lake, tables, target=target))
    for name in TABLES:
        database.execute(f"update {name} set note = 'c' where id = 1")
    made.consume(runner)
    acts = HARMLESS | {name: act for name, (act, *_) in ALTERATIONS.items()}
    for name in TABLES:
        acts.get(name, _restore)(runner, made.target_path(f"public.{name}"))
        database.execute(f"update {name} set note = 'd' where id = 2")
        database.execute(f"insert into {name} values (4711, 'e')")
    return made


def _restore(runner, uri):
    by_spark(f"restore {{t}} to version as of {DeltaTable(uri).version() - 1}")(runner, uri)


def test_an_altered_target_is_named_with_its_commit_and_the_way_out(runner, database, pipeline):
    with pytest.raises(RunFailed) as failed:
        pipeline.consume(runner)
    told, warnings = str(failed.value), "\n".join(failed.value.result.warnings)
    for name, (_, what, _) in ALTERATIONS.items():
        assert re.search(rf"public\.{name}: an external writer altered its target: {what}", told)
    assert "INTERNAL_ERROR" not in told
    assert "4711" not in told
    assert told.count(": an external writer altered") == len(ALTERATIONS)
    assert re.search(r"public\.restored: .*\(RESTORE by ", warnings)
    expected = database.execute("select id, note from further order by id")
    assert {name: rows_of(runner, pipeline, name) for name in HARMLESS} == dict.fromkeys(
        HARMLESS, expected
    )

    copied = [f"public.{name}" for name, (*_, way) in ALTERATIONS.items() if way is None]
    for name, (*_, way) in ALTERATIONS.items():
        if way is not None:
            way(runner, pipeline.target_path(f"public.{name}"))
    pipeline.sync(runner, copied, "altered by an external writer")
    pipeline.consume(runner)
    assert {name: rows_of(runner, pipeline, name) for name in ALTERATIONS} == dict.fromkeys(
        ALTERATIONS, expected
    )

"""An external writer alters targets by Spark: runs name what Delta refuses since, and nothing else.

tests/unit/pipeline/targets/test_target_definition.py has each change of a column.
"""

import re

import pytest

from tests.support.pipelines import copied_pipeline, new_pipeline
from waldelta.pipeline.run_result import RunFailed

pytestmark = [
    pytest.mark.pg,
    pytest.mark.spark,
    pytest.mark.usefixtures("on_spark"),
    pytest.mark.nightly("further alterations than those of test_altered_targets.py"),
]

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


def test_what_delta_refuses_is_named_and_other_alterations_stop_nothing(runner, database, lake):
    tables = [*REFUSED, *HARMLESS]
    for name in tables:
        database.execute(f"create table {name}(id int primary key, note text)")
        database.execute(f"insert into {name} values (1, 'a'), (2, 'b')")
    target = {"root": lake, "metadata_columns": False}
    listed = [f"public.{name}" for name in tables]
    pipeline = copied_pipeline(runner, new_pipeline(database, lake, listed, target=target))

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

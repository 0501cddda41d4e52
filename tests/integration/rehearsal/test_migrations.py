"""Migrations of the kinds that guides on safe migrations list, each with the report's claim.

The pipeline consumes and is compared with its source after each statement, so a claim is what it
really did. Here it is held against what PostgreSQL's documentation says of the statement.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from deltalake import DeltaTable

from tests.support.pipelines import copied_pipeline, new_pipeline, pipeline_on
from waldelta.config import PipelineFile
from waldelta.pipeline.run_result import RunFailed
from waldelta.rehearsal.migration import statements
from waldelta.rehearsal.production import Production, TableSize
from waldelta.rehearsal.rehearsal import rehearse

# Each migration has a table of its own, so that none changes the verdict on another one.
TABLE = """
create table {name} (
  id int primary key, n int not null, code varchar(20) not null, free int, note text,
  at timestamptz, mood mood not null default 'ok', twice int generated always as (n * 2) stored);
alter table {name} owner to app;
"""
TYPES = """
create role app; create type mood as enum ('ok', 'bad'); alter type mood owner to app;
create schema other authorization app;
create role team; grant team to app; grant usage, create on schema public to team;
set allow_in_place_tablespaces = on; create tablespace fast owner app location '';
"""
# What a migration's own table has besides.
BESIDES = {
    "rename_enum_value": """
create type size as enum ('s', 'm'); alter type size owner to app;
alter table rename_enum_value add column size size not null default 's';
""",
    "logged": "create unlogged table aside(id int primary key); alter table aside owner to app;",
}
LOCK, COPY, READERS, LOSS, STOP, APP = "lock", "copy", "readers", "data-loss", "stop", "app-error"

POLICIES = """begin;
alter table {t} enable row level security, force row level security;
create policy everything on {t} using (true); commit;"""
BACKFILL = "insert into {t} (id, n, code) select g, g, g from generate_series(1000, 40000) g"

# name: statement, and the kinds that are found besides notes
QUICK = {
    "add_column": ("alter table {t} add column x int", {READERS}),
    "set_not_null": ("alter table {t} alter column note set not null", {LOCK}),
    "drop_key": ("alter table {t} drop constraint {t}_pkey", {APP, COPY}),
    "update_all": ("update {t} set note = 'y'", set()),
    "rename_table": ("alter table {t} rename to renamed", {STOP, COPY, READERS}),
}
COLUMNS = {
    "add_default": ("alter table {t} add column x int not null default 7", {READERS}),
    "widen_varchar": ("alter table {t} alter column code type varchar(40)", set()),
    "add_volatile": ("alter table {t} add column x uuid default gen_random_uuid()",
                     {LOCK, COPY, READERS}),
    "add_identity": ("alter table {t} add column x bigint generated always as identity",
                     {LOCK, COPY, READERS}),
    "add_generated": ("alter table {t} add column x int generated always as (n + 1) stored",
                      {LOCK}),
    "drop_not_null": ("alter table {t} alter column code drop not null", set()),
    "set_default": ("alter table {t} alter column note set default 'x'", set()),
    "drop_column": ("alter table {t} drop column note", {LOSS, READERS}),
    "rename_column": ("alter table {t} rename column note to remark", {READERS}),
    "varchar_to_text": ("alter table {t} alter column code type text", set()),
    "narrow_varchar": ("alter table {t} alter column code type varchar(15)", {LOCK, COPY}),
    "int_to_bigint": ("alter table {t} alter column free type bigint", {LOCK, COPY, READERS}),
    "retype_using": ("alter table {t} alter column at type date using at::date",
                     {LOCK, COPY, READERS}),
}  # fmt: skip
KEYS = {
    "create_index": ("create index on {t} (code)", {LOCK}),
    "create_index_concurrently": ("create index concurrently on {t} (code)", set()),
    "identity_nothing": ("alter table {t} replica identity nothing", {APP}),
    "retype_key": ("alter table {t} alter column id type bigint", {LOCK, COPY, READERS}),
    "rename_key": ("alter table {t} rename column id to key", {READERS}),
    "other_key": ("alter table {t} drop constraint {t}_pkey, add primary key (id, code)",
                  {LOCK, COPY}),
    # It may not contain a generated column that isn't published.
    "identity_full": ("alter table {t} replica identity full", {APP}),
    "add_unique": ("alter table {t} add unique (code)", {LOCK}),
    "add_check": ("alter table {t} add constraint c check (n > 0)", {LOCK}),
    "add_check_later": ("alter table {t} add constraint c check (n > 0) not valid", set()),
    "foreign_key": ("alter table {t} add foreign key (n) references {t} (id)", {LOCK}),
    "add_enum_value": ("alter type mood add value 'new'", set()),
}  # fmt: skip
TABLES = {
    "move_schema": ("alter table {t} set schema other", {STOP, COPY, READERS}),
    "drop_table": ("drop table {t}", {STOP, READERS}),
    "truncated": ("truncate {t}", set()),
    "delete_all": ("delete from {t}", set()),
    "row_security": ("alter table {t} enable row level security", set()),
    "vacuum_full": ("vacuum full {t}", {LOCK}),
    "clustered": ("cluster {t} using {t}_pkey", {LOCK}),
    "create_as": ("create table copy_of as select * from {t}", set()),
    "comments": ("comment on table {t} is 'x'", set()),
    "statistics": ("alter table {t} alter column n set statistics 500", set()),
}
FURTHER = {
    "rename_enum_value": ("alter type size rename value 's' to 'small'", {COPY}),
    "owner": ("alter table {t} owner to team", set()),
    "tablespace": ("alter table {t} set tablespace fast", {LOCK}),
    "logged": ("alter table aside set logged", {LOCK}),
    "force_row_security": (
        "alter table {t} enable row level security, force row level security", {APP}),
    "policies": (POLICIES, set()),
    "backfill": (BACKFILL, set()),
    "violated_check": ("alter table {t} add check (note in ('a', 'b'))", {LOCK}),
    "another_publication": ("create publication another for table {t}", set()),
    "another_filter": ("create publication filtering for table {t} where (n > 5)", {APP}),
    "another_without_key": ("create publication listing for table {t} (code)", {APP}),
    "set_unlogged": ("alter table {t} set unlogged", {"error"}),
}  # fmt: skip


# What is found before PostgreSQL 18, where it is something else.
BEFORE_18 = {"identity_full": set()}


def pipeline_of(names, **target):
    """A pipeline of these tables of schema public."""
    tables = [{"name": f"public.{name}"} for name in names]
    source = {"conn_id": "prod", "slot": "shop_cdc"}
    return PipelineFile.model_validate(
        {
            "pipeline": "shop",
            "source": source | {"publications": [{"name": "shop", "tables": tables}]},
            "target": {"root": "file:///lake", **target},
        }
    )


SETS = {"columns": COLUMNS, "keys": KEYS, "tables": TABLES, "further": FURTHER}
CASES = [
    pytest.param(18, QUICK, id="quick"),
    pytest.param(15, QUICK, id="quick-15", marks=pytest.mark.nightly("another major version")),
    *(
        pytest.param(
            version,
            kinds,
            id=f"{name}-{version}",
            marks=[
                pytest.mark.nightly("more kinds of statements"),
                pytest.mark.long("rehearses dozens of statements, with runs of a pipeline between"),
            ],
        )
        for name, kinds in SETS.items()
        for version in (18, 15)
    ),
]


@pytest.mark.parametrize(("version", "migrations"), CASES)
def test_each_claim_is_what_happens(version, migrations):
    schema = TYPES + "".join(TABLE.format(name=name) for name in migrations)
    schema += "".join(BESIDES.get(name, "") for name in migrations)
    migration = [
        statement
        for name, (text, _) in migrations.items()
        for statement in statements(text.format(t=name), name)
    ]
    sizes = {f"public.{name}": TableSize(1_000_000, 1 << 30) for name in migrations}
    report = rehearse(
        pipeline_of(migrations), Production(schema, "schema", version, sizes), migration
    )
    expected = {f"{name}:1": kinds for name, (_, kinds) in migrations.items()}
    if version < 18:
        expected |= {f"{name}:1": BEFORE_18[name] for name in migrations.keys() & BEFORE_18}
    assert claims(report) == expected, report.as_text([])


def claims(report):
    """The kinds that a report has for each place, besides notes."""
    kinds = {}
    for step in report.steps:
        kinds.setdefault(step.place, set()).update({one.kind for one in step.impacts} - {"note"})
    return kinds


PARTS = """
create role app;
create table parts(id int primary key, v text) partition by range (id);
create table low partition of parts for values from (0) to (1000);
create table high partition of parts for values from (1000) to (3000);
create table loose(id int primary key, v text);
alter table parts owner to app; alter table low owner to app; alter table high owner to app;
alter table loose owner to app;
"""
SPLIT = """begin;
alter table parts detach partition high;
create table middle partition of parts for values from (1000) to (2000);
create table upper partition of parts for values from (2000) to (3000);
insert into parts select * from high;
drop table high;
commit;"""
# Statements, and what is found where the pipeline has one target, and one for each partition.
PARTITIONS = {
    "new": ("create table new partition of parts for values from (4000) to (5000)",
            set(), {COPY, READERS}),
    "fill": ("delete from loose; insert into loose values (3001, 'x')", set(), set()),
    "attach": ("alter table parts attach partition loose for values from (3000) to (4000)",
               {LOCK, LOSS}, {LOCK, COPY, READERS}),
    "split": (SPLIT, set(), {COPY, READERS}),
    "detach": ("alter table parts detach partition low", {LOSS}, {READERS}),
}  # fmt: skip


@pytest.mark.parametrize("through_root", [True, False], ids=["root", "partitions"])
@pytest.mark.nightly("partitions are four further kinds")
def test_partitions(through_root):
    """What a target of the root gets, and what the targets of its partitions get."""
    file = pipeline_of(["parts"])
    source = file.source.model_copy(
        update={
            "publications": [
                file.source.publications[0].model_copy(
                    update={"publish_via_partition_root": through_root}
                )
            ]
        }
    )
    migration = [
        statement for name, (text, *_) in PARTITIONS.items() for statement in statements(text, name)
    ]
    report = rehearse(
        file.model_copy(update={"source": source}), Production(PARTS, "schema", None), migration
    )
    expected = {
        f"{name}:1": root if through_root else leaves
        for name, (_, root, leaves) in PARTITIONS.items()
    }
    assert claims(report) == expected, report.as_text([])


NEW_TABLE = "create table {t}(id int primary key, n int, note text)"
# Statements by which a name comes to mean something else, with what is found where the publication
# lists the tables, and, where it differs, where it has all tables.
NAMES = {
    "drop_add": (
        "begin; alter table {t} drop note; alter table {t} add note text; commit",
        {LOSS, COPY, READERS},
    ),
    "drop_add_at_once": ("alter table {t} drop note, add note text", {LOSS, COPY, READERS}),
    "drop_add_type": (
        "begin; alter table {t} drop note; alter table {t} add note bigint; commit",
        {LOSS, COPY, READERS},
    ),
    "drop_then_add": (
        "alter table {t} drop note; alter table {t} add note text", {LOSS, COPY, READERS},
    ),
    "rename_add": (
        "begin; alter table {t} rename note to former; alter table {t} add note text; commit",
        {COPY, READERS},
    ),
    "rename_drop_add": (
        ("begin; alter table {t} rename note to former; alter table {t} drop former;"
        " alter table {t} add note text; commit"),
        {LOSS, COPY, READERS},
    ),
    "swap": (
        ("begin; alter table {t} rename note to x; alter table {t} rename n to note;"
        " alter table {t} rename x to n; commit"),
        {COPY, READERS},
    ),
    "drop_create": (
        f"begin; drop table {{t}}; {NEW_TABLE}; commit", {STOP, READERS}, {LOSS, COPY},
    ),
    "rename_create": (
        f"begin; alter table {{t}} rename to {{t}}_former; {NEW_TABLE}; commit",
        {STOP, COPY, READERS}, {COPY, READERS},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "publication",
    [
        pytest.param(
            {"tables": [{"name": f"public.{name}"} for name in NAMES]},
            marks=pytest.mark.nightly("names are nine further kinds"),
            id="tables",
        ),
        pytest.param(
            {"all_tables": True, "accept_future_tables": True},
            marks=pytest.mark.nightly("names are nine further kinds"),
            id="all",
        ),
    ],
)
def test_a_name_that_means_something_else(runner, database, lake, publication):
    """Values that a claim calls lost are in no target of the real pipeline afterwards."""
    schema = ";".join(NEW_TABLE.format(t=name) for name in NAMES) + ";"
    publication |= {"name": database.name}
    pipeline = pipeline_on(database, lake, publication)
    database.execute(schema)
    for name in NAMES:
        database.execute(f"insert into {name} values (1, 1, 'former {name}'), (2, 2, '')")
    copied_pipeline(runner, pipeline)
    texts = {name: text.format(t=name) for name, (text, *_) in NAMES.items()}
    for name, text in texts.items():
        database.execute(f"{text}; update {name} set id = 3 where id = 2")
    for _ in range(2):
        with suppress(RunFailed):
            pipeline.consume(runner)
        with suppress(RunFailed):
            pipeline.sync(runner)
    values = {
        value
        for folder in Path(urlsplit(lake).path, "public").iterdir()
        for row in DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
        for value in row.values()
    }
    migration = [one for name, text in texts.items() for one in statements(text, name)]
    report = rehearse(pipeline.file, Production(schema, "schema", None), migration)
    is_all = "all_tables" in publication
    expected = {
        f"{name}:1": kinds[-1] if is_all else kinds[0] for name, (_, *kinds) in NAMES.items()
    }
    assert claims(report) == expected, report.as_text([])
    lost = {name for name in NAMES if f"former {name}" not in values}
    assert lost == {name for name in NAMES if LOSS in expected[f"{name}:1"]}


SECURE = """alter table t enable row level security;
create policy first_row on t using (id = 1);
alter table t alter column v type bigint;"""


@pytest.mark.nightly("row-level security is one more kind")
def test_policies_stop_copies_by_another_role(runner, any_database, lake, monkeypatch):
    """A role from which rows are hidden gets all changes, and no copy and no comparison."""
    role, schema = f"r_{any_database.name}", "create table t(id int primary key, v int);"
    pipeline = new_pipeline(any_database, lake)
    any_database.execute(
        f"{schema} insert into t values (1, 1), (2, 2);"
        f" create role {role} login replication password 'p'; grant select on t to {role}"
    )
    copied_pipeline(runner, pipeline)
    by_role = any_database.server.uri(any_database.name, role, "p")
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", by_role)
    secure, policy, retype = (one.text for one in statements(SECURE, "m"))
    any_database.execute(f"{secure}; {policy}; update t set v = 3")
    assert pipeline.consume(runner).status == "succeeded"
    with pytest.raises(RunFailed) as refused:
        pipeline.sync(runner, ["public.t"])
    assert "bypassrls" in str(refused.value.result.error)
    any_database.execute(retype)
    with pytest.raises(RunFailed) as refused:
        pipeline.consume(runner)
    assert "bypassrls" in str(refused.value.result.error)

    version = any_database.server.version
    report = rehearse(
        pipeline_of(["t"]), Production(schema, "schema", version), statements(SECURE, "m")
    )
    ways = {(one.kind, step.place): one.way for step in report.steps for one in step.impacts}
    assert "bypassrls" in ways["note", "m:1"]
    assert "bypassrls" in ways["copy", "m:3"]
    known = Production(schema, "schema", version, reads_hidden_rows=True)
    report = rehearse(pipeline_of(["t"]), known, statements(SECURE, "m"))
    assert not [one for step in report.steps for one in step.impacts if "bypassrls" in one.way]

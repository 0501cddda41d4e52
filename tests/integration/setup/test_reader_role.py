"""What check says to a role that only reads: one finding with statements to paste."""

import subprocess
from contextlib import contextmanager
from dataclasses import replace

import pytest
from psycopg.conninfo import make_conninfo

from tests.support.pipelines import job_for, written
from waldelta.cli.command_line import main
from waldelta.config.pipeline_file import Target, TargetTable
from waldelta.findings import sql_name
from waldelta.postgres import connect
from waldelta.stages.setup.setup import plan_setup

ODD = 'r "x"; --'
TABLES = """
create type mood as enum ('ok');
create function twice(int) returns int immutable return $1 * 2;
create role {owner} nologin;
create schema "order" authorization {owner};
create table t (id int primary key, v int, m mood, at timestamptz);
create table u (id int primary key);
create table "order"."A" (id int primary key);
alter table t owner to {owner}; alter table u owner to {owner};
alter table "order"."A" owner to {owner};
revoke temporary on database {database} from public
"""


@pytest.fixture
def shop(database):
    """Tables of an owner who can't log in, and a role that may do nothing."""
    own = f"owner_{database.name}"
    reader = f"{ODD} {database.name}"
    database.execute(TABLES.format(owner=own, database=database.name))
    database.execute(f"create role {sql_name(reader)} login password 'p'")
    yield own, reader
    for role in (own, sql_name(reader)):
        database.execute(f"drop owned by {role} cascade; drop role {role}")


def test_no_grant_is_advised_on_a_column_that_doesnt_exist(database, lake, shop):
    """The misspelt filter is the one finding about it."""
    _, reader = shop
    tables = [{"name": "public.t", "where": "idd > 1"}]
    info = make_conninfo(database.conninfo, user=reader, password="p")
    job = job_for(info, lake, {"name": "p", "tables": tables})
    database.execute(f"grant select on t to {sql_name(reader)}")
    with connect(info, "test") as conn:
        text = plan_setup(conn, job).describe()
    assert 'column "idd" does not exist' in text
    assert "(idd)" not in text


def listed(text):
    """The statements of a finding, without its words."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert all(line.split("  --")[0].endswith(";") for line in lines)
    return lines


def test_one_finding_whose_grants_can_be_pasted(database, lake, shop):
    """Then only the owner's part is left, the plan's SQL; no table changes its owner."""
    _, reader = shop
    tables = [{"name": "public.t", "where": "id > 1"}, {"name": "public.u"}, {"name": 'order."A"'}]
    info = make_conninfo(database.conninfo, user=reader, password="p")
    job = job_for(info, lake, {"name": "p", "tables": tables})
    own = {"public.u": TargetTable(where="id > 1")}
    job = replace(
        job, pipeline=job.pipeline.model_copy(update={"target": Target(root=lake, tables=own)})
    )
    with connect(info, "test") as conn:
        plan = plan_setup(conn, job)
        (found,) = plan.problems
        assert "owner to" not in plan.describe()
        # A table without partitions is none itself: the one finding covers it.
        assert not any("may not read" in text for text in plan.warnings)
        grants, _, owners = found.partition("\nrole ")
        role = sql_name(reader)
        assert [line.split("  --")[0] for line in listed(grants)] == [
            f"alter role {role} replication;",
            f'grant usage on schema "order" to {role};',
            f'grant select on "order"."A", public.t, public.u to {role};',
            f"grant temporary on database {database.name} to {role};",
        ]
        assert listed(owners) == []
        assert "'p' must be created" in owners
        assert "setup --sql" in owners
        for statement in listed(grants):
            database.execute(statement)
        (found,) = plan_setup(conn, job).problems
        assert (f"role {role} lacks privileges" in found, listed(found)) == (False, listed(owners))
        plan.require_for_dba()
        psql = [str(database.server.bin / "psql"), "-X", "-d", database.conninfo]
        subprocess.run(psql, input=plan.as_sql(), text=True, check=True, timeout=60)
        assert plan_setup(conn, job).problems == ()


@pytest.mark.parametrize("theirs", ["the publication", "the table"])
def test_what_belongs_to_a_superuser_is_the_dbas(database, lake, shop, theirs):
    """Membership in that role would grant everything: the DBA runs the SQL."""
    _, reader = shop
    role = sql_name(reader)
    info = make_conninfo(database.conninfo, user=reader, password="p")
    tables = [{"name": "public.t"}, {"name": "public.u"}]
    job = job_for(info, lake, {"name": "p", "tables": tables})
    if (
        theirs == "the publication"
    ):  # as setup --sql has made it before the file listed another table
        mark = (
            f"waldelta pipeline flights, definition 0123456789ab, slot {job.pipeline.source.slot}"
        )
        database.execute(f"create publication p for table t; comment on publication p is '{mark}'")
    else:
        database.execute(
            f"alter table t owner to current_user; grant create on database {database.name} to"
            f" {role}"
        )
    ((dba,),) = database.execute("select current_user")
    with connect(info, "test") as conn:
        plan = plan_setup(conn, job)
        (found,) = plan.problems
        grants, _, owners = found.partition("\nrole ")
        assert [line.split("  --")[0] for line in listed(grants)] == [
            f"alter role {role} replication;",
            f"grant select on public.t, public.u to {role};",
        ]
        assert (dba in owners, "setup --sql" in owners) == (True, True)
        # A membership in the owner of the other table wouldn't let the role set up.
        assert (listed(owners), "by itself" in owners) == ([], False)
        assert [f.text for f in plan.reported(for_dba=True) if f.severity == "problem"] == [grants]


REJECTED = {
    "nope > 1": 'column "nope" does not exist',
    "id": "must be type boolean",
    "id >": "can't be read",
    "id > random()": "rejects function random in it",
    "at < current_date": "rejects function now in it",
    "public.twice(id) > 1": "only functions, types and operators of PostgreSQL's own",
    "m = 'ok'": "rejects the user-defined type of column m",
    "ctid is not null": "rejects system columns in it: ctid",
    "id = 'x'": "invalid input syntax for type integer",
}
TAKEN = (
    "id > 1 and v is null",
    "abs(id) > 1",
    "case when coalesce(v, id) > 1 then true end",
    "(id, v) <> (1, 2)",
    "id in (1, 2)",
)


def about_filter(plan):
    """Findings about a filter, but for the warning that it can raise."""
    return [f for f in plan.findings if "filter" in f.text and "can raise" not in f.text]


def test_a_filter_that_postgresql_rejects_is_shown_to_a_reader(database, lake, shop):
    """As to the tables' owner; with or without SELECT, and never one that PostgreSQL takes."""
    _, reader = shop
    info = make_conninfo(database.conninfo, user=reader, password="p")
    with connect(info, "test") as conn, connect(database.conninfo, "test") as owner:
        for select in (False, True):
            if select:
                database.execute(f"grant select on t to {sql_name(reader)}")
            for text, why in (REJECTED | dict.fromkeys(TAKEN)).items():
                entry = {
                    "name": "p",
                    "publish": ["insert"],
                    "tables": [{"name": "public.t", "where": text}],
                }
                job = job_for(info, lake, entry)
                found, seen_by_owner = (
                    about_filter(plan_setup(each, job)) for each in (conn, owner)
                )
                assert [f.severity for f in seen_by_owner] == ["problem"] * bool(why)
                assert [why in f.text for f in found] == [True] * bool(why), (text, found)
                assert all(f.severity == "problem" and f.lacks is None for f in found)


def test_a_column_that_does_not_exist_is_one_finding(database, lake, shop):
    """No replica identity could cover it."""
    _, reader = shop
    info = make_conninfo(database.conninfo, user=reader, password="p")
    job = job_for(info, lake, {"name": "p", "tables": [{"name": "public.t", "where": "nope > 1"}]})
    with connect(info, "test") as conn:
        (found,) = about_filter(plan_setup(conn, job))
    assert 'column "nope" does not exist' in found.text
    assert "replica identity" not in found.text


@contextmanager
def as_role(monkeypatch, database, role):
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", database.server.uri(database.name, role, "p"))
    yield
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", database.uri)


def test_findings_are_printed_once(database, lake, shop, tmp_path, monkeypatch, capsys, caplog):
    """By check, by setup and by setup --sql, which doesn't warn of what its SQL is for."""
    database.execute("create role plain login password 'p'")
    job = job_for(database, lake, {"name": "p", "tables": [{"name": "public.t", "where": "v > 1"}]})
    path = written(job.pipeline, tmp_path)

    def said(*arguments):
        caplog.clear()
        code = main([*arguments[:1], str(path), *arguments[1:]])
        return code, capsys.readouterr().out + caplog.text

    try:
        code, text = said("check")
        assert (code, text.count("the filter uses v"), text.count("listed above")) == (1, 1, 1)
        code, text = said("setup")
        assert (code, text.count("the filter uses v")) == (1, 1)
        database.execute("alter table t replica identity full")
        with as_role(monkeypatch, database, "plain"):
            code, text = said("check")
            assert (
                code,
                text.count("lacks privileges"),
                text.count("may not make the planned changes"),
            ) == (1, 1, 1)
            code, text = said("setup", "--sql")
            assert (
                code,
                text.count("lacks privileges"),
                text.count("may not make the planned changes"),
                text.count("create publication"),
            ) == (0, 1, 0, 1)
        code, text = said("setup")
        assert (code, text.count("REPLICA IDENTITY FULL writes")) == (0, 1)
    finally:
        database.execute("drop owned by plain; drop role plain")


def test_no_keyword_stands_bare(any_database):
    """A name is quoted wherever the server's own grammar wants it."""
    words = any_database.execute(
        "select word, quote_ident(word) from pg_get_keywords() where catcode <> 'U'"
    )
    assert [(word, sql_name(word)) for word, _ in words] == words

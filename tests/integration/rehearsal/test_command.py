"""``waldelta rehearse``: what it reads, what it refuses, and that nothing of it stays."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest
import yaml

from tests.support.waiting import wait_until
from waldelta.cli.command_line import main
from waldelta.config import load_pipeline_file
from waldelta.errors import ConfigError, SourceUnreachable
from waldelta.postgres import TableId
from waldelta.rehearsal.migration import statements
from waldelta.rehearsal.production import Production, load_schema, read_production
from waldelta.rehearsal.rehearsal import RehearsalOptions, rehearse
from waldelta.rehearsal.scratch_server import scratch_database

# The exit code of a report with findings, which bad input doesn't have.
FINDINGS = 3
SCHEMA = """
\\restrict token
-- Dumped from database version 18.1
set some_setting_of_a_newer_server = 0;
create schema shop;
alter schema shop owner to "the app";
create table shop.orders(id int primary key, status text not null, n int);
alter table shop.orders owner to "the app";
grant select on shop.orders to reader;
create table shop.others(id int primary key, n int);
alter table shop.others owner to "the app";
create table shop.items(id smallserial primary key, n int unique deferrable,
  order_id int references shop.orders deferrable initially deferred);
alter table shop.items owner to "the app";
create subscription never connection 'host=production' publication p;
"""


@pytest.fixture
def pipeline(tmp_path):
    """The path of a pipeline file of one table."""
    path = tmp_path / "shop.yml"
    publication = {"name": "shop", "tables": [{"name": "shop.orders"}]}
    source = {"conn_id": "prod", "slot": "shop_cdc", "publications": [publication]}
    document = {"pipeline": "shop", "source": source, "target": {"root": "file:///lake"}}
    path.write_text(yaml.safe_dump(document))
    return path


def rehearsed(pipeline, sql, *options):
    """The command's exit code for a migration."""
    folder = pipeline.parent
    (folder / "schema.sql").write_text(SCHEMA)
    (folder / "m.sql").write_text(sql)
    schema = () if "--from" in options else ("--schema", str(folder / "schema.sql"))
    return main(
        ["rehearse", str(pipeline), "--migration", str(folder / "m.sql"), *schema, *options]
    )


def test_reports_for_people_and_for_ci(pipeline, capsys):
    """The migration opens a transaction itself, and an error rolls it back and ends the report."""
    sql = (
        "alter table shop.orders add x int;\nbegin;\nalter table shop.orders add y int;\ncommit;\n"
        "alter table shop.orders replica identity nothing;\n"
        "begin;\nalter table shop.orders add z int;\nalter table shop.orders drop nope;\n"
        "commit;\n"
    )
    markdown, junit = pipeline.parent / "r.md", pipeline.parent / "r.xml"
    files = ("--markdown", str(markdown), "--junit", str(junit))
    assert rehearsed(pipeline, sql, "--json", *files) == FINDINGS
    steps = json.loads(capsys.readouterr().out)["steps"]
    m = pipeline.parent / "m.sql"
    assert [(step["place"], step["verdict"], len(step["sql"])) for step in steps] == [
        (f"{m}:1", "readers", 1),
        (f"{m}:2", "readers", 3),
        (f"{m}:5", "app-error", 1),
        (f"{m}:6", "error", 3),
    ]
    assert 'column "nope"' in steps[-1]["impacts"][0]["text"]
    assert f"{m}:8" in steps[-1]["impacts"][0]["text"]
    assert steps[-1]["impacts"][1]["text"] == "1 statement after it is not rehearsed"
    assert "replica identity" in markdown.read_text()
    assert ET.parse(junit).getroot().get("failures") == "2"


@pytest.mark.parametrize(
    ("sql", "options", "code"),
    [
        ("alter table shop.orders replica identity nothing", ("--fail-on", "copy,stop"), 0),
        ("select pg_sleep(60)", ("--statement-timeout", "0.2"), FINDINGS),
        ("select 1/0", ("--fail-on", "copy"), FINDINGS),
        ("set role reader; alter table shop.orders add x int", ("--role", "the app"), FINDINGS),
        ("begin; alter table shop.orders add x int", (), FINDINGS),
    ],
)
@pytest.mark.nightly("the reports' test has an exit code as well")
def test_the_exit_code_follows_the_policy(pipeline, sql, options, code):
    assert rehearsed(pipeline, sql, *options) == code


@pytest.mark.nightly("a changed pipeline file beside the migrations")
def test_a_changed_pipeline_file_and_the_digest_of_its_plan(
    pipeline, capsys, database, monkeypatch
):
    """What was rehearsed is what setup does; another plan is refused before anything is changed."""
    changed = yaml.safe_load(pipeline.read_text())
    changed["source"]["publications"][0]["tables"][0]["where"] = "n > 3"
    path = pipeline.with_name("changed.yml")
    path.write_text(yaml.safe_dump(changed))
    covered = "alter table shop.orders replica identity full"
    assert rehearsed(pipeline, covered, "--pipeline-change", str(path), "--json") == 0
    step = json.loads(capsys.readouterr().out)["steps"][-1]
    assert step["sql"][0].startswith(
        'alter publication "shop" set table only "shop"."orders" where'
    )
    told = next(one["text"] for one in step["impacts"] if "--expect" in one["text"])
    digest = told.removeprefix("setup --expect ").split()[0]
    database.execute("create schema shop")
    database.execute("create table shop.orders(id int primary key, status text not null, n int)")
    database.execute(covered)
    monkeypatch.setenv("AIRFLOW_CONN_PROD", database.uri)
    lake = {"target": {"root": (pipeline.parent / "lake").as_uri()}}
    pipeline.write_text(yaml.safe_dump(yaml.safe_load(pipeline.read_text()) | lake))
    path.write_text(yaml.safe_dump(changed | lake))
    assert main(["setup", str(pipeline)]) == 0
    state = "select pg_get_expr(prqual, prrelid) from pg_publication_rel"
    assert main(["setup", str(path), "--expect", "0123456789ab"]) == 1
    assert database.execute(state) == [(None,)]
    assert main(["setup", str(path), "--expect", digest]) == 0
    assert database.execute(state) == [("(n > 3)",)]


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (
            "create table t(id int primary key);\ncreate extension no_such_extension;",
            {},
            r"schema:2: the scratch server refuses the schema .*pass --scratch",
        ),
        ("create table t(id int primary key, x nope);", {}, r"schema:1: .*correct the schema"),
        (
            "create schema shop; create table shop.orders(id int primary key);",
            {"role": "nobody"},
            "has no role 'nobody'",
        ),
        ("select 1", {}, "set up on schema .*table shop.orders: it does not .*--pipeline-change"),
        ("", {"scratch_dsn": "host=127.0.0.1 port=1 dbname=x"}, "127.0.0.1:1/x.*refused"),
    ],
)
def test_what_the_scratch_server_lacks_is_named(pipeline, schema, options, message):
    file, migration = load_pipeline_file(pipeline), statements("select 1", "m")
    production, chosen = Production(schema, "schema", None), RehearsalOptions(**options)
    with pytest.raises((ConfigError, SourceUnreachable), match=message):
        rehearse(file, production, migration, chosen)


@pytest.mark.parametrize(("grants", "may_create"), [("", True), ("grant usage", False)])
def test_a_dump_without_privileges_gives_owners_their_schemas(database, grants, may_create):
    """A schema with grants says itself what its roles may do."""
    role = f"r_{database.name}"
    schema = f"create schema shop; create table shop.t(id int); alter table shop.t owner to {role};"
    grants = f"{grants} on schema shop to {role}" if grants else ""
    load_schema(database.connection, Production(schema + grants, "schema", None))
    may = f"select has_schema_privilege('{role}', 'shop', 'create')"
    assert database.execute(may) == [(may_create,)]


OWN_ROW = """begin; insert into shop.orders values (-5, 'x', 5);
alter table shop.orders add check (n < 0); commit;
"""
SLOW_COMMIT = """set statement_timeout = 0; begin;
create function shop.wait() returns trigger language plpgsql as
  'begin perform pg_sleep(99); return null; end';
create constraint trigger slow after insert on shop.orders deferrable initially deferred
  for each row execute function shop.wait();
insert into shop.orders values (-5, 'x', 5);
commit;
"""
CATCHES_CANCEL = """do $$ begin
  begin perform pg_sleep(99); exception when query_canceled then perform pg_sleep(99); end;
end $$
"""
# What ends a rehearsal, and what the report says of it: the line, the error and the way.
ERRORS = {
    "fails half-way": (
        "alter table shop.orders add x int;\nalter table shop.orders\n  drop nope;\n",
        2, 'column "nope" of relation "orders" does not exist', "",
    ),
    "its own row violates it": (OWN_ROW, 2, "is violated by some row", ""),
    "an extension": (
        "\ncreate extension no_such_extension;\n", 2, "is not available", "pass --scratch",
    ),
    "takes for ever": (
        "set statement_timeout = 0;\nselect pg_sleep(99);\n",
        2, "runs longer than 2 s", "--statement-timeout",
    ),
    "takes for ever within a transaction": (
        "begin;\nset local statement_timeout = 0;\nselect pg_sleep(99);\ncommit;\n",
        3, "runs longer than 2 s", "--statement-timeout",
    ),
    "takes for ever at its COMMIT": (SLOW_COMMIT, 7, "runs longer than 2 s", "--statement-timeout"),
    "goes on after a cancel": (CATCHES_CANCEL, 1, "runs longer than 2 s", "--statement-timeout"),
    "its own limit": (
        "set statement_timeout = '1s';\nselect pg_sleep(99);\n", 2, "due to statement timeout", "",
    ),
    "concurrently within a transaction": (
        "begin;\ncreate index concurrently on shop.orders (n);\ncommit;\n",
        2, "cannot run inside a transaction block", "outside of BEGIN",
    ),
    "another owner's": (
        "alter table shop.orders add y int;\nalter role reader createdb;\n",
        2, "permission denied", "--role",
    ),
    "no COMMIT": ("begin;\nalter table shop.orders add x int;\n", 1, "without COMMIT", ""),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name == "an extension" else pytest.mark.nightly("another error alike")
        )
        for name in ERRORS
    ],
)
def test_an_error_names_the_line_and_the_way(pipeline, capsys, name):
    """The rehearsal ends there, and the steps before it are reported."""
    sql, line, error, way = ERRORS[name]
    assert rehearsed(pipeline, sql, "--json", "--statement-timeout", "2") == FINDINGS
    steps = json.loads(capsys.readouterr().out)["steps"]
    (impact,) = (one for one in steps[-1]["impacts"] if one["kind"] == "error")
    place = impact["text"].partition(": ")[0] if name != "no COMMIT" else steps[-1]["place"]
    assert place == f"{pipeline.parent / 'm.sql'}:{line}"
    assert error in impact["text"]
    assert way in impact["way"]
    assert bool(way) == bool(impact["way"])


# Migrations that only rows made up here violate, each with their tables.
VIOLATED = {
    "create unique index concurrently i on shop.items ((1))": ["shop.items"],
    "begin; alter table shop.orders add u int, add unique (u) deferrable initially deferred;"
    " update shop.orders set u = 1; commit": ["shop.orders"],
    "begin; alter table shop.orders add s text default 'x', add check (s = 'y');"
    " alter table shop.others add check (n < 0); commit": ["shop.orders", "shop.others"],
    "alter table shop.orders alter status type int using status::int": ["shop.orders"],
}


def test_rows_that_were_made_up_refuse_no_migration(pipeline, capsys):
    """A statement or transaction runs again without them; production may have such rows."""
    assert rehearsed(pipeline, ";\n".join(VIOLATED), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["notes"] == []
    notes = [
        sorted(one["table"] for one in step["impacts"] if "made-up rows" in one["text"])
        for step in report["steps"]
    ]
    assert notes == list(VIOLATED.values())


def test_a_transaction_has_the_isolation_level_of_the_migration(pipeline, capsys):
    sql = (
        "begin;\nset transaction isolation level serializable;\n"
        "create table level as select current_setting('transaction_isolation') as name;\n"
        "do $$ begin assert (select name from level) = 'serializable'; end $$;\ncommit;\n"
    )
    assert rehearsed(pipeline, sql, "--json") == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"select 1;\n\\i other.sql\n", "m.sql:2: \\i other.sql is a command of psql"),
        (b"select 1;\nselect '\xe4';\n", "m.sql:2: the file isn't UTF-8"),
        (b"select 1;\nselect 'a;\n", "m.sql:2: a quote, comment or dollar quote"),
    ],
)
def test_a_file_that_psql_alone_reads_starts_no_server(pipeline, caplog, content, message):
    path = pipeline.with_name("bad m.sql")
    path.write_bytes(content)
    schema = pipeline.with_name("schema.sql")
    schema.write_text(SCHEMA)
    options = ("--migration", str(path), "--schema", str(schema))
    assert main(["rehearse", str(pipeline), *options]) == 1
    # What ran before in this process may have chosen JSON for the log.
    assert message in caplog.text.replace("\\\\", "\\")


def test_a_report_that_cannot_be_written_starts_no_server(pipeline, caplog):
    path = pipeline.parent / "no folder" / "r.xml"
    assert rehearsed(pipeline, "select 1", "--junit", str(path)) == 1
    assert "r.xml can't be written: No such file or directory" in caplog.text


def test_an_error_before_the_rehearsal_leaves_no_report(pipeline):
    path = pipeline.parent / "r.xml"
    assert rehearsed(pipeline, "select 'a", "--junit", str(path)) == 1
    assert not path.exists()


def test_production_is_only_read(pipeline, database, monkeypatch, capsys):
    """By a superuser, who could write; the sample has real rows, and nothing gets an id."""
    database.execute("create schema shop")
    database.execute("create table shop.orders(id int primary key, status text not null, n int)")
    database.execute("insert into shop.orders select g, 'real', g from generate_series(1, 50) g")
    database.execute("analyze shop.orders")
    monkeypatch.setenv("AIRFLOW_CONN_LIVE", database.uri)
    next_id = "select pg_snapshot_xmax(pg_current_snapshot())"
    before = database.execute(next_id)
    found = read_production(database.conninfo, 7, [orders := TableId("shop", "orders")])
    assert (found.sizes["shop.orders"].rows, found.rows[orders][1].count(b"real")) == (50, 7)
    # The workload's own rows refuse no statement.
    add = "alter table shop.orders add"
    sql = ";".join(f"{add} {what}" for what in ("x int", "check (status = 'real')", "y int"))
    options = ("--from", "live", "--sample", "5", "--json")
    assert rehearsed(pipeline, sql, *options) == 0
    assert "made-up" not in capsys.readouterr().out
    assert database.execute(next_id) == before


@pytest.mark.nightly("a sample whose rows reference others")
def test_a_sample_lacks_rows_that_its_rows_reference(pipeline, database, monkeypatch, capsys):
    """Only then rows of production are no reason for an error; others are."""
    database.execute("create schema shop")
    database.execute("create table shop.others(id int primary key, n int)")
    database.execute(
        "create table shop.orders(id int primary key, status text not null, n int"
        " references shop.others)"
    )
    database.execute("insert into shop.others select g, 1 from generate_series(50, 1, -1) g")
    database.execute("insert into shop.orders select g, 'real', g from generate_series(1, 50) g")
    monkeypatch.setenv("AIRFLOW_CONN_LIVE", database.uri)
    add = "alter table shop.orders add"
    further = ("x int", "foreign key (n) references shop.others", "y int", "check (status = 'y')")
    sql = ";".join(f"{add} {what}" for what in further)
    source = yaml.safe_load(pipeline.read_text())
    source["source"]["publications"][0]["tables"].append({"name": "shop.others"})
    pipeline.write_text(yaml.safe_dump(source))
    assert rehearsed(pipeline, sql, "--from", "live", "--sample", "5", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["notes"] == []
    notes = [
        [one["text"] for one in step["impacts"] if one["kind"] == "note"]
        for step in report["steps"]
    ]
    assert [len(texts) for texts in notes] == [0, 1, 0, 1]
    assert notes[1][0].startswith("rows of the sample make it fail")
    assert notes[3][0].startswith("made-up rows make it fail")


SLOW_TRIGGERS = """
create function shop.wait() returns trigger language plpgsql as $$ begin
  begin perform pg_sleep(99); exception when query_canceled then perform pg_sleep(99); end;
  return new;
end $$;
create trigger slow before update on shop.orders for each row execute function shop.wait();
create function shop.gone() returns trigger language plpgsql as
  'begin perform new.gone; return new; end';
create trigger gone before insert on shop.orders for each row execute function shop.gone();
alter table shop.orders add x int;
"""


@pytest.mark.nightly("statements of the application that triggers refuse")
def test_triggers_that_refuse_what_the_application_writes(pipeline, capsys):
    assert rehearsed(pipeline, SLOW_TRIGGERS, "--json", "--statement-timeout", "8") == FINDINGS
    steps = json.loads(capsys.readouterr().out)["steps"]
    found = {
        step["place"].rpartition(":")[2]: [(one["kind"], one["text"]) for one in step["impacts"]]
        for step in steps
    }
    assert found == {
        "2": [],
        "6": [("app-error", "UPDATE fails: it runs longer than 8 s")],
        "7": [],
        "9": [("app-error", 'INSERT fails: record "new" has no field "gone"')],
        "10": [("readers", "added: x")],
    }


@pytest.mark.nightly("a server of one's own is the rarer choice")
def test_a_server_of_ones_own_is_left_as_it_was(pipeline, postgres, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_OWN", postgres.uri())
    with psycopg.connect(postgres.conninfo(), autocommit=True) as connection:
        state = (
            "select array(select datname::text from pg_database order by 1),"
            " array(select rolname::text from pg_roles order by 1),"
            " array(select slot_name::text from pg_replication_slots order by 1)"
        )
        before = connection.execute(state).fetchall()
        # A rehearsal that was killed together with the process that removes what is left.
        connection.execute("create database waldelta_rehearsal_1_0123abcd")
        ((oid,),) = connection.execute(
            "select oid from pg_database where datname ~ '^waldelta_rehearsal_'"
        ).fetchall()
        os.utime(postgres.data / "base" / str(oid), (0, 0))
        assert rehearsed(pipeline, "truncate shop.orders, shop.items", "--scratch", "own") == 0
        assert connection.execute(state).fetchall() == before


def test_nothing_stays_after_a_kill(pipeline, tmp_path):
    """kill -9 ends the command while its server runs."""
    (tmp_path / "schema.sql").write_text(SCHEMA)
    (tmp_path / "m.sql").write_text("select pg_sleep(600)")
    # PostgreSQL's user can't enter pytest's folder, and the path of a socket has a limit.
    temporary = Path(tempfile.mkdtemp(prefix="kill-"))
    command = [sys.executable, "-m", "waldelta", "rehearse", str(pipeline), "--migration"]
    command += [str(tmp_path / "m.sql"), "--schema", str(tmp_path / "schema.sql")]
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen([*command, "--statement-timeout", "600"], env=environment)

    def servers() -> list[Path]:
        return list(temporary.glob("waldelta-rehearsal-*/server/data/postmaster.pid"))

    wait_until(lambda: servers() and _sleeps(servers()[0]))
    server = int(servers()[0].read_text().splitlines()[0])
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not list(temporary.iterdir()) and not psutil.pid_exists(server))
    temporary.rmdir()


def test_a_rehearsal_removes_what_killed_ones_left(tmp_path, monkeypatch):
    """The process that removes a folder is killed as well; a folder in use stays."""
    temporary = Path(tempfile.mkdtemp(prefix="kill-"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    left, used = (temporary / f"waldelta-rehearsal-{name}" for name in ("left", "used"))
    for folder in (left, used):
        (folder / "server").mkdir(parents=True)
        os.utime(folder, (0, 0))
    handle = os.open(used, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with scratch_database(None) as scratch:
        own = scratch.lake.parent
        assert set(temporary.iterdir()) == {used, own}
        os.utime(own, (0, 0))
        with scratch_database(None):
            assert own.exists()
    os.close(handle)
    shutil.rmtree(used)
    temporary.rmdir()


def _sleeps(pid_file: Path) -> bool:
    """Whether the migration's statement runs on the server."""
    # A process of initdb may just have ended, and the file may still be empty.
    with suppress(OSError, ValueError, psutil.Error):
        pid = int(pid_file.read_text().partition("\n")[0])
        return any("SELECT" in " ".join(one.cmdline()) for one in psutil.Process(pid).children())
    return False

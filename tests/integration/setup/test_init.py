"""waldelta init: what it writes loads, passes check, and gives a role what it needs to run."""

import os
import pty
import re
import subprocess
import sys

import psycopg
import pytest

from tests.support.servers.roles import new_role
from waldelta.cli.command_line import main
from waldelta.config import load_pipeline_file
from waldelta.jobs import Pipeline

TABLES = '''
create schema "odd.schema";
create schema "Sales";
create table public.orders (id int primary key, amount numeric(12, 2), at timestamptz);
create table public."order" ("select" int primary key, "user" text);
create table "Sales"."Mixed Case" ("Id" int primary key, "from" date);
create table "odd.schema"."with.dot, and ""quote""" (id int primary key);
create table public."line
break ${HOME} # 'x': -" (id int primary key);
create table public.log (at timestamptz, message text);
create table public.full_log (at timestamptz, message text);
alter table public.full_log replica identity full;
create table public.indexed (id int not null unique, n int);
alter table public.indexed replica identity using index indexed_id_key;
create table public.mute (id int primary key);
alter table public.mute replica identity nothing;
create table public.events (id int, day date, primary key (day, id)) partition by range (day);
create table public.events_2025 partition of public.events
  for values from ('2025-01-01') to ('2026-01-01');
create table public.events_2026 partition of public.events
  for values from ('2026-01-01') to ('2027-01-01') partition by list (id);
create table public.events_2026_1 partition of public.events_2026 default;
create table public.mixed (id int primary key) partition by list (id);
create table public.mixed_1 partition of public.mixed for values in (1);
alter table public.mixed_1 replica identity full;
create table public.rootless (id int) partition by list (id);
create table public.rootless_1 partition of public.rootless for values in (1);
create table public.docs (id int primary key, body text, place point, kind text,
                          length int generated always as (length(body)) stored);
create table public.secret (id int primary key);
alter table public.secret enable row level security;
insert into public.docs select n, repeat(md5(n::text), 200), null, 'a'
  from generate_series(1, 50) n;
insert into public.docs select n, string_agg(md5(random()::text), ''), null, 'a'
  from generate_series(51, 80) n, generate_series(1, 1000) group by n;
insert into public.orders select n, n, now() from generate_series(1, 5000) n;
analyze;
'''
UNFIT = """
create unlogged table public.scratch (id int primary key);
create table public.clash (id int primary key, "ID" int);
create foreign data wrapper nowhere; create server nowhere foreign data wrapper nowhere;
create foreign table public.remote (id int) server nowhere;
create materialized view public.sums as select 1 as n;
"""


@pytest.fixture
def source(database, monkeypatch, tmp_path):
    """Has the tables, and is the connection shop_source."""
    database.execute(TABLES)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", database.uri)
    monkeypatch.chdir(tmp_path)
    return database


def init(*options: str) -> int:
    return main(["init", "shop_source", "--pipeline", "shop", "--output", "shop.yml", *options])


def test_a_file_of_all_tables_passes_check(source, lake, tmp_path, capsys):
    """Whatever tables are named, and whichever key they have."""
    source.execute(UNFIT)
    assert init("--yes", "--root", lake) == 0
    text = (tmp_path / "shop.yml").read_text()
    main_publication, inserts = load_pipeline_file(tmp_path / "shop.yml").source.publications
    names = {entry.name for entry in main_publication.tables}
    assert names == {
        "public.orders",
        "public.order",
        '"Sales"."Mixed Case"',
        '"odd.schema"."with.dot, and ""quote"""',
        "public.\"line\nbreak ${HOME} # 'x': -\"",
        "public.full_log",
        "public.indexed",
        "public.events",
        "public.docs",
        "public.secret",
    }
    keyless = {entry.name for entry in inserts.tables}
    assert keyless == {"public.log", "public.mute", "public.mixed", "public.rootless"}
    assert set(inserts.publish) == {"insert", "truncate"}
    for name, reason in (
        ("scratch", "unlogged"),
        ("clash", "Delta ignores case"),
        ("remote", "a foreign table"),
        ("sums", "a materialized view"),
    ):
        assert re.search(rf"^    # public\.{name}: .*{reason}", text, re.MULTILINE), name
    capsys.readouterr()
    assert main(["check", "shop.yml"]) == 0, capsys.readouterr().err
    assert source.execute("select count(*) from pg_publication") == [(0,)]


def test_the_file_says_what_it_knows_of_a_table(source, tmp_path):
    assert init("--tables", "public.orders,public.docs,public.events,public.log") == 0
    text = (tmp_path / "shop.yml").read_text()

    def comments(name: str) -> str:
        return re.search(rf"((?:^ +#.*\n)+) +- name: {re.escape(name)}\n", text, re.MULTILINE)[1]

    assert "≈ 5,000 rows" in comments("public.orders")
    assert "key (id), replica identity default" in comments("public.orders")
    docs = comments("public.docs")
    assert "generated, not published: length" in docs
    assert "text in the lake: place (point)" in docs
    assert re.search(r"big values in .*body.* stored out of line", docs)
    assert "partition root with 2 partitions: one target" in comments("public.events")
    assert "a copy stops at a value of key column day" in comments("public.events")
    assert "it has no primary key, so only inserts and truncates are" in comments("public.log")
    assert "0 rows, 0 bytes" in comments("public.log")
    assert "events_2025" not in text


def test_the_sql_makes_a_role_that_can_run_setup(source, lake, tmp_path, monkeypatch):
    """A superuser runs it; the role then finds all in place, and makes the slot."""
    assert init("--yes", "--root", lake) == 0
    role = "shop_reader"
    sql = (tmp_path / "shop.sql").read_text()
    assert "password" not in re.sub(r"--.*", "", sql)
    server = source.server
    ran = subprocess.run(
        [server.bin / "psql", "-X", "-q", "-d", source.conninfo, "-f", tmp_path / "shop.sql"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    try:
        source.execute(f"alter role {role} password 'secret'")
        monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", server.uri(source.name, role, "secret"))
        pipeline = Pipeline.load("shop.yml")
        plan = pipeline.check()
        assert plan.problems == ()
        # Such a role asks for no more grants, on partitions neither.
        assert [told for told in plan.warnings if "may not read" in told] == []
        assert plan.statements == ()
        assert plan.create_slot
        pipeline.setup()
        source.execute("select pg_drop_replication_slot('shop_cdc')")
    finally:
        source.execute("drop publication shop_pub; drop publication shop_inserts_pub")
        source.execute(f"drop owned by {role}")
        source.execute(f"drop role {role}")


def test_names_that_the_server_has_already_are_not_taken_again(source, lake, tmp_path, caplog):
    """The script said that the publication doesn't exist yet; setup refused the file."""
    source.execute("create publication shop_pub for table public.orders")
    source.execute("select pg_create_logical_replication_slot('shop_cdc', 'pgoutput')")
    assert init("--tables", "public.orders", "--root", lake) == 1
    assert (
        "the server has slot shop_cdc and publication shop_pub already, which pipeline 'shop' would"
        " create: choose another pipeline name (--pipeline)"
    ) in caplog.text
    assert list(tmp_path.glob("shop.*")) == []
    source.execute("select pg_drop_replication_slot('shop_cdc')")


def test_the_sql_is_written_again_after_the_file_was_edited(source, lake, tmp_path, capsys):
    """The owner's script then has the new table's grants, and alters the publication."""
    assert init("--tables", "public.orders", "--root", lake) == 0
    path, sql_path = tmp_path / "shop.yml", tmp_path / "shop.sql"
    path.write_text(
        path.read_text().replace(
            "- name: public.orders",
            "- name: public.orders\n          where: id > 1\n        - name: public.docs",
        )
    )
    sql_path.write_text(f"-- mine\n{sql_path.read_text()}")
    again = ["init", "shop_source", "--sql", "shop.yml"]
    assert main(again) == 1, "a script of others is kept"
    sql_path.unlink()
    capsys.readouterr()
    assert main(again) == 0
    sql = sql_path.read_text()
    assert sql in capsys.readouterr().out
    assert "grant select on public.docs, public.orders to shop_reader;" in sql
    assert 'create publication "shop_pub" for table only "public"."docs"' in sql
    source.execute(sql[sql.index("begin;") :])
    path.write_text(path.read_text().replace("- name: public.docs", "- name: public.indexed"))
    assert main(again) == 0
    sql = sql_path.read_text()
    assert 'alter publication "shop_pub"' in sql
    assert "create publication" not in sql


def test_a_role_that_only_reads_gets_grants_instead_of_a_new_role(
    source, lake, tmp_path, monkeypatch
):
    role = f"poor_{source.name}"
    source.execute(f"create role {role} login password 'secret'")
    try:
        uri = source.server.uri(source.name, role, "secret")
        monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", uri)
        assert init("--schema", 'public,"odd.schema"', "--root", lake) == 0
        sql = (tmp_path / "shop.sql").read_text()
        assert "create role" not in sql
        assert f"alter role {role} replication;" in sql
        assert f'grant usage on schema "odd.schema", public to {role};' in sql
        (granted,) = re.findall(rf"^grant select on (.*?) to {role};", sql, re.M | re.S)
        assert 'public."order"' in granted
        assert "Sales" not in sql
    finally:
        source.execute(f"drop role {role}")


def test_a_locked_table_stops_nothing(source, lake, tmp_path):
    with source.connect() as other:
        other.execute("lock table public.orders")
        assert init("--yes", "--root", lake) == 0
    assert "public.orders" in (tmp_path / "shop.yml").read_text()


REFUSED = {
    "there is no table public.nothing": ["--tables", "public.nothing"],
    "did you mean public.orders?": ["--tables", "public.orderss"],
    "is a partition: name its root, public.events": ["--tables", "public.events_2025"],
    "public.scratch can't be replicated: unlogged": ["--tables", "public.scratch"],
    "filter 'id >' can't be read": ["--tables", "public.orders", "--where", "id >"],
    'column "idd" does not exist': ["--tables", "public.orders", "--where", "idd > 1"],
    "--where is the filter of one table": ["--yes", "--where", "id > 1"],
    "schema 'nothing' has no table": ["--schema", "nothing"],
    "a pipeline's name has lower-case letters": ["--yes", "--pipeline", "Shop!"],
    "root is a URI": ["--yes", "--root", "relative"],
    "choose with --tables or --schema, or take all tables and defaults with --yes": [],
}


def test_what_is_refused_writes_nothing(source, tmp_path, caplog):
    source.execute("create unlogged table public.scratch (id int primary key)")
    for message, options in REFUSED.items():
        caplog.clear()
        assert init(*options) == 1
        # The text may be JSON: PySpark gives its format to the handlers that it finds.
        assert message in "\n".join(caplog.messages)
    assert list(tmp_path.glob("shop.*")) == []


def test_rows_of_a_table_that_is_not_analyzed_are_no_guess(source, tmp_path, monkeypatch, capsys):
    """PostgreSQL's planner takes ten pages for granted: hundreds of rows where there are two."""
    source.execute("create table public.fresh (id int primary key)")
    source.execute("insert into public.fresh values (1), (2)")
    with new_role(source, "newcomer", "login") as role:
        source.execute(f"grant select on public.fresh to {role}")
        uri = source.server.uri(source.name, role, "p")
        monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", uri)
        assert init("--tables", "public.fresh") == 0
    assert "shop.yml: 1 table, not analyzed yet, 8 kB" in capsys.readouterr().out
    assert "# not analyzed yet, 8 kB, key (id)" in (tmp_path / "shop.yml").read_text()


@pytest.mark.parametrize("name", ["shop.yml", "shop.sql"])
def test_no_file_is_overwritten(source, tmp_path, caplog, name):
    (tmp_path / name).write_text("mine")
    assert init("--yes") == 1
    assert f"{name} exists, and init overwrites nothing: name another file" in caplog.text
    assert [(path.name, path.read_text()) for path in tmp_path.glob("shop.*")] == [(name, "mine")]


def test_a_uri_is_refused_without_showing_it(source, caplog, capsys, monkeypatch):
    """Nor to Airflow, which is asked by the arguments of a process."""
    monkeypatch.setattr("waldelta.cli.init.take_from_airflow", lambda _: pytest.fail("asked"))
    assert main(["init", "postgresql://me:secret-word@host/db", "--yes"]) == 1
    assert "not a URI" in caplog.text
    assert "secret-word" not in caplog.text + str(capsys.readouterr())


def test_a_database_without_tables_is_named(database, monkeypatch, caplog):
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", database.uri)
    assert init("--yes") == 1
    assert f"database '{database.name}' has no table that can be replicated" in caplog.text


@pytest.mark.parametrize(
    "answers, names",
    [
        (["", "", "", ""], None),
        (["99", "1-2", "Bad Name", "mine", "/no/uri", "file:///tmp/other", "never", ""], 2),
        pytest.param(['"odd.schema", public.orders', "", "", ""], 2,
                     marks=pytest.mark.nightly("names instead of numbers")),
    ],
    ids=["defaults", "corrected", "names"],
)  # fmt: skip
def test_on_a_terminal_it_asks(source, tmp_path, answers, names):
    """Enter takes each default; an answer that can't be is asked again."""
    ours, theirs = pty.openpty()
    program = "import sys; from waldelta.__main__ import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, "init", "shop_source", "--output", "shop.yml"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ,
    ) as process:
        os.close(theirs)
        os.write(ours, "".join(f"{answer}\n" for answer in answers).encode())
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux's end of a terminal.
                break
            if not part:
                break
            shown += part
        os.close(ours)
        assert process.wait() == 0, (shown.decode(), process.stderr.read().decode())
    file = load_pipeline_file(tmp_path / "shop.yml")
    listed = [entry for publication in file.source.publications for entry in publication.tables]
    assert len(listed) == (names or 14)
    assert b"public.orders: " in shown
    assert b"waldelta setup shop.yml" in shown


def test_the_database_is_only_read(source, lake):
    """Also by a role whose transactions could write."""
    with psycopg.connect(source.conninfo, autocommit=True) as session:
        ((before,),) = session.execute("select pg_current_xact_id()::text").fetchall()
        assert init("--yes", "--root", lake) == 0
        ((after,),) = session.execute("select pg_current_xact_id()::text").fetchall()
    assert int(after) == int(before) + 1

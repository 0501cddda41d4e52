"""Names and values that are SQL, shell, HTML or paths stay what they are in every verb."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from psycopg import sql

from tests.oracles.compare import differing
from tests.oracles.target_rows import target_rows
from tests.support.fixtures.postgres import new_database
from tests.support.pipelines import new_pipeline, pipeline_file
from waldelta.cli._options import parse
from waldelta.errors import NameUnreadable
from waldelta.jobs import Pipeline
from waldelta.jobs.consume import consume
from waldelta.jobs.decide import run_decide
from waldelta.lake import Lake
from waldelta.lake.ledger import WAITING, Decision, Decisions, now
from waldelta.spark_sql import quote

pytestmark = pytest.mark.spark

SCHEMA = "a\"b`c',;$$\n../<script>alert(1)</script>%2e"
TABLE = "../../x,y`\"'; drop table canary;--$$\\é\n<img src=x>%2e"
KEY = "k\"'); drop table canary;--`"
VALUE = 'a`b<script>alert(1)</script>\'$$\\"\n../%2e; ${env:HOME}"y"'
LABEL = "<img src=x>'; drop table canary;--`"
PUBLICATION = "p\"'; drop table canary;--<script>alert(1)</script>$$`\n\\! x"
SLOTS_PIPELINE = "drop_table_canary"
TEXTS = [
    "'; drop table canary; --",
    "<script>alert(1)</script><img src=x>",
    "\\",
    "$$`$(touch x)`$$",
    '"',
    "\n../%2e%00",
    "${x}{{ x }}",
]
RUN_ID = "manual__<img src=x>/../'; drop table canary;--`$(touch x)"
MARKUP = ("<script>alert(1)", "<img src=x")
JANUARY, FEBRUARY = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)


def quoted_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


NAME = f"{quoted_name(SCHEMA)}.{quoted_name(TABLE)}"
FEW = f"{quoted_name(SCHEMA)}.{quoted_name(LABEL)}"
# Where a backslash escapes the next quote, the rest ends the statement and drops a table.
ESCAPES = (
    "or true)); commit; begin; drop table public.canary; commit; "
    "create publication another for table only public.other where ((n <> ' -- '"
)
FILTER = (
    f"{quoted_name(VALUE)} <> 'it''s; drop table canary; -- ` $$ <script>' and (t <> 'a\\' or t = '"
    f" {ESCAPES}\n)"
)


@pytest.fixture
def root(tmp_path):
    """A folder that is SQL and shell as well."""
    return tmp_path / "all" / "la`ke;'$(x)\"<b>&"


@pytest.fixture
def pipeline(database, root):
    kind = quoted_name(f"e{LABEL}")
    literal = "'" + LABEL.replace("'", "''") + "'"
    database.execute(
        "create table canary(id int); insert into canary values (1); create table other(n text)"
    )
    database.execute(f"alter database {database.name} set standard_conforming_strings = off")
    database.execute(f"create schema {quoted_name(SCHEMA)}; create type {kind} as enum ({literal})")
    columns = (
        f"{quoted_name(KEY)} int primary key, {quoted_name(VALUE)} text, e {kind} default"
        f" {literal}, n numeric, t text default '\\\\'"
    )
    database.execute(f"create table {NAME} ({columns})")
    database.execute(f"alter table {NAME} replica identity full")
    database.execute(f"create table {FEW} ({columns})")
    insert(database, 0, TEXTS)
    slot = f"s_{database.name}"
    table = {"name": NAME, "where": FILTER}
    few = {"name": FEW, "columns": [KEY, VALUE]}
    publication = {"name": PUBLICATION, "tables": [table, few]}
    source = {
        "conn_id": "test_source",
        "slot": slot,
        "publications": [publication],
        "options": {"messages": True},
    }
    target = {
        "root": f"file://{root}",
        "tables": {NAME: {"where": FILTER, "types": {"text": [VALUE]}}},
    }
    return Pipeline(
        pipeline_file("", slot, pipeline=SLOTS_PIPELINE, source=source, target=target, quality={})
    )


def insert(database, first: int, texts: list[str]) -> None:
    for number, text in enumerate(texts, first):
        for table in (NAME, FEW):
            columns = f"{quoted_name(KEY)}, {quoted_name(VALUE)}, n"
            values = sql.SQL(", ").join(
                [sql.Literal(number), sql.Literal(text), sql.Literal("NaN")]
            )
            into = sql.SQL(f"insert into {table} ({columns}) values ") + sql.SQL("({})").format(
                values
            )
            database.connection.execute(into)


@pytest.mark.soak("every verb on hostile names")
def test_every_verb(runner, database, pipeline, root, tmp_path):
    """In one life: what a DBA runs, copies, changes, checks, repairs and reports of it."""
    script = tmp_path / "setup.sql"
    script.write_text(pipeline.check().as_sql())
    psql = [str(database.server.bin / "psql"), "-X", "-d", database.conninfo, "-f", str(script)]
    done = subprocess.run(psql, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert database.execute("select pubname from pg_publication") == [(PUBLICATION,)]
    script.unlink()

    pipeline.setup(RUN_ID)
    assert pipeline.sync(runner, reason=TEXTS[0], run_id=RUN_ID).status == "succeeded"
    insert(database, 100, TEXTS)
    database.execute(
        f"update {NAME} set {quoted_name(KEY)} = 1000, n = 1"
        f" where {quoted_name(KEY)} = 100".encode()
    )
    database.execute("select pg_logical_emit_message(true, %s, %s)", (TEXTS[0], TEXTS[1]))
    job = pipeline.job(RUN_ID, run_type="scheduled", interval_start=JANUARY, interval_end=FEBRUARY)
    assert consume(runner, job).status == "succeeded"
    assert pipeline.replay(runner, JANUARY, FEBRUARY, tables=[NAME]).status == "succeeded"

    state = pipeline.job().read_states()[NAME]
    key = f'{{"{KEY}": "1"}}'.replace('k"', 'k\\"')
    lacking = Decision(
        now(), RUN_ID, WAITING, NAME, state.generation, 1, key, [VALUE], key, 24, None, "gone"
    )
    Decisions(Lake(pipeline.file.target.root)).add([lacking])
    assert run_decide(runner, pipeline.job(), "retry", tables=[NAME]).status == "succeeded"
    named = parse(["resync", "f.yml", f"--tables={NAME}, {FEW}"]).tables
    assert named == [NAME, FEW]
    assert pipeline.resync(runner, named[:1], reason=TEXTS[1]).status == "succeeded"
    assert pipeline.validate(runner, RUN_ID).status == "succeeded"
    assert pipeline.maintain(runner).status == "succeeded"
    assert pipeline.status()["targets"][NAME]["status"] == "synced"

    assert differing(runner, pipeline.job()) == {}
    for name in (NAME, FEW):
        target = runner.spark().read.format("delta").load(pipeline.target_path(name))
        assert sorted(row[0] for row in target.select(quote(VALUE)).collect()) == sorted(TEXTS * 2)
    pipeline.teardown(RUN_ID)
    assert database.execute("select count(*) from pg_publication") == [(0,)]
    assert database.execute("select count(*) from canary") == [(1,)]
    assert [path.name for path in tmp_path.iterdir()] == ["all"]
    assert [path.name for path in root.parent.iterdir()] == [root.name]
    assert sorted(path.name for path in root.iterdir())[0] == "_waldelta"
    assert not list(Path.cwd().glob("x"))
    pages = list((root / "_waldelta" / "data_docs").rglob("*.html"))
    assert len(pages) >= 3
    assert [
        (page.name, text) for page in pages for text in MARKUP if text in page.read_text()
    ] == []


UNPUBLISHED = {
    "table": b'create table "a\x81"(id int)',
    "column": b'create table another(id int primary key, "c\x81" int)',
    "type": b'create type "e\x81" as enum (\'a\x81\'); create table other(x "e\x81")',
    "schema, function": b'create schema "s\x81"; create function "f\x81"() returns int'
    b" language sql return 1",
    "publication": b'create publication "p\x81"',
}
PUBLISHED = {
    "column": (b'alter table t add "c\x81" int', 'column "t.c\\x81" (oid '),
    "type": (b'create type "e\x81" as enum (\'a\'); alter table t add e "e\x81"',
             'type "e\\x81" (oid '),
    "partition": ((b"create table h(id int primary key) partition by range (id);"
                   b'create table "h\x81" partition of h for values from (1) to (9)'),
                  'table "h\\x81" (oid '),
}  # fmt: skip


@pytest.fixture
def win1252(postgres, monkeypatch):
    options = "encoding 'WIN1252' locale 'C' template template0"
    with new_database(postgres, monkeypatch, options) as database:
        database.execute("create type \"tÿpe\" as enum ('€')")
        database.execute('create table t(id int primary key, v text, "ç" "tÿpe", "é" "tÿpe"[])')
        database.execute("insert into t values (1, '€é', '€', '{€}')")
        yield database


@pytest.mark.nightly("names that UTF-8 lacks, of each further kind")
def test_names_that_utf_8_lacks_elsewhere(runner, win1252, lake):
    """What nobody publishes stops neither copy, run nor comparison."""
    pipeline = new_pipeline(win1252, lake)
    pipeline.setup()
    for statements in UNPUBLISHED.values():
        win1252.execute_bytes(statements, "WIN1252")
    assert pipeline.check().problems == ()
    assert pipeline.sync(runner).status == "succeeded"
    win1252.execute("insert into t values (2, 'ÿ', '€', '{€,€}')")
    assert pipeline.consume(runner).status == "succeeded"
    assert pipeline.reconcile(runner).status == "succeeded"
    job = pipeline.job()
    assert differing(runner, job) == {}
    assert target_rows(job, "t", "v", "ç", "é") == [("ÿ", "€", ["€", "€"]), ("€é", "€", ["€"])]


@pytest.mark.parametrize("statements, named", PUBLISHED.values(), ids=PUBLISHED)
def test_names_that_utf_8_lacks_in_a_publication(win1252, lake, statements, named):
    """An error of its own says which object is to be renamed."""
    win1252.execute_bytes(statements, "WIN1252")
    table = "public.h" if b"create table h" in statements else "public.t"
    pipeline = new_pipeline(win1252, lake, [table])
    for verb in (pipeline.check, pipeline.setup):
        with pytest.raises(NameUnreadable, match="rename ") as caught:
            verb()
        assert named in str(caught.value)
        assert not caught.value.retryable


def test_an_owner_whose_name_utf_8_lacks(win1252, lake):
    role = f"r_{win1252.name}".encode() + b"\x81"
    win1252.execute_bytes(
        b'create role "%b"; alter table t owner to "%b"' % (role, role), "WIN1252"
    )
    try:
        with pytest.raises(NameUnreadable, match=r'of role "r_\w+\\x81" \(oid \d+\): rename it'):
            new_pipeline(win1252, lake).check()
    finally:
        win1252.execute_bytes(b'alter table t owner to postgres; drop role "%b"' % role, "WIN1252")

"""Values that print the name of a catalog object: a rename changes them, and sends nothing."""

import pytest

from tests.oracles.compare import differing
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.lake.ledger import TableState, now
from waldelta.pipeline.drift import read_catalog_state
from waldelta.pipeline.drift.unsent_changes import may_contain, relabelled
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.sync.sync import sync

OBJECTS = """
create schema s;
create role {role};
create table s.t (id int);
create index t_id on s.t (id);
create type s.pair as (a int);
create function s.f(s.pair) returns int language sql as 'select 1';
create operator s.### (function = s.f, rightarg = s.pair);
create collation s.german (locale = 'C');
create text search dictionary s.plain (template = pg_catalog.simple);
create text search configuration s.words (copy = pg_catalog.simple);
create table s.other (id int);
create domain s.relation as regclass;
create type s.of_both as (f regproc, p regprocedure);
"""
# Each column's type and value, and what changes the value's text.
COLUMNS = {
    "class": ("regclass", "'s.t'", "alter table s.t rename to t2"),
    "index": ("regclass", "'s.t_id'", "alter index s.t_id rename to t_id2"),
    "schema": ("regclass", "'s.t'", "alter schema s rename to s2"),
    "moved": ("regclass", "'s.t'", "alter table s.t set schema public"),
    "dropped": ("regclass", "'s.t'", "drop table s.t"),
    "type": ("regtype", "'s.pair'", "alter type s.pair rename to pair2"),
    "array_type": ("regtype", "'s.pair[]'", "alter type s.pair rename to pair2"),
    "proc": ("regproc", "'s.f'", "alter function s.f(s.pair) rename to f2"),
    "procedure": ("regprocedure", "'s.f(s.pair)'", "alter function s.f(s.pair) rename to f2"),
    "argument": ("regprocedure", "'s.f(s.pair)'", "alter type s.pair rename to pair2"),
    "oper": ("regoper", "'s.###'", "alter operator s.###(none, s.pair) set schema public"),
    "operator": ("regoperator", "'s.###(none, s.pair)'", "alter type s.pair rename to pair2"),
    "role": ("regrole", "'{role}'", "alter role {role} rename to {role}2"),
    "grant": ("aclitem", "'{role}=r/postgres'", "alter role {role} rename to {role}2"),
    "namespace": ("regnamespace", "'s'", "alter schema s rename to s2"),
    "public": ("regnamespace", "'public'", "alter schema public rename to private"),
    "config": ("regconfig", "'s.words'", "alter text search configuration s.words rename to w2"),
    "dictionary": (
        "regdictionary", "'s.plain'", "alter text search dictionary s.plain rename to p2",
    ),
    "collation": ("regcollation", "'s.german'", "alter collation s.german rename to g2"),
    "array": ("regclass[]", "'{{s.t,s.other}}'", "alter table s.t rename to t2"),
    "domain": ("s.relation", "'s.t'", "alter table s.t rename to t2"),
    "composite": ("s.of_both", "row('s.f', 's.f(s.pair)')", "alter type s.pair rename to pair2"),
}  # fmt: skip
# None of these changes a text.
HARMLESS = [
    "create table s.later (id int); drop table s.later",
    "create temporary table t (id int); alter table t rename to t3; drop table t3",
    "vacuum full s.t",
    "reindex index s.t_id",
    "alter table s.t add n int default 5",
    "alter table s.t owner to {role}; alter table s.t owner to postgres",
]


@pytest.fixture
def role(any_database):
    """A role that values name; each column of the table ``named`` has one value."""
    role = f"r_{any_database.name}"
    any_database.execute(OBJECTS.format(role=role))
    columns = ", ".join(f'"{name}" {kind}' for name, (kind, _, _) in COLUMNS.items())
    values = ", ".join(value.format(role=role) for _, value, _ in COLUMNS.values())
    any_database.execute("create schema app")
    any_database.execute(f"create table app.named ({columns}, plain text, number oid)")
    any_database.execute(f"insert into app.named values ({values}, 's.t', 's.t'::regclass)")
    yield role
    any_database.execute(f"drop owned by {role}; drop role {role}")


def read(conn):
    """How the table's one row prints, and how the catalogs say that it is stored."""
    cursor = conn.execute("select t.*, t.tableoid::bigint as oid from app.named t")
    names = [column.name for column in cursor.description]
    printed = ", ".join(f'"{name}"::text' for name in names[:-1])
    (texts,) = conn.execute(f"select {printed} from app.named").fetchall()
    ((*_, oid),) = cursor.fetchall()
    state = TableState(now(), "r", "app.named", 1, "synced", relation_ids=[oid])
    storage = read_catalog_state(conn, [state])["app.named"].storage
    return dict(zip(names, texts, strict=False)), storage


def changed(conn, before):
    """The columns whose text is another one now, and those of which the catalogs say that."""
    (texts, storage), (now_texts, now_storage) = before, read(conn)
    numbers = relabelled(storage, now_storage)
    return (
        {name for name, text in texts.items() if now_texts[name] != text},
        {
            name
            for number, name in enumerate(texts, 1)
            if any(may_contain(texts[name], label) for label in numbers.get(number, ()))
        },
    )


@pytest.mark.parametrize(
    "most",
    [
        pytest.param(1000, id="few"),
        pytest.param(8, id="by schema", marks=pytest.mark.nightly("more objects by schema")),
        pytest.param(0, id="many schemas", marks=pytest.mark.nightly("more objects at once")),
    ],
)
def test_the_columns_that_print_another_text(any_database, any_conn, role, monkeypatch, most):
    """Also where so many objects exist that only digests of schemas are recorded."""
    monkeypatch.setattr("waldelta.pipeline.drift.catalog_state.MOST_OBJECTS", most)
    before = read(any_conn)
    for name, (_, _, statement) in COLUMNS.items():
        with any_conn.transaction(force_rollback=True):
            any_conn.execute(statement.format(role=role))
            print_otherwise, noticed = changed(any_conn, before)
        assert name in print_otherwise, name
        assert print_otherwise <= noticed, name
        assert not noticed & {"plain", "number"}, name
    assert changed(any_conn, before) == (set(), set())


@pytest.mark.nightly("a copy after a renamed object; units have the rule")
def test_only_a_name_that_a_row_has_asks_for_a_copy(runner, database, lake):
    """In the target, or in a change that has landed and isn't applied."""
    database.execute("create schema s; create table s.one(); create table s.two()")
    database.execute("create table s.none(); create table t(id int primary key, v regclass[])")
    database.execute("insert into t values (1, '{s.one}')")
    job = bare_job(database, lake)
    sync(runner, job)
    database.execute("drop table s.none; create table s.later()")
    assert not check_idle(job).has_work
    database.execute("insert into t values (2, '{s.later}')")
    assert consume(runner, job).warnings == []
    for names, waits in (("two", True), ("later", False)):
        if waits:
            database.execute(f"insert into t values (3, '{{s.{names}}}')")
        database.execute(f'alter table s.{names} rename to "{names} of old"')
        (warning,) = consume(runner, job).warnings
        assert "the catalogs changed the values of column v (" in warning
        assert differing(runner, job) == {}
    assert not check_idle(job).has_work


def test_many_objects_take_little_of_the_ledger(any_database, any_conn, role):
    """Their names aren't recorded, and only those of the schema that was altered count."""
    any_database.execute(
        "create schema staging; do $$begin for i in 1..1200 loop execute format('create function"
        " staging.f_%s() returns int language sql return 1', i); end loop; end$$"
    )
    before = read(any_conn)
    numbers = {name: number for number, name in enumerate(before[0], 1)}
    labels = [x for x in before[1].labels if x.attnum in (numbers["proc"], numbers["procedure"])]
    assert 2 <= len(labels) < 10
    any_conn.execute("drop function staging.f_7()")
    assert changed(any_conn, before) == (set(), set())


def test_what_changes_no_text_isnt_noticed(any_database, any_conn, role):
    before = read(any_conn)
    for statement in "; ".join(HARMLESS).format(role=role).split("; "):
        any_conn.execute(statement)
    assert changed(any_conn, before) == (set(), set())

"""Which tables a statement touched, so that the rehearsal writes to them and compares them."""

from __future__ import annotations

from functools import partial

import pytest

from waldelta.rehearsal.observation import observe

SCHEMA = """
create schema s;
create type mood as enum ('ok', 'bad');
create table t(id int primary key, mood mood, n int);
create table child(id int primary key, parent int references t on delete cascade);
create table parts(id int) partition by range (id);
create table low partition of parts for values from (0) to (9);
create table s.other(id int);
insert into t values (1, 'ok', 1);
insert into child values (1, 1);
"""
# Statements with the tables that they touch; None: what may be any table's.
TOUCHED = {
    "select * from t": (),
    "alter table t add x int": ("public.t",),
    "alter table t rename to u": ("public.t", "public.u"),
    "alter schema s rename to z": ("s.other", "z.other"),
    "delete from t": ("public.child", "public.t"),
    "insert into low values (1)": ("public.low", "public.parts"),
    "alter table parts detach partition low": ("public.low", "public.parts"),
    "create table new partition of parts for values from (9) to (99)": (
        "public.new", "public.parts",
    ),
    "create table made as select * from t": ("public.made",),
    "drop table child": ("public.child", "public.t"),
    "create index concurrently i on t (n)": ("public.t",),
    "vacuum full t": ("public.t",),
    "create view v as select * from t": (),
    "comment on type mood is 'x'": (),
    "set search_path = s": (),
    "alter type mood rename value 'ok' to 'fine'": None,
    "do $$ begin perform 1; end $$": None,
}  # fmt: skip


@pytest.mark.parametrize("text", TOUCHED)
def test_what_a_statement_touches(database, text):
    database.execute(SCHEMA)
    connect = partial(database.connect, autocommit=True)
    with connect() as session, connect() as watcher:
        effect = observe(session, watcher, text, 60.0)
    touched = TOUCHED[text]
    assert effect.error is None
    assert effect.is_elsewhere == (touched is None)
    assert effect.touched == set(touched or ())

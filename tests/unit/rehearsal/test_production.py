"""What a rehearsal knows of production: how long copies take there, and its roles."""

from __future__ import annotations

import pytest

from waldelta.rehearsal.production import Production, TableSize, named_roles

GB = 1 << 30
SIZES = {"s.big": TableSize(1_000_000, 10 * GB), "s.other": TableSize(100_000, GB)}


@pytest.mark.parametrize(
    ("copies", "seconds", "speed"),
    [
        ({}, 204.8, "at an assumed 50 MB in a second"),
        ({"s.big": (9_999, 60.0)}, 204.8, "at an assumed 50 MB in a second"),
        ({"s.gone": (500_000, 60.0)}, 204.8, "at an assumed 50 MB in a second"),
        ({"s.other": (100_000, 30.0)}, 300.0, "at the speed of this pipeline's copies"),
        ({"s.other": (50_000, 15.0)}, 300.0, "at the speed of this pipeline's copies"),
        ({"s.big": (500_000, 60.0), "s.other": (100_000, 1.0)}, 120.0,
         "at the speed of its last copy"),
    ],
)  # fmt: skip
def test_a_copy_takes_as_long_as_those_before_it(copies, seconds, speed):
    production = Production("", "schema.sql", None, SIZES, copies)
    assert production.copy_time("s.big") == (pytest.approx(seconds), speed)


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ('grant select on t to a, "B ""c"', ["a", 'B "c']),
        ("alter default privileges for role a grant select on tables to größe", ["a", "größe"]),
        ("revoke all on schema public from public", []),
        ("create policy p on t to a using (extract(epoch from at) > 0)", ["a"]),
        ("ALTER TABLE t OWNER TO App", ["app"]),
        ("create schema s authorization a", ["a"]),
        ("alter table t rename column a to b", []),
        ("alter role a set search_path to b", []),
        ("insert into t select a from b", []),
    ],
)
def test_roles_that_a_statement_names(text, roles):
    assert named_roles(text) == roles

"""Filters that preflight warns of, as PostgreSQL prints them."""

import pytest

from waldelta.row_filter.runtime_errors import Pattern, raising_parts

TYPES = {
    "n": "integer", "big": "bigint", "v": "text", "c": "character varying(3)", "d": "date",
    "f": "double precision", "m": "numeric(10,2)", "j": "jsonb",
}  # fmt: skip
CASES = {
    "((10 / n) > 0)": ["division"],
    "((n % 2) = 0)": [],
    "((10 % n) = 0)": ["division"],
    "((n / 0) = 1)": ["division"],
    "((n / '-1'::integer) = 1)": ["division"],
    "((10 / NULLIF(n, 0)) > 0)": [],
    "((n + 1) > 5)": ["overflow"],
    "((- n) > 5)": ["overflow"],
    "(n > '-5'::integer)": [],
    "((v)::integer > 5)": ["a cast to integer"],
    "((big)::integer > 5)": ["a cast to integer"],
    "((n)::bigint > big)": [],
    "((n)::numeric > 1.5)": [],
    "((n)::numeric(3,1) > 1.5)": ["a cast to numeric"],
    "('1.5'::numeric(3,1) < (n)::numeric)": [],
    "((d AT TIME ZONE v) > '2020-01-01 00:00:00'::timestamp without time zone)": ["timezone"],
    "((d AT TIME ZONE 'UTC'::text) > '2020-01-01 00:00:00'::timestamp without time zone)": [],
    "((c)::text = 'JFK'::text)": [],
    "(((c)::text = 'JFK'::text) OR ((c)::text ~~ 'L%'::text))": [],
    "(v ~ c)": ["a pattern that isn't a constant"],
    "(v ~ '^a'::text)": [],
    "(((j ->> 'n'::text))::integer = 1)": ["a cast to integer"],
    "((j ->> 'n'::text) = '1'::text)": [],
    "((c)::text = ANY (ARRAY['a'::text, 'b'::text]))": [],
    "(lower(v) = 'a'::text)": [],
    "(to_date(v, 'YYYY'::text) > '2020-01-01'::date)": ["to_date"],
    "((d IS NOT NULL) AND (NOT (n = 1)))": [],
    "((f / (2)::double precision) >= (0)::double precision)": ["division"],
    "((f / NULLIF(f, (0)::double precision)) > (1)::double precision)": ["division"],
    "(((n)::double precision / '2'::double precision) > (1)::double precision)": ["division"],
    "((m / 2.0) > 1.0)": [],
    "(v ~ 'a('::text)": ["a pattern that PostgreSQL refuses"],
    "(v ~ ANY (ARRAY['b'::text, 'a('::text]))": ["a pattern that PostgreSQL refuses"],
    "(v !~~ 'a\\'::text)": ["a pattern that PostgreSQL refuses"],
    "(v ~~ 'a('::text)": [],
    "(v ~~ ANY ('{a%,b%}'::text[]))": [],
    "(OVERLAY(v PLACING 'z'::text FROM n) <> 'q'::text)": ["a part that can't be analysed"],
    "not read here (": ["a part that can't be analysed"],
}
REFUSED = {Pattern("a(", is_like=False), Pattern("a\\", is_like=True)}


@pytest.mark.parametrize(("text", "parts"), CASES.items(), ids=CASES)
def test_what_can_raise(text, parts):
    """By operations, not by the values that a table holds now."""
    assert raising_parts(text, TYPES, REFUSED) == parts


def test_a_filter_that_nobody_analysed():
    """As the pipeline file has it, it can be anything that isn't read here."""
    assert raising_parts("v is not null", TYPES, is_analysed=False) == []
    assert raising_parts("10 / n", TYPES, is_analysed=False) == ["division"]

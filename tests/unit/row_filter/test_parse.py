"""Filters: the columns they use, and what is refused with its place."""

import pytest

from waldelta.errors import ConfigError
from waldelta.row_filter import parse_row_filter
from waldelta.row_filter.parse import place


@pytest.mark.parametrize(
    "text, columns",
    [
        ("origin = 'JFK'", ("origin",)),
        ("Origin = 'JFK' and \"Dep\" > 5", ("origin", "Dep")),
        ("id % 2 = 0 -- even", ("id",)),
        ("t.a is not null", ("a",)),
        ("a in (1, 2) or b between c and 5 or not d", ("a", "b", "c", "d")),
        ("case when a > 1 then coalesce(b, 0) else nullif(c, 2) end > 3", ("a", "b", "c")),
        ("a @> array[1] and b ~ '^x' and c operator(pg_catalog.=) 3", ("a", "b", "c")),
        (("((origin)::text = ANY ((ARRAY['JFK'::character varying, 'LGA'::character"
          " varying])::text[]))"), ("origin",)),
        ("s similar to 'x%' and u ilike 'a_' and v is distinct from w", ("s", "u", "v", "w")),
        ("d >= date '2013-01-01' and date_part('year', d) = 2013", ("d",)),
        ("a = $$x;y$$ or a = ';'", ("a",)),
        ("true", ()),
    ],
)  # fmt: skip
def test_columns(text, columns):
    assert sorted(parse_row_filter(text)) == sorted(columns)


@pytest.mark.parametrize(
    "text, place",
    [
        ("a >", "line 1, column 3"),
        ("a > 1 and", "line 1, column 7"),
        ("a > 1\n  and b >>> > 2", "line 2"),
        ("a > 1) ; drop table x; --", "line 1, column 8"),
        ("a > 1) or (b > 2", "line 1, column 6"),
        ("a > 1; delete from t", "line 1, column 6"),
        ("a > 1 b", "line 1, column 7"),
        ("(a > 1", "line 1"),
        ("a, b", "line 1, column 2"),
        ("a = 'x", "its end"),
        ("a = 1 /* x", "line 1"),
        ("", "line 1, column 1"),
        ("select 1", "line 1, column 1"),
        ("a in (select 1)", "without subqueries"),
        ("*", "without subqueries or *"),
        ("not " * 5_000 + "a > 1", "nested too deeply"),
        ("(" * 5_000 + "a > 1" + ")" * 5_000, "nested too deeply"),
        ("a > 1 and app.f(a)", "line 1, column 11"),
        ("a operator(app.>) 1", "only functions, types and operators of PostgreSQL's own"),
        ("a::app.d > 1", "column 4"),
        ("cast(a as app.d) > 1", "column 11"),
    ],
    ids=lambda text: text[:40],
)
def test_refused_with_its_place(text, place):
    with pytest.raises(ConfigError) as caught:
        parse_row_filter(text)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("'a'::public.order_state_of_old)", "'a'::public.order_state_of_old"),
        ("a > 12345678901234 or b > 2", "a > 12345678901234 or"),
        ("short", "short"),
        ("a >\n b", "a >"),
        ("länge(größe) und überhaupt nichts", "länge(größe) und überhaupt"),
        ("x" * 200, "x" * 83),
    ],
)
def test_the_excerpt_of_a_place_ends_with_a_word(text, near):
    assert place(text, 0) == f"line 1, column 1 (near {near!r})"

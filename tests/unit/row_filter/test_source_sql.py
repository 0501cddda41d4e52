"""Texts that anyone could have written into the lake don't become SQL."""

import pytest

from waldelta.errors import FilterNotTranslatable
from waldelta.postgres import PgType
from waldelta.row_filter.source_sql import source_sql

TYPES = {
    "a": PgType(23, -1, "integer"),
    'x"y': PgType(25, -1, "text"),
    "at": PgType(1114, -1, "timestamp without time zone"),
    "e": PgType(16999, -1, "public.e", "enum"),
    "d": PgType(17000, -1, "public.d", "domain", base=PgType(16998, -1, '"S"."e."""', "enum")),
}
HOSTILE = [
    "pg_sleep(1) IS NULL",
    "set_config('x', 'y', false) = 'y'::text",
    "public.f(a)",
    '"public"."f"(a)',
    "(a > 1) or exists (select 1)",
    "a > (select 1)",
    "a > 1; select 1",
    "(a > 1)) union all (select 1",
    "a OPERATOR(public.>) 1",
    "a >>> 1",
    "a = ANY (pg_ls_dir('.'::text))",
    "secret = 1",
    "a::public.d = 1",
    "a::regclass IS NOT NULL",
    '(a > 1) COLLATE "x"',
    "a <*> ANY (NULL::integer[])",
    "a = 1e5::public.t",
    "(e = 'x'::public.e) and (e = 'x'::public.other)",
    "(e = 'x'::public.e(3))",
    "(e = 'x'::public.d)",
    "(e > 'x'::public.e)",
    "a",
    "now() > at",
    "'\0'::text = 'x'::text",
    "",
    "a > 1 -- b",
    "(NOT " * 3_000 + "(a > 1)" + ")" * 3_000,
    "a" + "::integer" * 3_000 + " > 1",
    "- " * 3_000 + "a > 1",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:40])
def test_nothing_but_a_condition_is_printed(text):
    with pytest.raises(FilterNotTranslatable):
        source_sql(text, TYPES)


PRINTED = [
    ("(e <> 'it''s'::public.e)", "(\"e\" <> ('it''s')::public.e)"),
    ("(e = ANY ('{x}'::public.e[]))", "(\"e\" = ANY (('{x}')::public.e[]))"),
    ('((d)::"S"."e.""" = \'x\'::"S"."e.""")', '(("d")::"S"."e.""" = (\'x\')::"S"."e.""")'),
    ("(a > 5)", '("a" > 5)'),
    ("(\"x\"\"y\" = 'it''s; --'::text)", '("x""y" = (\'it\'\'s; --\')::"text")'),
    ('("x""y" <> \'\\\'::text)', '("x""y" <> (E\'\\\\\')::"text")'),
    ("((a IS NOT NULL) AND (NOT (a = 1)))", '(("a" IS NOT NULL) AND (NOT ("a" = 1)))'),
    ("(a = ANY (ARRAY[1, 2]))", '("a" = ANY (ARRAY[1, 2]))'),
    ("(a = ANY ('{1,2}'::integer[]))", '("a" = ANY ((\'{1,2}\')::"int4"[]))'),
    ("(- a) < (-1)", '((- "a") < (- 1))'),
    ("CASE WHEN (a > 1) THEN true ELSE false END", 'CASE WHEN ("a" > 1) THEN true ELSE false END'),
    ("(a IS DISTINCT FROM 1)", '("a" IS DISTINCT FROM 1)'),
    ("(at > '2024-01-01 00:00:00'::timestamp(3) without time zone)",
     '("at" > (\'2024-01-01 00:00:00\')::"timestamp"(3))'),
    ('("left"("x""y", 2) = \'ab\'::text)', '("left"("x""y", 2) = (\'ab\')::"text")'),
    ('(("x""y")::character(3) = \'a\'::character(3))',
     '(("x""y")::"bpchar"(3) = (\'a\')::"bpchar"(3))'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "printed"), PRINTED)
def test_every_name_and_constant_is_quoted(text, printed):
    assert source_sql(text, TYPES) == printed

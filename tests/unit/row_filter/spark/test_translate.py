"""A row filter in Spark SQL: faithful, or refused with place and reason."""

import re

import pytest

from waldelta.errors import FilterNotTranslatable
from waldelta.lake.ledger import ColumnState
from waldelta.row_filter import Collation, EnumType, RowFilter, published_filter
from waldelta.row_filter._signatures import CASTS, SIGNATURES
from waldelta.row_filter.spark._operators_and_functions import BUILT, TEMPLATES
from waldelta.row_filter.spark.translate import _STRUCTURE, spark_condition
from waldelta.row_filter.spark.values import OPERATORS


def column(name, type_name, spark_type):
    return ColumnState(name, 0, -1, type_name, spark_type, not_null=False)


COLUMNS = [
    column("origin", "text", "string"),
    column("name_c", "text", "string"),
    column("odd", "text", "string"),
    column("status", "character varying(10)", "string"),
    column("code", "character(3)", "string"),
    column("v", "integer", "int"),
    column("id", "bigint", "bigint"),
    column("amount", "numeric(12,2)", "decimal(12,2)"),
    column("huge", "numeric(38,0)", "decimal(38,0)"),
    column("free", "numeric", "string"),
    column("ratio", "double precision", "double"),
    column("active", "boolean", "boolean"),
    column("day", "date", "date"),
    column("at", "timestamp with time zone", "timestamp"),
    column("uid", "uuid", "string"),
    column("doc", "jsonb", "string"),
    column("tags", "text[]", "array<string>"),
    column("Odd.Name", "integer", "int"),
    column("rounded", "numeric", "numeric as double"),
    column("document", "json", "variant"),
    column("state", "public.state", "string"),
    column("Odd.State", '"My Schema"."Order.State ""x"""', "string"),
    column("phase", "public.phase", "string"),
    column("cased", "public.citext", "string"),
]
ENUMS = {
    "state": EnumType("public.state", ("new", "it's", "done")),
    "Odd.State": EnumType('"My Schema"."Order.State ""x"""', ("a", "b")),
    "phase": EnumType("public.state", ("new", "it's", "done")),  # A domain's.
}
COLLATIONS = {"name_c": Collation.CODE_POINT, "odd": Collation.NONDETERMINISTIC}

TRANSLATED = [
    ("(origin = 'JFK'::text)", "(`origin` = 'JFK')"),
    ("((status)::text = 'a'::text)", "(`status` = 'a')"),
    ("(origin = ANY (ARRAY['JFK'::text, 'EWR'::text]))", "(`origin` in ('JFK', 'EWR'))"),
    ("((status)::text = ANY ((ARRAY['a'::character varying, 'b'::character varying])::text[]))",
     "(`status` in ('a', 'b'))"),
    ("(v <> ALL (ARRAY[1, '-2'::integer]))", "(`v` not in (1, cast('-2' as int)))"),
    ("((v >= 1) AND (v <= 5))", "((`v` >= 1) and (`v` <= 5))"),
    ("(NOT (v > 3))", "(not (`v` > 3))"),
    ("(id > '99999999999'::bigint)", "(`id` > cast('99999999999' as bigint))"),
    ("(ratio > (0.5)::double precision)", "(`ratio` > cast('0.5' as double))"),
    ("active", "`active`"),
    ("(active IS NOT TRUE)", "(`active` is not true)"),
    ("(doc IS NULL)", "((`doc` is null))"),
    ("(v IS DISTINCT FROM 3)",
     "(not (((`v` is null) and (3 is null)) or coalesce((`v` = 3), false)))"),
    ("(code = 'AB'::bpchar)", "(rtrim(`code`) = rtrim('AB'))"),
    ("(origin = 'it''s'::text)", "(`origin` = 'it\\'s')"),
    ("(origin = '${x}\\'::text)", "(`origin` = '${x}\\\\')"),
    ('("Odd.Name" = 1)', "(`Odd.Name` = 1)"),
    ("(uid = '6ecd8c99-4036-403d-bf84-cf8400f67836'::uuid)",
     "(`uid` = '6ecd8c99-4036-403d-bf84-cf8400f67836')"),
    ("(day IS NULL)", "((`day` is null and try_element_at(`_wd_raw`, 'day') is null))"),
    ("(rounded IS NULL)", "((`rounded` is null and try_element_at(`_wd_raw`, 'rounded') is null))"),
    ("(document IS NOT NULL)",
     "(not (`document` is null and try_element_at(`_wd_raw`, 'document') is null))"),
    ("((v / 2) = 1)", "(cast(cast(`v` as bigint) div cast(2 as bigint) as int) = 1)"),
    ("(origin ~~ 'a\\_b%'::text)", "(`origin` like 'a\\\\_b%')"),
    ("(origin !~~ like_escape('a!%%'::text, '!'::text))", "(`origin` not like 'a\\\\%%')"),
    ("(origin ~~ '%a%a_%b'::text)", "(`origin` rlike '(?s)\\\\A(?>.*?a)(?>.*?a.).*b\\\\z')"),
    ("(origin ~ '^a.*$'::text)", "(`origin` rlike '(?s)\\\\Aa.*\\\\z')"),
    ("(origin ~ similar_to_escape('J(F|G)K%'::text))",
     "(`origin` rlike '(?s)\\\\A(?:J(?:F|G)K.*)\\\\z')"),
    ("(lower(name_c) = 'x'::text)",
     "(translate(`name_c`, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ', 'abcdefghijklmnopqrstuvwxyz') = 'x')"),
    ("(name_c > 'a'::text)", "(`name_c` > 'a')"),
    ("((origin COLLATE \"C\") < 'b'::text)", "(`origin` < 'b')"),
    ("(state <> 'it''s'::public.state)", "(`state` <> 'it\\'s')"),
    ("(NOT (state = 'new'::public.state))", "(not (`state` = 'new'))"),
    ("(state = ANY (ARRAY['new'::public.state, 'done'::public.state]))",
     "(`state` in ('new', 'done'))"),
    ("(state <> ALL ('{new,done}'::public.state[]))", "(`state` not in ('new', 'done'))"),
    ("((phase)::public.state = 'new'::public.state)", "(`phase` = 'new')"),
    ("((phase)::public.state = state)", "(`phase` = `state`)"),
    ("(phase IS NOT NULL)", "(not (`phase` is null))"),
    ('("Odd.State" = \'a\'::"My Schema"."Order.State ""x""")', "(`Odd.State` = 'a')"),
    ("((state)::text ~~ 'n%'::text)", "(`state` like 'n%')"),
    ("(COALESCE(state, 'new'::public.state) = 'new'::public.state)",
     "(coalesce(`state`, 'new') = 'new')"),
    ("CASE state WHEN 'new'::public.state THEN (v > 1) ELSE true END",
     "(case when (`state` = 'new') then (`v` > 1) else true end)"),
    ("(state < 'done'::public.state)", "(`state` in ('new', 'it\\'s'))"),
    ("(state <= 'new'::public.state)", "(`state` in ('new'))"),
    ("('done'::public.state > state)", "(`state` in ('new', 'it\\'s'))"),
    ("(state > 'done'::public.state)", "(`state` <> `state`)"),
    ("(state >= 'it''s'::public.state)", "(`state` in ('it\\'s', 'done'))"),
    ("(state < NULL::public.state)", "cast(null as boolean)"),
    ("(day IS DISTINCT FROM NULL::pg_catalog.date)",
     "(not (`day` is null and try_element_at(`_wd_raw`, 'day') is null))"),
    ("(v = NULL::integer)", "cast(null as boolean)"),
    ("(v IS DISTINCT FROM NULL::integer)", "(not (`v` is null))"),
    ("(NOT (NULL::integer IS DISTINCT FROM v))", "(not (not (`v` is null)))"),
]  # fmt: skip

REFUSED = [
    ("((v > 1) AND (lower(origin) = 'jfk'::text))", 'column 15 (near "lower(origin) = \'jfk")',
     "upper and lower case"),
    ("(origin > 'J'::text)", "column 9", "the order of texts"),
    ("(odd = 'J'::text)", "column 6", "nondeterministic"),
    ("(origin ~ '(.*a){12}b'::text)", "column 9", "12 repetitions"),
    ("(origin ~ '(a?){30}a{30}'::text)", "column 9", "in over 1000 ways"),
    ("(name_c = origin)", "column 9", "texts of different collations"),
    ("(doc = '{}'::jsonb)", "column 12", "a cast to jsonb"),
    ("(free > (1)::numeric)", "column 7", "> of numeric, numeric"),
    ("(huge > 0.5)", "column 7", "more than 38 digits"),
    ("(amount > 12345678901234567890.1234567890123456789)", "column 11",
     "a number of more than 38 digits"),
    ("((huge * (2)::numeric) > (1)::numeric)", "column 8", "more than 38 digits"),
    ("((amount / (3)::numeric) > (1)::numeric)", "column 10", "/ of numeric"),
    ("(missing = 1)", "column 2", "isn't in the target"),
    ("(power(ratio, (2)::double precision) > (1)::double precision)", "column 2",
     "power, which isn't"),
    ("(origin ~ '(ab)*'::text)", "column 9", "a group that is repeated"),
    ("(origin ~ '\\mx'::text)", "column 9", "the escape \\m"),
    ("(origin ~ '\\d'::text)", "column 9", "depends on the collation"),
    ("(origin ~~ origin)", "column 12", "only a constant"),
    ("(origin ~~ 'a\\'::text)", "column 9", "ends with its escape"),
    ("(ROW(v, id) < ROW(1, 2))", "column 2", "ROW isn't supported"),
    ("(day = 'tomorrow'::date)", "column 18", "unusual form"),
    ("(x.f(v) = 1)", "column 2 (near 'x.f(v) = 1)')", "the function x.f, which is not"),
    ('("X".f(v) = 1)', "column 2", 'the function "X".f, which is not'),
    ("(cased OPERATOR(public.=) 'a'::public.citext)", "column 8", "the operator public.=, which"),
    ("(cased IS DISTINCT FROM 'a'::public.citext)", "column 30 (near 'public.citext)')",
     "the type public.citext, which is neither one of PostgreSQL's own nor a column's enum"),
    ("(p && '0'::public.geometry(Point,4326))", "column 12", "the type public.geometry, which"),
    ('(v = \'1\'::"a.b"."C d")', "column 11", 'the type "a.b"."C d", which'),
    ("(state > phase)", "column 8", "the order of the labels of public.state, which is known only"),
    ("(state > 'old'::public.state)", "column 8", "the order of the labels"),
    ("(GREATEST(state, phase) = state)", "column 2", "GREATEST of public.state"),
    ("((origin)::public.state = state)", "column 10", "a cast of text to public.state"),
    ("((v", "its end", "isn't supported here"),
    ("(md5(origin) = 'x'::text)", "column 2", "the server's encoding"),
    ("v", "column 1", "where a boolean is wanted"),
]  # fmt: skip


@pytest.mark.parametrize(("row_filter", "expected"), TRANSLATED, ids=[c[0] for c in TRANSLATED])
def test_translated(row_filter, expected):
    """What PostgreSQL prints becomes the same condition in Spark SQL."""
    found = RowFilter(row_filter, row_filter, (), COLLATIONS, is_utf8=True, enums=ENUMS)
    assert spark_condition(found, COLUMNS) == expected


@pytest.mark.parametrize(("row_filter", "where", "reason"), REFUSED, ids=[c[0] for c in REFUSED])
def test_refused(row_filter, where, reason):
    """What might mean something else in Spark is refused, with its place and the reason."""
    with pytest.raises(FilterNotTranslatable) as caught:
        spark_condition(RowFilter(row_filter, row_filter, (), COLLATIONS, enums=ENUMS), COLUMNS)
    assert where in caught.value.where
    assert reason in caught.value.reason


def test_other_names_for_columns():
    """For old rows: every column, and the map of verbatim values, under another name."""
    names = {"v": "old.v", "day": "old.day", "_wd_raw": "old.raw"}
    found = spark_condition(
        published_filter("((v > 1) AND (day > '2024-01-01'::date))"), COLUMNS, names
    )
    assert re.findall(r"old\.\w+", found) == ["old.v", "old.raw", "old.day", "old.raw", "old.raw"]
    assert "`" not in found


def test_values_kept_elsewhere_need_their_column():
    """Without _wd_raw a null may be NaN or infinity, which the filter may admit."""
    with pytest.raises(FilterNotTranslatable, match="metadata_columns: false leaves it out"):
        spark_condition(published_filter("(amount > (10)::numeric)"), COLUMNS, {})


def test_every_signature_has_its_counterpart():
    """No row of the tables lacks a template, and none is there for nothing."""
    known = {*TEMPLATES, *BUILT, *_STRUCTURE, *OPERATORS}
    wanted = {s.key for s in SIGNATURES.values()} | set(CASTS.values())
    assert wanted - known == set()
    assert {*TEMPLATES, *BUILT} - wanted == {"numeric_limit", "varchar_limit", "bpchar_limit"}

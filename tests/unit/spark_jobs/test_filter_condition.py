"""The row filter's translation into Spark SQL: faithful, or refused with the reason."""

from __future__ import annotations

import pytest

from spark_jobs.filter_condition import TranslationError, translate_filter
from waldelta.ledger import ColumnState


def column(name, type_name, spark_type):
    return ColumnState(name, 0, -1, type_name, spark_type, not_null=False)


COLUMNS = [
    column("origin", "text", "string"),
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
    column("local_at", "timestamp without time zone", "timestamp_ntz"),
    column("uid", "uuid", "string"),
    column("doc", "jsonb", "string"),
    column("Odd.Name", "integer", "int"),
]

TRANSLATED = [
    ("(origin = 'JFK'::text)", "(`origin` = 'JFK')"),
    ("((status)::text = 'a'::text)", "(`status` = 'a')"),
    ("origin in ('JFK', 'EWR')", "(`origin` in ('JFK', 'EWR'))"),
    ("(origin = ANY (ARRAY['JFK'::text, 'EWR'::text]))", "(`origin` in ('JFK', 'EWR'))"),
    (
        "((status)::text = ANY ((ARRAY['a'::character varying, 'b'::character varying])::text[]))",
        "(`status` in ('a', 'b'))",
    ),
    ("(v <> ALL (ARRAY[1, '-2'::integer]))", "(`v` not in (1, -2))"),
    ("((v >= 1) AND (v <= 5))", "((`v` >= 1) and (`v` <= 5))"),
    ("v between 1 and 5", "(`v` >= 1 and `v` <= 5)"),
    ("(NOT (v > 3))", "(not (`v` > 3))"),
    ("(3 < v)", "(3 < `v`)"),
    ("(v < '-3'::integer)", "(`v` < -3)"),
    ("(id > '99999999999'::bigint)", "(`id` > 99999999999)"),
    ("(ratio > (0.5)::double precision)", "(cast(`ratio` as double) > cast('0.5' as double))"),
    ("active", "`active`"),
    ("(active IS NOT TRUE)", "(not (`active` is true))"),
    ("(origin IS NOT NULL)", "(`origin` is not null)"),
    ("(doc IS NULL)", "(`doc` is null)"),
    ("(v IS DISTINCT FROM 3)", "(not (`v` <=> 3))"),
    ("(code = 'AB'::bpchar)", "(rtrim(`code`) = 'AB')"),
    ("(origin = 'it''s'::text)", "(`origin` = 'it\\'s')"),
    ('("Odd.Name" = 1)', "(`Odd.Name` = 1)"),
    ("(uid = '6ecd8c99-4036-403d-bf84-cf8400f67836'::uuid)", "(`uid` = '6ecd8c99-4036-403d-bf84-cf8400f67836')"),
    (
        "(day >= '2024-01-01'::date)",
        "((`day` >= date '2024-01-01') or coalesce(map_contains_key(_wd_raw, 'day'), false))",
    ),
    (
        "(at < '2024-01-01 00:00:00+00'::timestamp with time zone)",
        "((`at` < timestamp_ltz '2024-01-01 00:00:00+00') or coalesce(map_contains_key(_wd_raw, 'at'), false))",
    ),
    ("(amount > (10)::numeric)", "((`amount` > 10) or coalesce(map_contains_key(_wd_raw, 'amount'), false))"),
]

REFUSED = [
    ("(lower(origin) = 'jfk'::text)", "the expression LOWER(origin)"),
    ("((v % 2) = 0)", "the expression v % 2"),
    ("(origin ~~ 'J%'::text)", "the expression"),
    ("(origin > 'J'::text)", "collation"),
    ("(origin = E'a\\\\b'::text)", "backslash"),
    ("(doc = '{}'::jsonb)", "type jsonb"),
    ("(free > (1)::numeric)", "type numeric"),
    ("(huge > 0.5)", "38 decimal digits"),
    ("((status)::character varying(2) = 'ab')", "a cast to"),
    ("(missing = 1)", "no column of the target"),
    ("(at > '2024-01-01'::timestamp with time zone)", "unusual form"),
    ("(day = 'infinity'::date)", "unusual form"),
    ("(v = NULL)", "the expression NULL"),
    ("(1 = 1)", "two constants"),
    ("v in (select 1)", "in with"),
    ("v between symmetric 5 and 1", "between with"),
    ("(v = origin)", "a comparison of int with text"),
    ("((v", "can't parse"),
]


@pytest.mark.parametrize(("row_filter", "expected"), TRANSLATED, ids=[c[0] for c in TRANSLATED])
def test_translate_filter(row_filter, expected):
    """What PostgreSQL prints becomes the same condition in Spark SQL."""
    assert translate_filter(row_filter, COLUMNS, ["_wd_raw"]).sql == expected


@pytest.mark.parametrize(("row_filter", "reason"), REFUSED, ids=[c[0] for c in REFUSED])
def test_refused(row_filter, reason):
    """What might mean something else in Spark is refused, and the reason says what it is."""
    with pytest.raises(TranslationError) as caught:
        translate_filter(row_filter, COLUMNS, ["_wd_raw"])
    assert reason in str(caught.value)


def test_values_kept_elsewhere_need_their_column():
    """Without _wd_raw a null may be NaN or infinity, which the filter may admit."""
    with pytest.raises(TranslationError, match="metadata_columns is off"):
        translate_filter("(amount > (10)::numeric)", COLUMNS, [])

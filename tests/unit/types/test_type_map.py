"""Which type a PostgreSQL type has in the lake, and reading its texts; test_values asks servers."""

import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from psycopg import sql

from tests.support.data.pg_types import (
    ANY_NUMERIC,
    AS_DECIMAL,
    AS_DOUBLE,
    AS_VARIANT,
    BOOL,
    BOX,
    BYTEA,
    DATE,
    ENUM,
    FLOAT4,
    FLOAT8,
    GEOMETRY,
    HSTORE,
    INT4,
    JSON,
    JSONB,
    POINT,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    VECTOR,
    array_of,
    domain_over,
    numeric,
    texts,
)
from tests.support.seeds import chosen_random
from waldelta.config import TypeOptions
from waldelta.config.type_options import DEFAULT_TYPES, TableTypeOptions
from waldelta.errors import DecodeError, LakeError
from waldelta.postgres import PgType
from waldelta.types import column_types, stored_type
from waldelta.types.base import numbered
from waldelta.types.type_map import target_type

MAP = "map<string,string>"
FAMILIES = [BOOL, BYTEA, INT4, TEXT, FLOAT8, numeric(12, 2), DATE, TIMESTAMP, TIMESTAMPTZ, HSTORE]
FAMILIES += [VECTOR, *(array_of(t) for t in (BOOL, BYTEA, INT4, TEXT, numeric(12, 2), DATE, BOX))]


@pytest.mark.parametrize(
    "pg_type, options, spark",
    [
        (ANY_NUMERIC, AS_DOUBLE, "double"),
        (numeric(39, 0), AS_DOUBLE, "double"),
        (numeric(39, 0), AS_DECIMAL, "decimal(38,4)"),
        (numeric(38, 2), AS_DOUBLE, "decimal(38,2)"),
        (domain_over(ANY_NUMERIC), AS_DECIMAL, "decimal(38,4)"),
        (array_of(ANY_NUMERIC), AS_DECIMAL, "array<decimal(38,4)>"),
        (array_of(ANY_NUMERIC), AS_DOUBLE, "array<double>"),
        (ANY_NUMERIC, AS_VARIANT, "string"),
        (JSON, AS_VARIANT, "variant"),
        (JSONB, AS_VARIANT, "variant"),
        (JSONB, AS_DOUBLE, "string"),
        (array_of(JSONB), AS_VARIANT, "array<string>"),
        (domain_over(JSONB), AS_VARIANT, "variant"),
    ],
    ids=str,
)
def test_types_by_choice(pg_type, options, spark):
    """An option governs its own types alone, wherever they stand."""
    assert target_type(pg_type, options).spark == spark
    assert pickle.loads(pickle.dumps(target_type(pg_type, options))) == target_type(
        pg_type, options
    )


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        (JSONB, [["string", "string"], ["string", "variant"], ["string", "string"]]),
        (HSTORE, [[MAP, MAP], ["string", MAP], ["string", "string"]]),
    ],
)
def test_what_rows_are_found_by_has_equality(kind, stored):
    """A key column; and every column of a table without a key, whose maps are compared by parts."""
    types = {"id": kind, "v": kind}
    assert [
        [kind.spark for kind in column_types(types, key, AS_VARIANT).values()]
        for key in ([], ["id"], ["id", "v"])
    ] == stored


def test_columns_that_stay_text():
    """Named ones, whatever their type, keys too."""
    types = {"id": DATE, "v": array_of(DATE), "w": DATE}
    chosen = TableTypeOptions(text=("id", "v")).over(AS_VARIANT)
    expected = ["string", "string", "date"]
    assert [kind.spark for kind in column_types(types, ["id"], chosen).values()] == expected
    assert (chosen.need_raw, TypeOptions(text=("id",)).need_raw) == (True, False)


@pytest.mark.parametrize(
    "pg_type, spark",
    [
        (numeric(38, 0), "decimal(38,0)"),
        (numeric(38, 38), "decimal(38,38)"),
        (numeric(39, 0), "string"),
        (numeric(1000, 0), "string"),
        (numeric(3, -2), "decimal(5,0)"),
        (numeric(37, -2), "string"),
        (numeric(3, 5), "decimal(5,5)"),
        (numeric(2, 50), "string"),
        (PgType(1700, -1, "numeric"), "string"),
        (PgType(1042, 9, "character(5)"), "string"),
        (PgType(99_999, -1, "???"), "string"),
        (POINT, "string"),
        (GEOMETRY, "string"),
        (array_of(GEOMETRY), "string"),
        (array_of(HSTORE), "string"),
        (array_of(ENUM), "array<string>"),
        (array_of(numeric(6, 2)), "array<decimal(6,2)>"),
        (array_of(domain_over(INT4)), "array<int>"),
        (array_of(domain_over(array_of(INT4))), "string"),
        (domain_over(numeric(6, 2)), "decimal(6,2)"),
        (domain_over(array_of(DATE)), "array<date>"),
        (HSTORE, "map<string,string>"),
        (VECTOR, "array<float>"),
        (PgType(20_005, -1, "public.hstore", kind="composite", type_name="hstore"), "string"),
        (
            PgType(22, -1, "int2vector", kind="array", type_name="int2vector", element=INT4),
            "string",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_types(pg_type, spark):
    """The type of the lake for what design's table names and for its edges."""
    assert target_type(pg_type).spark == spark


NEVER_RAW = [BOOL, BYTEA, INT4, FLOAT8, TEXT, ENUM, HSTORE, ANY_NUMERIC]


@pytest.mark.parametrize(
    "pg_type, options, expected",
    [
        *((t, DEFAULT_TYPES, False) for t in NEVER_RAW),
        *((t, DEFAULT_TYPES, True) for t in (numeric(12, 2), DATE, TIMESTAMP, TIMESTAMPTZ, VECTOR)),
        *((array_of(t), DEFAULT_TYPES, True) for t in (BOOL, BYTEA, INT4, TEXT, numeric(9, 1))),
        *((ANY_NUMERIC, options, True) for options in (AS_DOUBLE, AS_DECIMAL)),
        (JSONB, AS_VARIANT, True),
        (array_of(ANY_NUMERIC), AS_DOUBLE, True),
    ],
    ids=str,
)
def test_which_types_may_need_raw_text(pg_type, options, expected):
    """The source's type and the ledger's names give one answer; integration/types asks servers."""
    kind = target_type(pg_type, options)
    stored = stored_type(kind.ledger_name)
    assert (kind.may_be_raw, stored.may_be_raw) == (expected, expected)
    assert (stored.spark, stored.arrow) == (kind.spark, kind.arrow)


def numeric_text(value: str) -> str:
    shortest = f"trim(trailing '.' from trim(trailing '0' from {value}))"
    return f"case when instr({value}, '.') > 0 then {shortest} else {value} end"


NUMERIC_TEXT = numeric_text("v")


@pytest.mark.parametrize(
    "pg_type, options, exact, equal",
    [
        (INT4, DEFAULT_TYPES, "v", "v"),
        (TEXT, DEFAULT_TYPES, "v", "v"),
        (FLOAT4, DEFAULT_TYPES, "cast(v as string)", "v"),
        (FLOAT8, DEFAULT_TYPES, "cast(v as string)", "v"),
        (ANY_NUMERIC, AS_DOUBLE, "cast(v as string)", "v"),
        (ANY_NUMERIC, DEFAULT_TYPES, "v", NUMERIC_TEXT),
        (domain_over(ANY_NUMERIC), DEFAULT_TYPES, "v", NUMERIC_TEXT),
        (numeric(50, 1), DEFAULT_TYPES, "v", NUMERIC_TEXT),
        (numeric(12, 2), DEFAULT_TYPES, "v", "v"),
        (HSTORE, DEFAULT_TYPES, *(["array_sort(map_entries(v))"] * 2)),
        (JSONB, AS_VARIANT, "to_json(v)", "v"),
        (array_of(TEXT), DEFAULT_TYPES, "v", "v"),
        (array_of(FLOAT8), DEFAULT_TYPES, "transform(v, x -> cast(x as string))", "v"),
        (VECTOR, DEFAULT_TYPES, "transform(v, x -> cast(x as string))", "v"),
        (array_of(ANY_NUMERIC), DEFAULT_TYPES, "v", f"transform(v, x -> {numeric_text('x')})"),
    ],
    ids=str,
)  # fmt: skip
def test_forms_that_spark_compares(pg_type, options, exact, equal):
    """What equality would confuse, or can't compare, is brought into another form."""
    kind = target_type(pg_type, options)
    assert (kind.exact_sql("v"), kind.equal_sql("v")) == (exact, equal)
    assert stored_type(kind.ledger_name).exact_sql("v") == exact


def test_a_numeric_that_is_named_as_text_is_compared_as_a_number():
    types = {"n": numeric(12, 2), "t": INT4}
    found = column_types(types, [], TypeOptions(text=("n", "t")))
    assert [kind.equal_sql("v") for kind in found.values()] == [NUMERIC_TEXT, "v"]


@pytest.mark.parametrize(
    ("pg_type", "equal", "exact"),
    [
        (TEXT, [["0", "0"], ["-0"], [""], [None]], []),
        (ANY_NUMERIC, [["1.0", "1.00", "1"], ["10"], ["NaN"], [None]], ["1.0", "1.00", "1"]),
        (FLOAT8, [["0", "-0"], ["NaN"], ["1"], [None]], ["0", "-0"]),
        (array_of(FLOAT4), [["{0,NULL}", "{-0,NULL}"], ["{0}"], ["{}"], [None]], ["{0}", "{-0}"]),
        (array_of(ANY_NUMERIC), [["{1.0}", "{1.00}"], ["{1.0,1}"], [None]], ["{1.0}", "{1.00}"]),
        (array_of(BYTEA), [['{"\\\\xff"}', '{"\\\\xff"}'], ['{"\\\\xfe"}']], []),
        (HSTORE, [['"a"=>"1", "b"=>NULL', '"b"=>NULL, "a"=>"1"'], ['"a"=>"1"'], [""], [None]], []),
    ],
    ids=str,
)
def test_values_that_arrow_compares(pg_type, equal, exact):
    """Equal ones are one value, and those that are written differently are several."""
    kind = target_type(pg_type)
    values, raw = kind.from_text(texts(*(text for alike in equal for text in alike)))
    assert raw is None
    numbers = iter(numbered(kind.equal_values(values)).tolist())
    found = [{next(numbers) for _ in alike} for alike in equal]
    assert [len(alike) for alike in found] == [1] * len(equal)
    assert len(set.union(*found)) == len(equal)
    values, _ = kind.from_text(texts(*exact, *exact))
    assert len(set(numbered(kind.exact_values(values)).tolist())) == len(exact)


def test_documents_are_compared_as_a_variant_holds_them():
    """Whatever the order of keys, and however a number is written."""
    alike = ['{"b": 1.0, "a": [1e2, "\u00e9"]}', '{"a":[100.0,"\u00e9"],"b":1}']
    others = ['{"a": [100, "\u00e9"], "b": "1"}', '{"a": [100, "\u00e9"]}', "null", "-0.5"]
    kind = target_type(JSONB, AS_VARIANT)
    found = kind.exact_values(texts(*alike, *others, None)).to_pylist()
    assert (found[0], len(set(found)), found[-1]) == (found[1], len(others) + 2, None)


@pytest.mark.parametrize(
    ("pg_type", "options", "equal", "others"),
    [
        (FLOAT8, DEFAULT_TYPES, ("0", "-0"), ("NaN", "5e-324", "Infinity", "-1.5", None)),
        (FLOAT4, DEFAULT_TYPES, ("-0", "0"), ("1e-45", "1.5", None)),
        (ANY_NUMERIC, AS_DOUBLE, ("1.0", "1.00"), ("1.01", "0.5", "NaN", None)),
        (ANY_NUMERIC, AS_DECIMAL, ("1.0", "1.00"), ("1.01", "-1", None)),
        (INT4, DEFAULT_TYPES, ("1", "1"), ("-1", None)),
        (TEXT, DEFAULT_TYPES, ("0", "0"), ("-0", "", "0.0", None)),
    ],
)
def test_equal_numbers_have_one_text(pg_type, options, equal, others):
    """However they are written; others have another."""
    kind = target_type(pg_type, options)
    first, second, *rest = kind.equal_texts(texts(*equal, *others)).to_pylist()
    assert first == second
    assert len({first, *rest}) == 1 + len(others)


@pytest.mark.parametrize(
    ("pg_type", "values", "expected"),
    [
        (BOOL, [True, False, None], ["t", "f", None]),
        (INT4, [1, -1], ["1", "-1"]),
        (numeric(5, 2), [Decimal("1.50"), Decimal("-0.01")], ["1.50", "-0.01"]),
        (FLOAT8, [1.5, float("nan"), float("-inf")], ["1.5", "NaN", "-Infinity"]),
        (BYTEA, [b"\x00\xff", None], ["\\x00ff", None]),
        (DATE, [date(2020, 1, 10)], ["2020-01-10"]),
        (
            TIMESTAMP,
            [datetime(2020, 1, 10, 10, 0, 10, 500000), datetime(2020, 1, 1, 10)],  # noqa: DTZ001
            ["2020-01-10 10:00:10.5", "2020-01-01 10:00:00"],
        ),
        (TIMESTAMPTZ, [datetime(2020, 1, 10, 10, 0, 10, tzinfo=UTC)], ["2020-01-10 10:00:10+00"]),
        (array_of(TEXT), [["a", 'b"\\', None], None, []], ['{"a","b\\"\\\\",NULL}', None, "{}"]),
        (array_of(FLOAT8), [[1.5, None]], ['{"1.5",NULL}']),
        (HSTORE, [[("k", None), ("l", "v")], None], ['"k"=>NULL, "l"=>"v"', None]),
    ],
    ids=str,
)  # fmt: skip
def test_text_that_postgresql_reads_as_the_same_value(pg_type, values, expected):
    kind = target_type(pg_type)
    found = kind.pg_text(pa.array([None, *values], kind.arrow).slice(1))
    assert found.to_pylist() == expected


# type, PostgreSQL's text, value; RAW: null, with the text kept
RAW = object()
VALUES = [
    (BOOL, "t", True),
    (BOOL, "true", RAW),
    (INT4, "-2147483648", -(2**31)),
    (INT4, "2147483648", RAW),
    (INT4, "", RAW),
    (FLOAT4, "0.1", 0.10000000149011612),
    (FLOAT8, "-Infinity", float("-inf")),
    (FLOAT8, "5e-324", 5e-324),
    (numeric(12, 2), "1.50", Decimal("1.50")),
    (numeric(12, 2), "1.505", RAW),
    (numeric(12, 2), "99999999999.00", RAW),
    (numeric(12, 2), "NaN", RAW),
    (DATE, "0001-01-01", date(1, 1, 1)),
    (DATE, "10000-01-01", RAW),
    (DATE, "0044-03-15 BC", RAW),
    (DATE, "2023-02-29", RAW),
    (DATE, "infinity", RAW),
    (
        TIMESTAMP,
        "9999-12-31 23:59:59.999999",
        datetime(9999, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
    ),
    (TIMESTAMP, "10000-01-01 00:00:00", RAW),
    (TIMESTAMP, "0044-03-15 00:00:00.5 BC", RAW),
    (TIMESTAMPTZ, "2026-01-02 03:04:05.6+00", datetime(2026, 1, 2, 3, 4, 5, 600000, UTC)),
    (TIMESTAMPTZ, "-infinity", RAW),
    (BYTEA, "\\x", b""),
    (BYTEA, "\\x00fF", b"\x00\xff"),
    (BYTEA, "\\x0", RAW),
    (BYTEA, "\\xzz", RAW),
    (BYTEA, "abcd", RAW),
    (BYTEA, "\\", RAW),
    (array_of(INT4), "{}", []),
    (array_of(INT4), "{1,NULL,-3}", [1, None, -3]),
    (array_of(INT4), "{1,x}", RAW),
    (array_of(INT4), "{{1,2},{3,4}}", RAW),
    (array_of(INT4), "[0:1]={1,2}", RAW),
    (array_of(INT4), "{1", RAW),
    (array_of(INT4), "", RAW),
    (array_of(TEXT), '{"NULL",NULL,null,NULLS}', ["NULL", None, "null", "NULLS"]),
    (
        array_of(TEXT),
        '{"","a,b","{c}","d\\"e","f\\\\","\\\\\\""}',
        ["", "a,b", "{c}", 'd"e', "f\\", '\\"'],
    ),
    (array_of(TEXT), '{"open}', RAW),
    (array_of(BYTEA), '{"\\\\x00ff",NULL}', [b"\x00\xff", None]),
    (array_of(DATE), "{2020-01-01,infinity}", RAW),
    (array_of(BOX), "{(2,2),(1,1);(4,4),(3,3)}", ["(2,2),(1,1)", "(4,4),(3,3)"]),
    (HSTORE, "", []),
    (HSTORE, '"a"=>"1", "b"=>NULL, "c"=>"NULL"', [("a", "1"), ("b", None), ("c", "NULL")]),
    (HSTORE, '"x=>y, "=>"=\\"\\\\", "\\\\"=>""', [("x=>y, ", '="\\'), ("\\", "")]),
    (HSTORE, '"a"', RAW),
    (HSTORE, '"a"=>1', RAW),
    (HSTORE, '"a"=>"1"=>"2"', RAW),
    (VECTOR, "[1,2.5,-3e-05]", [1.0, 2.5, -2.9999999242136255e-05]),
    (VECTOR, "{1}", RAW),
]
DOUBLES = {
    "0": 0.0, "0.000": 0.0, "-1.50": -1.5, "0.1": 0.1, "123456789012345": 123456789012345.0,
    "1" + "0" * 22: 1e22, "NaN": "nan", "Infinity": float("inf"), "-Infinity": float("-inf"),
    "0.30000000000000004": 0.1 + 0.2, "100": 100.0, "0.00001": 1e-5,
    "9007199254740992": 2.0**53, "-1" + "0" * 308: -1e308,
}  # fmt: skip
NO_DOUBLES = [
    "9007199254740993", "0.1000000000000000055511151231257827", "0.33333333333333333333",
    "1" + "0" * 400, "0." + "0" * 400 + "1", "12345678901234567890", "1.0000000000000000000000001",
]  # fmt: skip
DECIMALS = {"0": "0.0000", "-1.5": "-1.5000", "1.500000": "1.5000"}
DECIMALS |= {"9" * 34 + ".9999": "9" * 34 + ".9999"}
NO_DECIMALS = ["NaN", "Infinity", "-Infinity", "1" + "0" * 34, "1.00001", "-0.00000000001"]
NO_DECIMALS += ["1" + "0" * 100 + ".5"]
DOCUMENTS = [
    '{"a": 1}', "[]", "{}", "null", '"x"', "1.10", "-0", "9" * 38,
    '{"a": {"a": [{"a": 1}, {"a": 2}]}, "b": "\\""}',
    '["12345678901234567890123456789012345678901234567890", "1e5"]',
    '{"a": "{", "b": "{"}', "[" * 500 + "]" * 500,
]  # fmt: skip
NO_DOCUMENTS = ["9" * 39, "0." + "1" * 38, "[" * 501 + "]" * 501, '{"' + "k" * 50_001 + '": 1}']
NO_DOCUMENTS += ['"' + "x" * (4 << 20) + '"']
# What only json, which is kept as it was written, can be.
WRITTEN = [
    "1e2", "1.5E-7", '{"a":1,"b":{"a":2}}', '"\\ud83d\\ude00"', '{"\\n":1,"n":2}',
    '[{"a":1},{"a":2}]', '{"a":{"b":1},"b":2}',
]  # fmt: skip
NO_VARIANT = [
    '{"a":1,"a":2}', '[0,{"b":{"x":1 ,"y":2, "x" : 3}}]', "1e400", "1.00000000000000000000001e5",
    '"\\ud83d"', '{"a":1,"\\u0061":2}', '{"":1,"":2}',
]  # fmt: skip
# type, option, what it holds, and what it can't
CHOSEN = [
    (ANY_NUMERIC, AS_DOUBLE, DOUBLES, NO_DOUBLES),
    (ANY_NUMERIC, AS_DECIMAL, {t: Decimal(value) for t, value in DECIMALS.items()}, NO_DECIMALS),
    (ANY_NUMERIC, TypeOptions(numeric="decimal(38,38)"),
     {"0.5": Decimal("0." + "5" + "0" * 37), "0": Decimal("0E-38")}, ["1", "-12.5"]),
    (ANY_NUMERIC, TypeOptions(numeric="decimal(38,0)"),
     {"5": Decimal(5), "5.00": Decimal(5), "9" * 38: Decimal("9" * 38)}, ["0.5", "1" + "0" * 38]),
    (array_of(ANY_NUMERIC), AS_DECIMAL, {"{1.5,NULL}": [Decimal("1.5000"), None]},
     ["{1.5,NaN}", "{0.00001}"]),
    (array_of(ANY_NUMERIC), AS_DOUBLE, {"{1.5,NULL}": [1.5, None]},
     ["{1.5,0.33333333333333333333}"]),
    *((kind, AS_VARIANT, dict(zip(DOCUMENTS, DOCUMENTS, strict=True)), NO_DOCUMENTS)
      for kind in (JSON, JSONB)),
    (JSON, AS_VARIANT, dict(zip(WRITTEN, WRITTEN, strict=True)), NO_VARIANT),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CHOSEN)))
def test_chosen_types_hold_what_is_exact(case):
    """A value is held exactly or stands verbatim, alone, together and beside nulls."""
    pg_type, options, held, unheld = CHOSEN[case]
    target = target_type(pg_type, options)
    every = [*held.items(), *((text, None) for text in unheld)]
    for given in [*([one] for one in every), [(None, None), *every], list(held.items())]:
        typed, raw = target.from_text(texts(*(text for text, _ in given)))
        typed.validate(full=True)
        assert typed.type == target.arrow
        assert repr(typed.to_pylist()) == repr([float(v) if v == "nan" else v for _, v in given])
        raws = raw.to_pylist() if raw is not None else [None] * len(given)
        assert raws == [text if value is None else None for text, value in given]


def test_any_json_is_held_or_kept():
    """Random documents: only those with a key twice in one object are raw."""
    rng = chosen_random()
    names = ["a", "b", 'q"', "x:{", "[", "ü", ""]

    def document(depth=0):
        kind = rng.randrange(6 if depth < 4 else 3)
        if kind < 3:
            return rng.choice(["1", "null", '"{"', '"a\\\\"', '"\\":"', "-0.5", "true"]), False
        parts = [document(depth + 1) for _ in range(rng.randrange(4))]
        repeats = any(again for _, again in parts)
        if kind == 3:
            return "[" + ", ".join(text for text, _ in parts) + "]", repeats
        keys = [rng.choice(names) for _ in parts]
        members = (
            f"{json.dumps(key)}{rng.choice(['', ' '])}:{text}"
            for key, (text, _) in zip(keys, parts, strict=True)
        )
        return "{" + ",".join(members) + "}", repeats or len(set(keys)) < len(keys)

    documents = [document() for _ in range(2000)]
    typed, raw = target_type(JSON, AS_VARIANT).from_text(texts(*(text for text, _ in documents)))
    assert typed.to_pylist() == [None if again else text for text, again in documents]
    assert raw.to_pylist() == [text if again else None for text, again in documents]


@pytest.mark.parametrize("pg_type, text, value", VALUES)
def test_values(pg_type, text, value):
    """One text, alone and amid others of its type, nulls, slices and other carriers."""
    target = target_type(pg_type)
    others = [t for kind, t, _ in VALUES if kind is pg_type or kind == pg_type]
    alone, amid = texts(text), texts(*others, None, text, *others).slice(len(others), 2)
    carriers = [
        alone,
        alone.cast(pa.string()),
        alone.cast(pa.large_binary()),
        alone.cast(pa.large_string()),
        amid,
    ]
    for given in carriers:
        typed, raw = target.from_text(given)
        typed.validate(full=True)
        assert typed.type == target.arrow
        nulls = [None] * (len(given) - 1)
        assert typed.to_pylist() == [*nulls, None if value is RAW else value]
        assert (raw.to_pylist() if raw else None) == ([*nulls, text] if value is RAW else None)


@pytest.mark.parametrize("pg_type", FAMILIES, ids=lambda t: t.name)
@pytest.mark.parametrize("given", [[], [None], [None] * 3], ids=["empty", "null", "nulls"])
def test_nothing_to_read(pg_type, given):
    """Empty and all-null arrays, also without buffers, have the right type."""
    target = target_type(pg_type)
    assert pickle.loads(pickle.dumps(target)) == target
    for array in (texts(*given), pa.nulls(len(given), pa.binary()), texts("1", *given).slice(1)):
        typed, raw = target.from_text(array)
        assert (typed.type, typed.to_pylist(), raw) == (target.arrow, given, None)


@pytest.mark.parametrize("pg_type", FAMILIES, ids=lambda t: t.name)
def test_nulls_may_have_bytes_beneath(pg_type):
    """What lies under a null is ignored, as Arrow allows it to be anything."""
    held = (t for kind, t, value in VALUES if kind == pg_type and value is not RAW and t)
    valid = next(held, "x" if pg_type == TEXT else "{}")
    given = texts(valid, '{"', valid)
    given = pa.Array.from_buffers(pa.binary(), 3, [pa.py_buffer(b"\x05"), *given.buffers()[1:]])
    typed, raw = target_type(pg_type).from_text(given)
    assert ([v is None for v in typed.to_pylist()], raw) == ([False, True, False], None)


@pytest.mark.parametrize("pg_type", FAMILIES, ids=lambda t: t.name)
def test_any_text_is_held_or_kept(pg_type):
    """Random texts of the type's own characters never raise: each is read or raw."""
    rng = chosen_random()
    alphabet = '{}[]",\\;:=> NULL0123456789-.eEtfxinfity+BCü()'
    known = [t for kind, t, _ in VALUES if kind == pg_type]
    for _ in range(6):
        given = ["".join(rng.choices(alphabet, k=rng.randrange(9))) for _ in range(20)] + known
        rng.shuffle(given)
        target = target_type(pg_type)
        typed, raw = target.from_text(texts(*given))
        typed.validate(full=True)
        raws = raw.to_pylist() if raw else [None] * len(given)
        for text, value, kept in zip(given, typed.to_pylist(), raws, strict=True):
            assert kept == (text if value is None else None)
            # Neighbours make no difference.
            one, _ = target.from_text(texts(text))
            assert str(one.to_pylist()) == str([value])


def quoted(text, rng):
    """As array_out and hstore_out do it: backslashes before quotes and backslashes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def test_random_arrays_and_maps():
    """Whatever strings an array or hstore holds come back."""
    rng = chosen_random()

    def word():
        return "".join(rng.choices('ab,{}"\\ =>ü\n', k=rng.randrange(6)))

    lists = [
        [rng.choice([None, "NULL", word()]) for _ in range(rng.randrange(5))] for _ in range(500)
    ]
    printed = [
        "{" + ",".join("NULL" if v is None else quoted(v, rng) for v in values) + "}"
        for values in lists
    ]
    assert target_type(array_of(TEXT)).from_text(texts(*printed))[0].to_pylist() == lists
    maps = [
        {word(): rng.choice([None, "NULL", word()]) for _ in range(rng.randrange(5))}
        for _ in range(500)
    ]
    printed = [
        ", ".join(
            f"{quoted(k, rng)}=>{'NULL' if v is None else quoted(v, rng)}" for k, v in m.items()
        )
        for m in maps
    ]
    typed, raw = target_type(HSTORE).from_text(texts(*printed))
    assert raw is None
    assert [dict(m) for m in typed.to_pylist()] == maps


@pytest.mark.parametrize(
    "pg_type", [TEXT, ENUM, array_of(TEXT), HSTORE, DATE, INT4], ids=lambda t: t.name
)
def test_bytes_that_are_not_utf8(pg_type):
    """Such bytes come only from SQL_ASCII databases; the error says so."""
    with pytest.raises(DecodeError, match="SQL_ASCII"):
        target_type(pg_type).from_text(pa.array([b"1", b"\xff\xfe"], pa.binary()))


def test_copy_expressions_quote_the_column():
    """Any name is quoted; values outside Spark's calendar are selected as text too."""
    column = sql.Identifier('odd "name"')
    value, raw = target_type(DATE).copy_expressions(column)
    assert '"odd ""name"""::pg_catalog."date"' in value.as_string(None)
    assert "pg_catalog.concat" in raw.as_string(None)
    value, raw = target_type(INT4).copy_expressions(column)
    assert (value.as_string(None), raw) == ('"odd ""name"""::pg_catalog."int4"', None)


def test_many_values_that_only_look_right():
    """Rows that can't be held are found among many without trying each."""
    given = ["2023-02-28"] * 20_000
    given[777] = given[19_999] = "2023-02-29"
    given[5:3000:2] = ["infinity"] * len(given[5:3000:2])
    typed, raw = target_type(DATE).from_text(texts(*given))
    wrong = {n for n, text in enumerate(given) if text != "2023-02-28"}
    assert {n for n, text in enumerate(raw.to_pylist()) if text is not None} == wrong
    assert typed.null_count == len(wrong)


FORGED = (
    "no type", "", "int; drop", "decimal(99,0)", "decimal(0,0)", "decimal(" + "9" * 5_000 + ",0)",
    "array<" * 2_000 + "int" + ">" * 2_000, "array<>", "array<no type>", "array<array<int>>",
)  # fmt: skip


@pytest.mark.parametrize("spark_type", FORGED, ids=lambda text: text[:20])
def test_a_forged_type_of_the_ledger_is_named(spark_type):
    """Any writer of the lake can change that text."""
    with pytest.raises(LakeError, match="which waldelta doesn't store: find out which program"):
        stored_type(spark_type)

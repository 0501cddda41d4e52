"""Values of every type, with PostgreSQL as the oracle: the stream, the copy and the table agree."""

import math

import pyarrow as pa
import pytest
from psycopg import sql

from waldelta.config import TypeOptions
from waldelta.pgoutput.envelope import Envelope
from waldelta.pgoutput.messages import read_relation
from waldelta.pgoutput.rows import decode_rows
from waldelta.postgres import connect
from waldelta.postgres.connection import connect_arrow
from waldelta.postgres.published_tables import read_published_tables
from waldelta.postgres.type_catalog import read_types
from waldelta.stages.repair.reconcile._checksum import hash_texts, source_text, target_texts
from waldelta.types.base import Marks
from waldelta.types.type_map import target_type

ALWAYS = (
    "create type mood as enum ('sad', 'so so', 'a,b', 'NULL'); create type pair as (a int, b text);"
)
ALWAYS += (
    "create domain age as int check (value > 0); create domain ages as age[]; create domain padded"
    " as char(4);"
)
ALWAYS += (
    'create schema "odd ""schema"; create type "odd ""schema"."odd type" as enum (\'x\', \'ü\')'
)

DAYS = ["2020-02-29", "0001-01-01", "9999-12-31", "1582-10-10", "1969-12-31"]
FAR_DAYS = [
    "infinity",
    "-infinity",
    "4713-01-01 BC",
    "0001-12-31 BC",
    "5874897-12-31",
    "10000-01-01",
]
TIMES = [
    "2020-02-29 23:59:59.999999",
    "0001-01-01 00:00:00",
    "9999-12-31 23:59:59.999999",
    "1969-12-31 23:59:59.5",
    "2000-01-01",
]
FAR_TIMES = [
    "infinity",
    "-infinity",
    "4713-01-01 00:00:00 BC",
    "0001-12-31 23:59:59.999999 BC",
    "294276-12-31 23:59:59.999999",
]

# type, the lake's type, texts it holds, texts it can't hold
CASES = [
    ("bool", "boolean", ["t", "f"], []),
    ("int2", "smallint", ["0", "-32768", "32767"], []),
    ("int4", "int", ["0", "-2147483648", "2147483647"], []),
    ("int8", "bigint", ["0", "-9223372036854775808", "9223372036854775807"], []),
    ("float4", "float", ["0", "-0", "NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e+38",
                         "0.1"], []),
    ("float8", "double", ["0", "-0", "NaN", "Infinity", "-Infinity", "5e-324",
                          "1.7976931348623157e308", "0.1", "1e20"], []),
    ("numeric(12,2)", "decimal(12,2)", ["0", "-0.01", "9999999999.99", "1.5"], ["NaN"]),
    ("numeric(38,0)", "decimal(38,0)", ["9" * 38, "-" + "9" * 38], ["NaN"]),
    ("numeric(38,38)", "decimal(38,38)", ["0." + "9" * 38], []),
    ("numeric(3,-2)", "decimal(5,0)", ["99900", "-100"], ["NaN"]),
    ("numeric(3,5)", "decimal(5,5)", ["0.00999", "-0.00001"], []),
    ("numeric(39,0)", "string", ["9" * 39, "NaN"], []),
    ("numeric", "string", ["1.000", "1.0", "NaN", "Infinity", "-Infinity", "1e50", "1e-50", "0"],
     []),
    ("text", "string", ["", "NULL", "null", "\\N", "ü€😀", "a\tb\nc", '"', "{", "t", "x" * 100_000],
     []),
    ("varchar(5)", "string", ["", "abc  "], []),
    ("char(5)", "string", ["", "ab", "ab   "], []),
    ('"char"', "string", ["", "a", "\\377"], []),
    ("name", "string", ["a name"], []),
    ("bytea", "binary", ["", "\\x00ff10", "\\x5c78", "\\x" + "ab" * 50_000], []),
    ("date", "date", DAYS, FAR_DAYS),
    ("timestamp", "timestamp_ntz", TIMES, FAR_TIMES),
    ("timestamp(0)", "timestamp_ntz", ["2020-01-01 10:00:00"], ["infinity"]),
    ("timestamptz", "timestamp", [*TIMES, "1850-01-01 00:00:00+00:53:28"], FAR_TIMES),
    ("time", "string", ["00:00:00", "24:00:00", "12:34:56.789"], []),
    ("timetz", "string", ["12:34:56.789+05:30", "00:00:00-15:59:59"], []),
    ("interval", "string", ["1 year 2 mons -3 days 04:05:06.789", "0", "-178000000 years"], []),
    ("uuid", "string", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"], []),
    ("json", "string", ['{"a" : 1,  "a":2}', "null", '"\\u00fc"'], []),
    ("jsonb", "string", ['{"b":1, "a":[1,2,null]}', "1.10"], []),
    ("money", "string", ["12.50", "-1234567.89"], []),
    ("bit(3)", "string", ["101"], []),
    ("varbit", "string", ["", "10101"], []),
    ("inet", "string", ["1.2.3.4", "1.2.3.4/24", "::1", "fe80::1/64"], []),
    ("cidr", "string", ["10.0.0.0/8", "1.2.3.4/32"], []),
    ("macaddr", "string", ["08:00:2b:01:02:03"], []),
    ("point", "string", ["(1,2.5)", "(NaN,Infinity)"], []),
    ("box", "string", ["(2,2),(1,1)"], []),
    ("polygon", "string", ["((0,0),(1,1),(1,0))"], []),
    ("line", "string", ["{1,-1,0}"], []),
    ("lseg", "string", ["[(0,0),(1,1)]"], []),
    ("path", "string", ["[(0,0),(1,1)]", "((0,0),(1,1))"], []),
    ("circle", "string", ["<(0,0),5>"], []),
    ("tsvector", "string", ["'a':1A 'fat':2"], []),
    ("tsquery", "string", ["'a' & 'b'"], []),
    ("int4range", "string", ["[1,5)", "empty", "(,)"], []),
    ("tstzrange", "string", ['["2020-01-01 00:00:00+00",infinity]'], []),
    ("int4multirange", "string", ["{[1,2),[5,7)}", "{}"], []),
    ("int2vector", "string", ["1 2 3"], []),
    ("oid", "string", ["4294967295"], []),
    ("pg_lsn", "string", ["16/B374D848"], []),
    ("mood", "string", ["sad", "so so", "a,b", "NULL"], []),
    ('"odd ""schema"."odd type"', "string", ["ü"], []),
    ("pair", "string", ["(1,x)", "(,)", '(,"a b")'], []),
    ("age", "int", ["1"], []),
    ("padded", "string", ["ab"], []),
    ("int4[]", "array<int>", ["{1,NULL,-3}", "{}", "{7}"],
     ["{{1,2},{3,4}}", "[0:1]={1,2}", "[2:2]={5}", "{{1}}"]),
    ("bool[]", "array<boolean>", ["{t,f,NULL}"], []),
    ("float8[]", "array<double>", ["{NaN,-Infinity,-0,1e300}"], []),
    ("numeric(6,2)[]", "array<decimal(6,2)>", ["{1.50,NULL}", "{}"], ["{1,NaN}"]),
    ("numeric[]", "array<string>", ["{1.500,NaN,NULL}"], []),
    ("text[]", "array<string>", ['{a,"b,c","NULL",NULL,"null",""}', '{"a\\"b","c\\\\d","{x}"," "}',
                                 '{"\\\\\\""}', "{ü}", "{}"],
     ['{{a,b},{c,"d}"}}', '[-1:0]={"a,",NULL}']),
    ("varchar(3)[]", "array<string>", ["{abc,NULL}"], []),
    ("char(3)[]", "array<string>", ['{"a  "}'], []),
    ("bytea[]", "array<binary>", ['{"\\\\x00ff",NULL,"\\\\x"}'], []),
    ("date[]", "array<date>", ["{2020-01-01,NULL}"], ["{2020-01-01,infinity}", "{0044-03-15 BC}"]),
    ("timestamp[]", "array<timestamp_ntz>", ['{"2020-01-01 10:00:00.5",NULL}'], ["{infinity}"]),
    ("timestamptz[]", "array<timestamp>", ['{"2020-01-01 10:00:00+05",NULL}'], ["{-infinity}"]),
    ("uuid[]", "array<string>", ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"], []),
    ("jsonb[]", "array<string>", ['{"{\\"a\\": [1, 2]}","\\"x\\\\\\\\y\\"",NULL}'], []),
    ("box[]", "array<string>", ["{(2,2),(1,1);(4,4),(3,3)}"], []),
    ("int4range[]", "array<string>", ['{"[1,5)",empty}'], []),
    ("mood[]", "array<string>", ['{sad,"so so","a,b","NULL",NULL}'], []),
    ("pair[]", "array<string>", ['{"(1,x)","(,\\"a b\\")"}'], []),
    ("age[]", "array<int>", ["{1,NULL}"], ["{{1},{2}}"]),
    ("ages", "array<int>", ["{1,2}"], []),
    ("vector(3)", "array<float>", ["[1,2.5,-0.1]", "[0,0,0]"], []),
    ("halfvec(2)", "array<float>", ["[1,-0.5]"], []),
    ("sparsevec(5)", "string", ["{1:1,3:2}/5"], []),
    ("hstore", "map<string,string>", ["", '"a"=>"1", "b"=>NULL',
                                      r'"q\"\\"=>"x => y, \"z\"", ""=>"NULL"'], []),
]  # fmt: skip


def available_cases(database):
    """Those whose extension the server has; the types of those it hasn't are left out."""
    extensions = {"hstore": ("hstore",), "vector": ("vector", "halfvec", "sparsevec")}
    absent = []
    for extension, types in extensions.items():
        if database.execute("select 1 from pg_available_extensions where name = %s", (extension,)):
            database.execute(f"create extension if not exists {extension}")
        else:
            absent += types
    return [case for case in CASES if not case[0].startswith(tuple(absent))]


@pytest.fixture
def values(any_database):
    """A table with a column per case and a row per text, and a slot's changes of it."""
    database = any_database
    database.execute(ALWAYS)
    database.cases = available_cases(database)
    names = [sql.Identifier(f"c {n}") for n in range(len(database.cases))]
    columns = sql.SQL(", ").join(
        sql.SQL("{} {}").format(name, sql.SQL(case[0]))
        for name, case in zip(names, database.cases, strict=True)
    )
    database.connection.execute(sql.SQL("create table t (id int primary key, {})").format(columns))
    database.connection.execute("alter table t replica identity full")
    database.execute("create publication p for table t")
    database.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    texts = [held + unheld for _, _, held, unheld in database.cases]
    for row in range(max(map(len, texts)) + 1):
        given = [sql.Literal(t[row] if row < len(t) else None) for t in texts]
        database.connection.execute(
            sql.SQL("insert into t values ({}, {})").format(row, sql.SQL(", ").join(given))
        )
    database.execute("update t set id = id")
    return database


def peek(conninfo):
    """The slot's messages through ADBC, with their envelope."""
    options = "'proto_version', '1', 'publication_names', 'p'"
    query = (
        "select lsn, xid::text::bigint as xid, data from pg_logical_slot_peek_binary_changes('s',"
        f" null, null, {options})"
    )
    with connect_arrow(conninfo, "test") as connection, connection.cursor() as cursor:
        cursor.execute(query)
        table = cursor.fetch_arrow_table()
    data = table["data"].combine_chunks()
    return Envelope(1 << 31).add(pa.array(range(len(table))), table["xid"].combine_chunks(), data)


def from_stream(conninfo, column_count, kind):
    batch = peek(conninfo)
    return decode_rows(
        batch.filter(pa.array([k == kind for k in batch["kind"].to_pylist()]))["data"], column_count
    )


def from_copy(conninfo, columns):
    """What the initial copy selects, typed."""
    expressions = [
        c
        for name, target in columns
        for c in target.copy_expressions(sql.Identifier(name))
        if c is not None
    ]
    query = sql.SQL("select {} from public.t order by id").format(
        sql.SQL(", ").join(e + sql.SQL(f" as x{n}") for n, e in enumerate(expressions))
    )
    with connect_arrow(conninfo, "test") as connection, connection.cursor() as cursor:
        cursor.execute(query.as_string(None))
        selected = iter([c.combine_chunks() for c in cursor.fetch_arrow_table().columns])
    typed = []
    for name, target in columns:
        value, raw = next(selected), None
        value = value.storage if isinstance(value, pa.ExtensionArray) else value
        if target.copy_expressions(sql.Identifier(name))[1] is not None:
            raw = next(selected)
        if value.type != target.arrow:
            value, raw = target.from_text(value)
        typed.append((value, raw))
    return typed


def plain(array):
    """Python values in which NaN equals NaN and -0 differs from 0."""

    def same(value):
        if isinstance(value, list):
            return [same(v) for v in value]
        if isinstance(value, float):
            return "NaN" if math.isnan(value) else (value, math.copysign(1, value))
        return value

    return [same(v) for v in (array.to_pylist() if array is not None else [])]


def test_every_type(values):
    """Stream and copy give equal values and raw texts, which are PostgreSQL's."""
    with connect(values.conninfo, "test") as connection:
        (table,) = read_published_tables(connection, ["p"])
        # What the output functions print under the pinned settings.
        printed = connection.execute(
            sql.SQL("select {} from public.t order by id").format(
                sql.SQL(", ").join(
                    sql.SQL("{}").format(sql.Identifier(c.name)) for c in table.columns
                )
            ),
            binary=False,
        )
        printed = [
            [printed.pgresult.get_value(r, k) for r in range(printed.pgresult.ntuples)]
            for k in range(len(table.columns))
        ]
        (relation,) = [
            read_relation(m)
            for m, k in zip(
                *(peek(values.conninfo)[n].to_pylist() for n in ("data", "kind")), strict=True
            )
            if k == "R"
        ]
        pairs = {(c.type_oid, c.typmod) for c in relation.columns}
        types = read_types(connection, pairs)
    assert [c.name for c in relation.columns] == [c.name for c in table.columns]
    inserted = from_stream(values.conninfo, len(table.columns), "I")
    updated = from_stream(values.conninfo, len(table.columns), "U")
    assert bytes(updated.old_kind) == b"O" * len(updated)
    targets = [target_type(c.type) for c in table.columns]
    copied = from_copy(
        values.conninfo, [(c.name, t) for c, t in zip(table.columns, targets, strict=True)]
    )
    for k, (name, spark, held, unheld) in enumerate(values.cases, 1):
        where, target, column = f"{name}:", targets[k], relation.columns[k]
        assert (where, target.spark) == (where, spark)
        assert target_type(types[(column.type_oid, column.typmod)]) == target
        # The stream sends what the output function prints, in new and in old tuples.
        for sent in (inserted.new, updated.old, updated.new):
            assert (
                where,
                [
                    None if updated.unchanged[k][r] and sent is updated.new else v
                    for r, v in enumerate(printed[k])
                ],
            ) == (where, sent[k].to_pylist())
        typed, raw = target.from_text(inserted.new[k])
        typed.validate(full=True)
        assert typed.type == target.arrow
        count = len(held) + len(unheld)
        missing = [r for r in range(len(typed)) if not typed[r].is_valid]
        assert (where, missing) == (where, list(range(len(held), len(typed))))
        raws = [v.decode() for v in printed[k][len(held) : count]]
        expected_raw = [None] * len(held) + raws + [None] * (len(typed) - count) if unheld else []
        assert (where, plain(raw)) == (where, expected_raw)
        value, copied_raw = copied[k]
        copied_raw = (
            copied_raw
            if copied_raw is not None and copied_raw.null_count < len(copied_raw)
            else None
        )
        assert value.type == target.arrow
        assert (where, plain(value)) == (where, plain(typed))
        assert (where, plain(copied_raw)) == (where, expected_raw)


def test_typed_values_equal_the_tables(values):
    """psycopg's own readers of the table give the same Python values."""
    compared = {
        "boolean", "smallint", "int", "bigint", "float", "double", "binary", "date",
        "timestamp_ntz", "timestamp",
    }  # fmt: skip
    compared |= {f"array<{t}>" for t in compared} | {
        c[1] for c in values.cases if "decimal" in c[1]
    }
    rows = from_stream(values.conninfo, len(values.cases) + 1, "I")
    with connect(values.conninfo, "test") as connection:
        (table,) = read_published_tables(connection, ["p"])
        seen = 0
        for k, (name, spark, held, _) in enumerate(values.cases, 1):
            if spark not in compared or name in ("vector(3)", "halfvec(2)", "age[]", "ages"):
                continue
            query = sql.SQL("select {} from public.t where id < {} order by id").format(
                sql.Identifier(f"c {k - 1}"), len(held)
            )
            expected = [value for (value,) in connection.execute(query)]
            typed, _ = target_type(table.columns[k].type).from_text(rows.new[k])
            if spark in ("float", "array<float>"):
                expected = pa.array(expected, typed.type).to_pylist()
            assert (name, plain(typed.slice(0, len(held)))) == (
                name,
                plain(pa.array(expected, typed.type)),
            )
            seen += 1
    assert seen > 20


MARKS = Marks.drawn("ab")


def source_texts(conninfo, columns, *, raw=True):
    """What stands for each value of these columns in a checksum that PostgreSQL computes."""
    texts = [
        source_text([(sql.Identifier(name), target)], MARKS, raw=raw) for name, target in columns
    ]
    query = sql.SQL("select {} from public.t order by id").format(sql.SQL(", ").join(texts))
    with connect(conninfo, "test") as connection:
        return list(zip(*connection.execute(query).fetchall(), strict=True))


def lake_texts(columns, copied, *, raw=True):
    """What stands for them in the lake's, of what a copy holds."""
    return [
        tuple(target_texts([(value, target)], [verbatim if raw else None], MARKS).to_pylist())
        for (_, target), (value, verbatim) in zip(columns, copied, strict=True)
    ]


def test_both_sides_make_the_same_text_of_every_type(values):
    """Checksums in PostgreSQL and of the lake's values agree, raw texts included."""
    with connect(values.conninfo, "test") as connection:
        (table,) = read_published_tables(connection, ["p"])
    columns = [(c.name, target_type(c.type)) for c in table.columns]
    copied = from_copy(values.conninfo, columns)
    raws = [kind for (_, kind), (_, raw) in zip(columns, copied, strict=True) if raw is not None]
    assert [kind for kind in raws if not kind.may_be_raw] == []
    for raw in (True, False):
        ours, theirs = (
            lake_texts(columns, copied, raw=raw),
            source_texts(values.conninfo, columns, raw=raw),
        )
        for (name, _, *_), mine, other in zip(
            [("id", None), *values.cases], ours, theirs, strict=True
        ):
            assert (name, raw, mine) == (name, raw, other)
    whole = target_texts(
        [(v, t) for (_, t), (v, _) in zip(columns, copied, strict=True)],
        [r for _, r in copied],
        MARKS,
    )
    hashed = hash_texts(whole, 77).tolist()
    row = source_text([(sql.Identifier(name), target) for name, target in columns], MARKS, raw=True)
    query = sql.SQL('select hashtextextended({} collate "C", 77) from public.t order by id').format(
        row
    )
    with connect(values.conninfo, "test") as connection:
        assert hashed == [value for (value,) in connection.execute(query)]


NUMERICS = [
    "0", "0.000", "-0.5", "1.500", "1e20", "1e-7", "123456789012345678", "0.1234567890123456789",
    "1e307", "1e-320", "1e400", "NaN", "Infinity", "-Infinity", "-1e-12",
    "12345678901234567890123456789.5", "100",
]  # fmt: skip


@pytest.mark.parametrize("chosen", ["double", "decimal(38,10)", "string"])
def test_both_sides_make_the_same_text_of_numerics_that_are_of_a_chosen_type(database, chosen):
    """Equal numbers have equal texts where the type has no scale."""
    database.execute("create table t (id int primary key, n numeric, l numeric[])")
    for number, text in enumerate([*NUMERICS, None]):
        database.execute(
            "insert into t values (%s, %s, array[%s::numeric, null])", (number, text, text)
        )
    database.execute("create publication p for table t")
    with connect(database.conninfo, "test") as connection:
        (table,) = read_published_tables(connection, ["p"])
    columns = [(c.name, target_type(c.type, TypeOptions(numeric=chosen))) for c in table.columns]
    copied = from_copy(database.conninfo, columns)
    ours, theirs = lake_texts(columns, copied), source_texts(database.conninfo, columns)
    assert ours == theirs


def test_arrays_of_other_elements_have_other_texts_on_both_sides(database):
    """No element, an empty one, two of them, a null."""
    texts = ["{}", '{""}', '{"",""}', "{NULL}", '{NULL,""}', '{"",NULL}', '{",",""}', None]
    database.execute("create table t (id int primary key, a text[], b char(3)[])")
    for number, text in enumerate(texts):
        database.execute("insert into t values (%s, %s, %s)", (number, text, text))
    database.execute("create publication p for table t")
    with connect(database.conninfo, "test") as connection:
        (table,) = read_published_tables(connection, ["p"])
    columns = [(c.name, target_type(c.type)) for c in table.columns]
    ours, theirs = (
        lake_texts(columns, from_copy(database.conninfo, columns)),
        source_texts(database.conninfo, columns),
    )
    assert ours == theirs
    assert [len(set(found)) for found in ours] == [len(texts)] * 3

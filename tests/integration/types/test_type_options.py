"""Types by choice: initial sync and stream hold the same values; later choices count."""

from dataclasses import replace
from decimal import Decimal

import pytest

from tests.oracles.compare import differing
from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from waldelta.errors import SyncFailed
from waldelta.jobs.consume import consume
from waldelta.jobs.sync import run_sync
from waldelta.pipeline.job import load_job
from waldelta.pipeline.run_result import RunFailed
from waldelta.postgres import PgType
from waldelta.postgres.type_catalog import NUMERIC_OID
from waldelta.stages.sync.sync import sync
from waldelta.types import stored_type
from waldelta.types.type_map import target_type

pytestmark = pytest.mark.pg

DDL = "create table t(id int primary key, n numeric, w numeric(60,5), a numeric[], j json, b jsonb)"
NUMBERS = [
    "0", "-1.50", "0.1", "1e20", "1e40", "123456789.123456789", "NaN", "Infinity",
    "0.33333333333333333333", "-7",
    None,
]  # fmt: skip
# The limits of w round, and it has no infinity before PostgreSQL 14's.
WIDE = ["0", "-1.5", "0.1", "1e20", "1e40", "123456789.12345", "NaN", "1e54", "0.33333", "-7", None]
ARRAYS = [
    "{}", "{1.5,NULL}", "{0.1}", "{1e40}", "{NaN,1}", "{{1},{2}}", "{0.33333333333333333333}",
    None,
]  # fmt: skip
DOCUMENTS = [
    '{"b": 1.10, "a": [1, 2, null]}',
    "[]",
    "null",
    '"x"',
    "1e30",
    "1e400",
    "9" * 39,
    '{"ü": {"a": "\\"{"}}',
    None,
]
TEXTS = [*DOCUMENTS, '{"a":1,"a":2}', "1e-7", '{ "a" : 1 }', '"\\ud83d"']


def rows():
    every = [NUMBERS, WIDE, ARRAYS, TEXTS, DOCUMENTS]
    for k in range(max(map(len, every))):
        yield [values[k] if k < len(values) else None for values in every]


def write(database, first):
    for k, values in enumerate(rows()):
        database.execute("insert into t values (%s, %s, %s, %s, %s, %s)", (first + k, *values))


def held(runner, job, first):
    """Values and raw texts by column, from the row with key ``first`` on."""
    frame = (
        runner.spark()
        .read.format("delta")
        .load(job.lake.target("public.t").uri)
        .where(f"id >= {first}")
        .orderBy("id")
    )
    types = dict(frame.dtypes)
    shown = [f"to_json({name}) as {name}" if types[name] == "variant" else name for name in "nwajb"]
    found = frame.selectExpr(*shown, "_wd_raw").collect()[: len(list(rows()))]
    # NaN is not equal to itself.
    return (
        [[str(row[k]) for row in found] for k in range(5)],
        [row["_wd_raw"] or {} for row in found],
        types,
    )


def options(numeric, json, schema_changes="evolve"):
    return {"types": {"numeric": numeric, "json": json}, "schema_changes": schema_changes}


def with_types(database, lake, numeric, json, **more):
    return pipeline_file(
        lake, f"s_{database.name}", target={"root": lake, **options(numeric, json, **more)}
    )


# Numeric option and json option; the rows of each column that aren't held.
CHOICES = {
    "double, variant": ("double", "variant", {"n": {5, 8}, "w": set(), "a": {5, 6},
                                              "j": {5, 6, 9, 12}, "b": {5, 6}}),
    "decimal, string": ("decimal(38,6)", "string", {"n": {4, 5, 6, 7, 8}, "w": {4, 6, 7},
                                                    "a": {3, 4, 5, 6}, "j": set(), "b": set()}),
}  # fmt: skip


@pytest.mark.nightly("types by choice on both paths")
@pytest.mark.parametrize("choice", CHOICES)
def test_both_paths_hold_the_same(runner, database, lake, choice):
    """What the type can't hold exactly stands in _wd_raw, and is counted."""
    numeric, json, unheld = CHOICES[choice]
    database.execute(DDL)
    job = bare_slot(database, with_types(database, lake, numeric, json))
    write(database, 0)
    counted = run_sync(runner, job).tables["public.t"].raw_rows
    write(database, 1000)
    database.execute("alter table t alter n set storage external, alter j set storage external")
    long = "(select string_agg(md5(i::text), '') from generate_series(1, 300) i)"
    database.execute(
        f"insert into t(id, n, j) select 5000, repeat('7', 20000)::numeric, to_json({long})"
    )
    result = consume(runner, job)
    copied, copied_raws, types = held(runner, job, 0)
    streamed, streamed_raws, _ = held(runner, job, 1000)
    assert (copied, copied_raws) == (streamed, streamed_raws)
    assert [types[name] for name in "nwajb"] == [numeric, numeric, f"array<{numeric}>", json, json]
    for name, missing in unheld.items():
        assert (name, {k for k, raw in enumerate(copied_raws) if name in raw}) == (name, missing)
    assert counted == sum(bool(raw) for raw in copied_raws)
    assert result.tables["public.t"].raw_rows == counted + 1
    # Values so long that they are stored apart come as unchanged.
    database.execute("update t set w = 1 where id = 5000")
    consume(runner, job)
    assert differing(runner, job) == {}
    (last,) = (
        runner.spark()
        .read.format("delta")
        .load(job.lake.target("public.t").uri)
        .where("id = 5000")
        .collect()
    )
    assert (last["w"], last["_wd_raw"]) == (
        Decimal(1) if "decimal" in numeric else 1.0,
        {"n": "7" * 20_000},
    )
    # A comparison with the source finds each value as it was stored.
    (again,) = sync(runner, job, ["public.t"], by_diff=True)
    assert (again.copy.full_rewrite_reason, again.written) == (None, 0)


@pytest.mark.soak("a second change of types")
def test_another_choice_copies_again(runner, database, lake):
    """Values of two types are never mixed: the next changes bring a new copy, and then go on."""
    database.execute(DDL)
    job = bare_slot(database, with_types(database, lake, "string", "string"))
    write(database, 0)
    sync(runner, job)
    write(database, 1000)
    for numeric, json in (("double", "string"), ("double", "variant"), ("decimal(38,2)", "string")):
        job = load_job(with_types(database, lake, numeric, json), "test")
        database.execute("update t set n = n + 1 where id < 1000")
        result = consume(runner, job)
        assert ["by the pipeline file's types" in warning for warning in result.warnings] == [True]
        database.execute("update t set n = n - 1 where id < 1000")
        assert consume(runner, job).warnings == []
        state = job.read_states()["public.t"]
        assert [c.spark_type for c in state.columns] == [
            "int",
            numeric,
            numeric,
            f"array<{numeric}>",
            json,
            json,
        ]
        assert differing(runner, job) == {}


@pytest.mark.nightly("a choice that stops a table")
@pytest.mark.parametrize("policy", ["fail", "ignore"])
def test_another_choice_stops_where_nothing_may_follow(runner, database, lake, policy):
    """The table's changes wait; a sync by hand brings it on."""
    database.execute(DDL)
    job = bare_slot(database, with_types(database, lake, "string", "string", schema_changes=policy))
    sync(runner, job)
    job = load_job(with_types(database, lake, "double", "string", schema_changes=policy), "test")
    write(database, 0)
    types = "'n' is string in its target, and numeric as double by the pipeline file's types"
    with pytest.raises(RunFailed, match=types):
        consume(runner, job)
    sync(runner, job, ["public.t"])
    consume(runner, job)
    assert differing(runner, job) == {}


@pytest.mark.nightly("a variant by Spark alone")
def test_an_added_document_is_a_variant_too(runner, database, lake):
    """With and without a default for the rows that exist."""
    database.execute(
        "create table t(id int primary key); insert into t select generate_series(1, 3)"
    )
    job = bare_slot(database, with_types(database, lake, "double", "variant"))
    sync(runner, job)
    database.execute("""alter table t add j jsonb; insert into t values (4, '{"a": 1}')""")
    consume(runner, job)
    database.execute(
        """alter table t add k jsonb not null default '{"b": [2]}', add n numeric default 1.5"""
    )
    database.execute("insert into t values (5, '[1]')")
    assert consume(runner, job).warnings == []
    state = job.read_states()["public.t"]
    assert [c.spark_type for c in state.columns] == ["int", "variant", "variant", "double"]
    assert differing(runner, job) == {}


@pytest.mark.nightly("keys that end a table, each in whole runs")
@pytest.mark.parametrize("binary", [False, True])
def test_keys_that_their_type_cant_hold(runner, database, lake, binary):
    """An error when copied and when streamed; types.text makes them strings."""
    database.execute("create table t(id int, upto timestamptz, v text, primary key (id, upto))")
    database.execute("insert into t values (1, '2000-01-01 00:00:00+00', 'a')")
    options = {"binary": binary}
    job = bare_job(database, lake, options=options)
    sync(runner, job)
    database.execute("insert into t values (1, 'infinity', 'b')")
    told = (
        "public.t: key column 'upto' has a value that timestamp can't hold.*name the column under"
        " types.text"
    )
    with pytest.raises(RunFailed, match=told):
        consume(runner, job)
    with pytest.raises(SyncFailed, match=told):
        sync(runner, job, ["public.t"])
    database.execute("update t set upto = '2001-01-01 00:00:00+00' where upto = 'infinity'")
    sync(runner, job, ["public.t"])
    database.execute("update t set v = 'x' where v = 'b'")
    assert consume(runner, replace(job, run_id="corrected")).warnings == []
    assert differing(runner, job) == {}
    database.execute("update t set upto = 'infinity' where v = 'x'")
    chosen = {"root": lake, "tables": {"public.t": {"types": {"text": ["upto"]}}}}
    job = load_job(
        pipeline_file(lake, f"s_{database.name}", options=options, target=chosen), "test"
    )
    sync(runner, job, ["public.t"])
    database.execute(
        "update t set v = 'c' where upto = 'infinity'; insert into t values (2, 'infinity', 'd')"
    )
    database.execute("update t set upto = now() where id = 2; delete from t where v = 'a'")
    assert consume(runner, job).warnings == []
    state = job.read_states()["public.t"]
    assert [column.spark_type for column in state.columns] == ["int", "string", "string"]
    assert differing(runner, job) == {}


# A type in the ledger, and two values in Spark SQL; minus and zero are columns, since Spark takes
# the literals for the same.
APART = [
    ("double", "minus", "zero"),
    ("numeric as double", "minus", "zero"),
    ("array<float>", "array(minus)", "array(zero)"),
    ("array<float>", "array(null)", "null"),
    ("map<string,string>", "map()", "null"),
    ("map<string,string>", "map('a', null)", "map('a', 'null')"),
    ("variant", "parse_json('{}')", "parse_json('[]')"),
    ("variant", "parse_json('null')", "null"),
    ("string", "'1.0'", "'1.00'"),
]
ALIKE = [
    ("double", "minus", "zero"),
    ("float", "'NaN'", "'NaN'"),
    ("map<string,string>", "map('a', '1', 'b', null)", "map('b', null, 'a', '1')"),
]


def typed(cases):
    """The cases' types, and values of them."""
    for name, *values in cases:
        kind = stored_type(name)
        yield kind, *(f"cast({value} as {kind.spark})" for value in values)


def test_spark_compares_values_as_their_types_say(runner):
    """By identity, and by PostgreSQL's equality."""
    apart = [f"{t.exact_sql(a)} <=> {t.exact_sql(b)}" for t, a, b in typed(APART)]
    same = [f"{t.exact_sql(a)} <=> {t.exact_sql(a)}" for t, a, _ in typed(APART)]
    same += [f"{t.equal_sql(a)} <=> {t.equal_sql(b)}" for t, a, b in typed(ALIKE)]
    numeric = target_type(PgType(NUMERIC_OID, -1, "numeric"))
    same.append(" <=> ".join(numeric.equal_sql(text) for text in ("'1.0'", "'1'")))
    columns = runner.spark().createDataFrame([("-0", "0")], "minus string, zero string")
    found = columns.selectExpr(f"array({', '.join(apart)})", f"array({', '.join(same)})")
    ((not_apart, are_same),) = found.collect()
    assert [form for form, equal in zip(apart, not_apart, strict=True) if equal] == []
    assert [form for form, equal in zip(same, are_same, strict=True) if not equal] == []

"""Row filters: PostgreSQL and Spark must agree row by row, errors included."""

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pyarrow as pa
import pytest

from tests.oracles import row_filter_generator as generator
from tests.support.seeds import chosen_seed
from waldelta.errors import ConfigError, FilterNotTranslatable
from waldelta.lake.ledger import ColumnState
from waldelta.postgres import TableId, connect
from waldelta.postgres.type_catalog import read_types
from waldelta.row_filter import resolve_filter
from waldelta.row_filter.spark.evaluate import evaluate
from waldelta.row_filter.spark.translate import spark_condition
from waldelta.row_filter.spark.values import UNJUDGED
from waldelta.snapshot.read_table import raw_map
from waldelta.spark.arrow_schema import ddl
from waldelta.types.type_map import target_type

pytestmark = pytest.mark.usefixtures("compiled")
TABLE = TableId("public", "t")
ROWS, BATCH, ALONE = 60, 30, 12

_TRY = """
create function public.try(expression text, row_id int) returns text language plpgsql as $$
declare found bool;
begin
    execute format('select (%s) is true from public.t where id = $1',
      expression) into found using row_id;
    return found::text;
exception when others then
    return 'error';
end $$
"""


class Judges:
    """The same rows in PostgreSQL and as a Delta target holds them in Spark."""

    def __init__(self, database, runner, rng):
        database.execute(generator.DDL)
        database.execute(_TRY)
        self.pg, self.spark = connect(database.conninfo, "test"), runner.spark()
        names = list(generator.VALUES)
        insert = (
            f"insert into public.t (id, {', '.join(names)}) values"
            f" ({', '.join(['%s'] * (len(names) + 1))})"
        )
        for key, values in generator.rows(rng, ROWS):
            self.pg.execute(insert, [key, *values])
        self.columns, self.table, self.frame, self.raw = self._target()

    def _target(self):
        described = self.pg.execute(
            "select attname, atttypid::int8, atttypmod from pg_attribute where attrelid ="
            " 'public.t'::regclass and attnum > 0 order by attnum"
        ).fetchall()
        types = read_types(self.pg, [(oid, typmod) for _, oid, typmod in described])
        columns, arrays, raws = [], {}, {}
        for name, oid, typmod in described:
            kind = types[oid, typmod]
            target = target_type(kind)
            texts = [
                r[0]
                for r in self.pg.execute(
                    f'select case when "{name}" is distinct from null then concat("{name}") end'
                    " from public.t order by id"
                )
            ]
            arrays[name], raw = target.from_text(pa.array(texts, pa.string()))
            if raw is not None:
                raws[name] = raw
            columns.append(ColumnState(name, oid, typmod, kind.name, target.spark, not_null=False))
        table = pa.table(arrays).append_column("_wd_raw", raw_map(raws, ROWS))
        raw_rows = {
            name: {k for k, text in enumerate(raw.to_pylist()) if text is not None}
            for name, raw in raws.items()
        }
        return (
            columns,
            table,
            self.spark.createDataFrame(table, ddl(table.schema)).coalesce(1).cache(),
            raw_rows,
        )

    def postgres(self, text):
        """true, false or error for every row, in the order of their ids."""
        try:
            found = self.pg.execute(
                f"select ({text.replace('%', '%%')}) is true from public.t order by id", ()
            ).fetchall()
            return [str(r[0]).lower() for r in found]
        except psycopg.Error:
            return [
                r[0]
                for r in self.pg.execute(
                    "select public.try(%s, id) from public.t order by id", (text,)
                )
            ]

    def translate(self, text):
        found = resolve_filter(self.pg, TABLE, text)
        return spark_condition(found, self.columns), found

    def alone(self, condition, row):
        """What Spark says of one row: true, false, error or unjudged."""
        try:
            found = (
                self.frame.where(f"id = {row}")
                .selectExpr(f"coalesce({condition}, false)")
                .collect()[0][0]
            )
        except Exception as err:
            return "unjudged" if UNJUDGED in str(err) else "error"
        return str(found).lower()

    def disagreeing(self, pairs, counts):
        """Of conditions with one row each those where only one of both sides fails."""
        wrong = []
        with ThreadPoolExecutor(4) as threads:
            said = list(threads.map(lambda pair: self.alone(pair[0][0], pair[1]), pairs))
        for ((condition, text, expected, odd), n), verdict in zip(pairs, said, strict=True):
            counts[f"alone: {verdict}"] += 1
            if verdict != expected[n] and not (n in odd and verdict == "unjudged"):
                wrong.append((text, condition, [(n, expected[n], verdict)]))
        return wrong

    def batch(self, judged):
        """Of many conditions the rows without an error in PostgreSQL, with all values held."""
        selected = []
        for k, (condition, _, expected, odd) in enumerate(judged):
            left_out = {n for n, e in enumerate(expected) if e == "error"} | odd
            guard = (
                f"case when id in ({', '.join(map(str, sorted(left_out)))}) then null else"
                if left_out
                else "case when true then"
            )
            selected.append(f"{guard} coalesce({condition}, false) end as k{k}")
        return self.frame.selectExpr("id", *selected).orderBy("id").collect()

    def differences_here(self, judged, counts):
        """Conditions that Arrow evaluates, with the rows on which it and PostgreSQL disagree.

        A condition that PostgreSQL fails on has no answer of Arrow's.
        """
        found = []
        for condition, text, expected, odd in judged:
            answers = evaluate(condition, self.table)
            counts[f"Arrow: {'no answer' if answers is None else 'answer'}"] += 1
            wrong = [
                (n, expected[n], answer)
                for n, answer in enumerate([] if answers is None else answers.to_pylist())
                if n not in odd and str(bool(answer)).lower() != expected[n]
            ]
            found += [(text, condition, wrong[:3])] if wrong else []
        return found

    def differences(self, judged):
        """Conditions with the rows on which the two disagree."""
        try:
            rows = self.batch(judged)
        except Exception as err:
            if len(judged) == 1:
                return [(judged[0][1], judged[0][0], str(err).splitlines()[0][:300])]
            half = len(judged) // 2
            return self.differences(judged[:half]) + self.differences(judged[half:])
        found = []
        for k, (condition, text, expected, _) in enumerate(judged):
            wrong = [
                (n, expected[n], row[f"k{k}"])
                for n, row in enumerate(rows)
                if row[f"k{k}"] is not None and str(row[f"k{k}"]).lower() != expected[n]
            ]
            found += [(text, condition, wrong[:3])] if wrong else []
        return found


@contextmanager
def compiled(runner, *, yes):
    """Interpreted and compiled expressions are two implementations; compiling takes far longer."""
    before = {
        name: runner.spark().conf.get(name)
        for name in ("spark.sql.codegen.factoryMode", "spark.sql.codegen.wholeStage")
    }
    runner.spark().conf.set(
        "spark.sql.codegen.factoryMode", "CODEGEN_ONLY" if yes else "NO_CODEGEN"
    )
    runner.spark().conf.set("spark.sql.codegen.wholeStage", str(yes).lower())
    runner.spark().sparkContext.setLogLevel("OFF")  # errors are wanted here
    try:
        yield
    finally:
        for name, value in before.items():
            runner.spark().conf.set(name, value)
        runner.spark().sparkContext.setLogLevel("ERROR")


@pytest.fixture
def seed():
    return chosen_seed()


# Found by random rounds.
FOUND = [
    "ia @> '{}'::int[]",
    "not (ia @> '{}'::int[])",
    "not ('{}'::int[] <@ ia)",
    "not ('{1}'::int[] && ia)",
    "not (ia <@ '{1,2,3}'::int[])",
    # What stands twice isn't computed where it could fail ...
    "b <> 0 and (a / b > 1 or a / b < -1)",
    "case when b = 0 then true else a % b = 1 or a % b = 2 end",
    # ... and what can't change the result is computed where it fails.
    "((5000000000 / l) is distinct from n::int8) is unknown",
    "coalesce(10 / a, 0) is null",
    "a + coalesce(10 / b, 0) > 3",
    "(10 / a) = any ('{}'::int[])",
    # A range may begin with the bracket that ends none, and an escape is what it is before the
    # pattern's letters are lowered.
    "('_' || t) ~ '^[]-a]'",
    "('-' || t) ~ '^[^]-a]'",
    "('abc' || t) ilike 'aBbC%' escape 'B'",
    "('a%' || t) like 'a\n%%' escape '\n'",
    "('a' || t) like 'a%' escape ''",
]
# Dates that Spark's types don't hold, where more than a comparison is wanted of them.
REFUSED = [
    "date_part('year', date '12024-01-01') = d",
    "date '0044-03-15 BC' - day2 > 1",
    "day < day2 and extract(dow from coalesce(day, date '12024-01-01')) = 1",
    "at + interval '1 day' > date_trunc('day', timestamp '12024-01-01')",
    "n + 'Infinity' > 1",
]
# Of arrays whose first element isn't the first, or with more dimensions: what PostgreSQL says, or
# an error, but no other answer.
ARRAYS = [
    "ia = '{1,2}'::int[]",
    "ia <> '{1,2}'::int[]",
    "ia @> '{1}'::int[] or id < 0",
    "1 = any (ia)",
    "cardinality(ia) = 2",
    "array_length(ia, 1) = 2",
    "ia is not null",
    "ia is null or ia is not null and a is distinct from 77",
]
REFUSED_ARRAYS = [
    "ia = '[0:1]={1,2}'::int[]",
    "ia @> '[0:1]={1,2}'::int[]",
    "a = any ('[0:1]={1,2}'::int[])",
]


def test_filters_that_were_wrong_once(database, runner):
    judges = Judges(database, runner, random.Random(1))
    judged = []
    for text in FOUND:
        condition, _ = judges.translate(text)
        judged.append(
            (
                condition,
                text,
                judges.postgres(text),
                judges.raw.get("ia", set()) if "ia" in text else set(),
            )
        )
    assert judges.differences_here(judged, Counter()) == []
    for yes in (False, True):
        with compiled(runner, yes=yes):
            assert judges.differences(judged) == []
            failing = [(j, j[2].index("error")) for j in judged if "error" in j[2]]
            assert judges.disagreeing(failing, Counter()) == []
    with compiled(runner, yes=False):
        odd = sorted(judges.raw["ia"])
        held = {
            text: [
                n
                for n, (v,) in enumerate(
                    judges.pg.execute("select ia::text from public.t order by id")
                )
                if v == text
            ]
            for text in ("[0:1]={1,2}", "{{1,2},{3,4}}", "{1,2,3}")
        }
        judged = [
            (judges.translate(text)[0], text, judges.postgres(text), set(odd)) for text in ARRAYS
        ]
        counts: Counter[str] = Counter()
        assert (
            judges.disagreeing([(j, rows[0]) for j in judged for rows in held.values()], counts)
            == []
        )
        assert counts.keys() >= {"alone: true", "alone: unjudged"}
    for text, why in [
        *((t, "constant that Spark can't hold") for t in REFUSED),
        *((t, "index doesn't start at 1") for t in REFUSED_ARRAYS),
    ]:
        with pytest.raises(FilterNotTranslatable, match=rf"at line 1, column \d+ .*{why}"):
            judges.translate(text)


@pytest.mark.nightly("random filters, beside those that were wrong once")
def test_random_filters(database, runner, seed):
    """Rows with NULLs and special values: no difference, and few are refused."""
    rng = random.Random(seed)
    judges = Judges(database, runner, rng)
    rounds = int(os.environ.get("WALDELTA_ROUNDS") or 1)
    counts, reasons, wrong = Counter(), Counter(), []
    for number in range(rounds):
        is_compiled = number % 4 == 3
        with compiled(runner, yes=is_compiled):
            judged = _judged(judges, rng, 10 if is_compiled else BATCH, counts, reasons)
            # Rows that fail in PostgreSQL must fail in Spark, one by one; those with verbatim
            # values may be unjudged.
            pairs = [
                (j, n) for j in judged for n, e in enumerate(j[2]) if e == "error" or n in j[3]
            ]
            found = judges.differences(judged) + judges.differences_here(judged, counts)
            found += judges.disagreeing(rng.sample(pairs, min(len(pairs), ALONE)), counts)
        wrong += found
        for text, _, how in found:
            print(f"round {number}: {text}: {how}", flush=True)
    print(dict(counts), reasons.most_common(12), sep="\n")
    assert not wrong, (f"WALDELTA_SEED={seed}", len(wrong), wrong[:5])
    assert counts["Arrow: answer"] > 0, counts
    assert counts["refused"] < 0.2 * (counts["refused"] + counts["translated"]), (
        counts,
        reasons.most_common(10),
    )


def _judged(judges, rng, size, counts, reasons):
    judged = []
    for _ in range(size):
        text = generator.expression(rng, depth=rng.choice((1, 2, 3)))
        try:
            condition, found = judges.translate(text)
        except FilterNotTranslatable as err:
            counts["refused"] += 1
            reasons[err.reason[:60]] += 1
            continue
        except ConfigError:
            counts["rejected by PostgreSQL"] += 1
            continue
        counts["translated"] += 1
        odd = (
            set().union(*(judges.raw.get(c, set()) for c in found.columns))
            if UNJUDGED in condition
            else set()
        )
        judged.append((condition, text, judges.postgres(text), odd))
    return judged

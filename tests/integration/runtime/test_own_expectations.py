"""Check and setup refuse own expectations that can't be evaluated, by file and number."""

from dataclasses import replace

from tests.support.pipelines import bare_job, job_for
from waldelta.config.pipeline_file import Target
from waldelta.stages.check import judge_suites
from waldelta.stages.check.judge_suites import judge_names, judging
from waldelta.stages.check.suite.kinds import KINDS
from waldelta.stages.setup.setup import plan_setup
from waldelta.stages.sync.sync import sync

ROWS = "expect_target_rows_to_satisfy"
BETWEEN = "expect_column_values_to_be_between"
IN_SET = "expect_column_values_to_be_in_set"
TABLE = (
    "create table t (id int primary key, amount int, price numeric, state text, due date,"
    " attrs jsonb, paid boolean, secret text)"
)
# What is written, and what is said of it.
NAMES = [
    (f"{{type: {BETWEEN}, kwargs: {{column: amuont, min_value: 0}}}}", "did you mean amount?"),
    ("{type: expect_column_mean_to_be_between, kwargs: {column: amuont, min_value: 0}}",
     "kwargs.column: the target has no column amuont: did you mean amount?"),
    (("{type: expect_column_pair_values_to_be_equal, kwargs: {column_A: id, column_B:"
      " amuont}, gate: stop}"),
     "kwargs.column_B: the target has no column amuont: did you mean amount?"),
    ("{type: expect_compound_columns_to_be_unique, kwargs: {column_list: [id, amuont]}}",
     "kwargs.column_list: the target has no column amuont: did you mean amount?"),
    (f"{{type: {BETWEEN}, kwargs: {{column: secret, min_value: 0}}}}",
     "column secret isn't published, so the target lacks it"),
    (("{type: expect_column_values_to_be_betwen, kwargs: {column: id, min_value: 0}, gate:"
      " quarantine}"), "did you mean expect_column_values_to_be_between?"),
    (f"{{type: {BETWEEN}, kwargs: {{column: id, min_valu: 0, max_value: 1}}, gate: quarantine}}",
     "kwargs.min_valu: no such argument: did you mean min_value?"),
    (f"{{type: {BETWEEN}, kwargs: {{column: amount, min_value: [1]}}, gate: stop}}",
     "kwargs.min_value: "),
    (f"{{type: {IN_SET}, kwargs: {{column: state, value_set: open}}}}", "kwargs.value_set: "),
    (
        # YAML reads yes and no as booleans.
        f"{{type: {IN_SET}, kwargs: {{column: state, value_set: [open, no]}}, gate: stop}}",
        "kwargs.value_set[1] is False, and column state is string: write a text in quotes",
    ),
    (f"{{type: {IN_SET}, kwargs: {{column: amount, value_set: [1, few]}}}}",
     "kwargs.value_set[1] is 'few', and column amount is int: write a number"),
    (f"{{type: {BETWEEN}, kwargs: {{column: price, min_value: 0}}, gate: quarantine}}",
     "column price is string in the target: "),
    (f"{{type: {BETWEEN}, kwargs: {{column: due, min_value: soon}}, gate: quarantine}}",
     "kwargs.min_value: value is not a valid float"),
    (f"{{type: {BETWEEN}, kwargs: {{column: due, min_value: 5}}, gate: quarantine}}",
     "column due is date: write a date or time"),
    (f'{{type: {ROWS}, kwargs: {{condition: "amount > > 0 )", meaning: m}}, gate: stop}}',
     "kwargs.condition is no condition in Spark SQL: "),
    (f"{{type: {ROWS}, kwargs: {{condition: amount positive, meaning: m}}}}",
     "kwargs.condition is no condition in Spark SQL: "),
    (f"{{type: {ROWS}, kwargs: {{condition: AMUONT > 0 and id > 0, meaning: m}}, gate: stop}}",
     "kwargs.condition: the target has no column AMUONT: did you mean amount?"),
    ((f"{{type: {BETWEEN}, kwargs: {{column: id, max_value: 9, row_condition: stat = 'x',"
      " condition_parser: spark}, gate: stop}"),
     "kwargs.row_condition: the target has no column stat: did you mean state?"),
    (f"{{type: {ROWS}, kwargs: {{condition: id > 0}}}}", "kwargs.meaning: field required"),
    (f"{{type: {ROWS}, kwargs: {{condition: true, meaning: m}}}}", "kwargs.condition"),
    ("{type: expect_target_key_to_be_unique, kwargs: {columns: [amuont]}}",
     "kwargs.columns: the target has no column amuont: did you mean amount?"),
    ("{type: expect_table_row_count_to_be_between, kwargs: {max_value: 9}, gate: quarantine}",
     "gate: quarantine needs an expectation that identifies the failing rows"),
    (f"{{type: {BETWEEN}, kwargs: {{column: id, max_value: 9, mostly: 0.5}}, gate: quarantine}}",
     "remove mostly"),
    *((f"{{type: {kind.type}, kwargs: {{columns: [id], meaning: m}}}}", "waldelta plans it")
      for kind in KINDS.values() if kind.is_internal),
]  # fmt: skip
# What only Spark refuses, by the columns' types or on a row.
OF_SPARK = [
    (f"{{type: {ROWS}, kwargs: {{condition: lowr(state) = 'x', meaning: m}}, gate: stop}}",
     "lowr"),
    (f"{{type: {ROWS}, kwargs: {{condition: amount, meaning: m}}}}", "DATATYPE_MISMATCH"),
    (f"{{type: {ROWS}, kwargs: {{condition: due > paid, meaning: m}}, gate: stop}}",
     "DATATYPE_MISMATCH"),
    (f"{{type: {IN_SET}, kwargs: {{column: due, value_set: [soon]}}, gate: quarantine}}",
     "CAST_INVALID_INPUT"),
    (("{type: expect_column_values_to_match_regex, kwargs: {column: state, regex: '('}, gate:"
      " quarantine}"), "INVALID_PARAMETER_VALUE"),
]  # fmt: skip
# What is refused only once the target has a row that it can't be evaluated on.
OF_ROWS = [
    (
        f"{{type: {ROWS}, kwargs: {{condition: cast(price as int) > 0, meaning: m}}, gate: stop}}",
        "CAST_INVALID_INPUT",
    )
]
FINE = [
    f"{{type: {BETWEEN}, kwargs: {{column: ID, min_value: '0'}}, gate: quarantine}}",
    f"{{type: {BETWEEN}, kwargs: {{column: due, min_value: '2020-01-01'}}, gate: quarantine}}",
    f"{{type: {IN_SET}, kwargs: {{column: state, value_set: [open, 'no', null]}}, gate: stop}}",
    f"{{type: {ROWS}, kwargs: {{condition: \"_wd_raw['due'] = 'infinity'\", meaning: m}}}}",
    f"{{type: {ROWS}, kwargs: {{condition: 1 / amount > 0, meaning: m}}, gate: stop}}",
    f"{{type: {ROWS}, kwargs: {{condition: due > current_date(), meaning: m}}, gate: stop}}",
    "{type: expect_column_to_exist, kwargs: {column: soon}}",
    "{type: expect_column_mean_to_be_between, kwargs: {column: amount, max_value: 5}, gate: stop}",
]


def written(folder, *items, name="public.t.yml"):
    (folder / name).write_text("expectations:\n" + "".join(f"  - {item}\n" for item in items))


def job_with(job, folder, **target):
    quality = job.pipeline.quality.model_copy(update={"suites": str(folder)})
    update = {"quality": quality} | ({"target": Target(**target)} if target else {})
    return replace(job, pipeline=job.pipeline.model_copy(update=update))


COLUMNS = ["id", "amount", "price", "state", "due", "attrs", "paid"]
ENTRY = {"name": "p", "tables": [{"name": "public.t", "columns": COLUMNS}, {"name": "public.u"}]}


def test_names_columns_and_arguments_are_judged_without_spark(database, conn, lake, tmp_path):
    """Of a target that doesn't exist yet, whose columns are those that its source publishes."""
    database.execute(f"{TABLE}; create table u (id int primary key)")
    job = job_with(job_for(database, lake, ENTRY), tmp_path)
    written(tmp_path, *(item for item, _ in NAMES))
    problems = plan_setup(conn, job, judge_names).problems
    file = tmp_path / "public.t.yml"
    for number, (item, said) in enumerate(NAMES):
        place = f"{file}:{number + 2}: expectations[{number}]: "
        (told,) = [text for text in problems if text.startswith(place)]
        assert said in told, item
    assert len(problems) == len(NAMES)
    written(tmp_path, *FINE, *(item for item, _ in [*OF_SPARK, *OF_ROWS]))
    assert plan_setup(conn, job, judge_names).problems == ()


def test_a_broken_file_is_of_its_own_table(database, conn, lake, tmp_path):
    """Another table's file is judged all the same; one of no table gets the name that is near."""
    database.execute(
        f"{TABLE}; create table u (id int primary key); alter table t replica identity full"
    )
    job = job_with(
        job_for(
            database, lake, {"name": "p", "tables": [{"name": "public.t"}, {"name": "public.u"}]}
        ),
        tmp_path,
        root=lake,
        tables={"public.t": {}, "app.paid": {"from": "public.t", "where": "paid"}},
    )
    (tmp_path / "public.t.yml").write_text("expectations: [")
    written(tmp_path, NAMES[0][0], name="public.u.yml")
    written(tmp_path, NAMES[0][0], name="app.paid.yml")
    written(tmp_path, NAMES[0][0], name="publc.t.yml")
    plan = plan_setup(conn, job, judge_names)
    of_t, of_paid, of_u = plan.problems
    assert of_t.startswith("expectations of public.t: ")
    assert "not valid YAML" in of_t
    assert "app.paid.yml:2: expectations[0]" in of_paid
    assert "did you mean amount?" in of_paid
    assert "public.u.yml:2: expectations[0]" in of_u
    assert "the target has no column amuont: it has id" in of_u
    (unused,) = [text for text in plan.warnings if "unused" in text]
    assert unused.endswith("fits no table of this pipeline: did you mean public.t.yml?")


def test_spark_evaluates_them_on_columns_and_rows(runner, database, conn, lake, tmp_path):
    """On a made-up row of a target that doesn't exist, and on rows of one that does."""
    folder = tmp_path / "suites"
    folder.mkdir()
    database.execute(f"{TABLE}; create table u (id int primary key)")
    job = bare_job(database, lake, ["public.t", "public.u"], None, quality={"suites": str(folder)})
    written(folder, *FINE, *(item for item, _ in [*OF_SPARK, *OF_ROWS]))

    def problems():
        with judging(job, runner.spark()) as judge_suite:
            found = plan_setup(conn, job, judge_suite).problems
        # Behind the file and the line.
        places = [text.partition("public.t.yml:")[2] for text in found]
        return [place.partition(": ")[2] for place in places if place]

    def of(cases):
        return [(f"expectations[{len(FINE) + n}]: ", said) for n, (_, said) in enumerate(cases)]

    database.execute("insert into t (id, price) values (1, 'NaN'), (2, 1.5)")
    for cases in (OF_SPARK, [*OF_SPARK, *OF_ROWS]):
        found = problems()
        expected = of(cases)
        assert [text.partition(": ")[0] + ": " for text in found] == [p for p, _ in expected], found
        for text, (_, said) in zip(found, expected, strict=True):
            assert said in text, found
        assert "NaN" not in "".join(found)
        if cases is OF_SPARK:
            sync(runner, job)


def test_spark_evaluates_only_so_many(runner, database, conn, lake, tmp_path, monkeypatch):
    """The others are judged by their names and arguments, which a warning says."""
    monkeypatch.setattr(judge_suites, "MOST_BY_SPARK", 1)
    database.execute(f"{TABLE}; create table u (id int primary key)")
    job = job_with(job_for(database, lake, ENTRY), tmp_path)
    condition = f"{{type: {ROWS}, kwargs: {{condition: lowr(state) = 'x', meaning: m}}}}"
    written(tmp_path, condition, condition)
    with judging(job, runner.spark()) as judge_suite:
        plan = plan_setup(conn, job, judge_suite)
    (problem,) = plan.problems
    assert "expectations[0]: " in problem
    (warning,) = [text for text in plan.warnings if "expectations of" in text]
    assert warning.startswith("expectations of public.t: the last 1 that need Spark")

"""The check stage on real Spark, Delta and Great Expectations."""

import re
from decimal import Decimal
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.bookkeeping import read_expectation_results
from tests.support.disk import open_to_others
from waldelta.config import PipelineFile, split_table_name
from waldelta.errors import ConfigError, QualityFailed, StateError
from waldelta.lake import Lake, target_uri
from waldelta.lake.ledger import (
    BatchCut,
    ColumnState,
    Decision,
    Decisions,
    Ledger,
    TableState,
    TargetCut,
    now,
)
from waldelta.stages.check.check import check
from waldelta.stages.check.check_run import RunOutcome
from waldelta.stages.check.reports.data_docs import prune_reports

RUN_ID = "scheduled__2026-01-01T00:00:00+00:00"
COLUMNS = [
    ColumnState("id", 20, -1, "bigint", "bigint", not_null=True),
    ColumnState("origin", 25, -1, "text", "string", not_null=True),
    ColumnState("amount", 1700, 786438, "numeric(12,2)", "decimal(12,2)", not_null=True),
]
DDL = "id bigint, origin string, amount decimal(12,2), _wd_lsn bigint, _wd_raw map<string,string>"
TYPES = {
    "int": pa.int32(),
    "bigint": pa.int64(),
    "string": pa.string(),
    "decimal(12,2)": pa.decimal128(12, 2),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}
GOOD = [(1, "JFK", "1.50", None), (2, "JFK", None, {"amount": "NaN"}), (3, "JFK", "0.00", None)]
FILTER = "(origin = 'JFK'::text)"


class Scene:
    def __init__(self, runner, folder):
        self.runner, self.folder = runner, folder
        self.root = f"file://{folder}/lake"
        self.ledger = Ledger(Lake(self.root))
        self.suites = folder / "expectations"
        self.suites.mkdir()

    def pipeline(self, name="flights", root=None, **quality):
        return PipelineFile.model_validate(
            {
                "pipeline": name,
                "source": {"conn_id": "c", "slot": "s",
                           "publications": [{"name": "p", "all_tables": True}]},
                "target": {"root": root or self.root},
                "quality": {"suites": str(self.suites), **quality},
            }
        )  # fmt: skip

    def target(self, rows=GOOD, table="public.t", ddl=DDL, row_filter=FILTER, columns=COLUMNS):
        fields = [field.split(" ", 1) for field in ddl.split(", ")]
        schema = pa.schema([(name, TYPES[kind]) for name, kind in fields])
        typed = [
            {
                "id": key,
                "origin": origin,
                "amount": amount if amount is None or "amount string" in ddl else Decimal(amount),
                "_wd_lsn": 1,
                "_wd_raw": None if raw is None else list(raw.items()),
            }
            for key, origin, amount, raw in rows
        ]
        uri = target_uri(self.root, *split_table_name(table))
        write_deltalake(uri, pa.Table.from_pylist(typed, schema), mode="append")
        state = TableState(
            now(), "sync", table, 1, "synced", key_columns=["id"], columns=columns,
            row_filter=row_filter,
        )  # fmt: skip
        self.ledger.append(state)

    def own(self, text, name="public.t.yml"):
        (self.suites / name).write_text(text)

    def check(self, pipeline=None, tables=None, run_id=RUN_ID, left=None):
        return check(self.runner, pipeline or self.pipeline(), self.ledger, run_id, tables, left)

    @property
    def docs(self):
        return self.folder / "lake" / "_waldelta" / "data_docs"


@pytest.fixture
def lake(runner, tmp_path):
    return Scene(runner, tmp_path)


def test_a_good_target_passes(lake):
    """Every expectation is met, NaN in _wd_raw included; the report names run and version."""
    lake.target()
    report = lake.check()
    report.raise_if_critical()
    assert (report.failures, report.warnings) == ((), ())
    assert {o.planned.type for o in report.tables[0].outcomes} == {
        "expect_target_columns_to_match",
        "expect_target_key_to_be_unique",
        "expect_column_values_to_not_be_null",
        "expect_target_rows_to_satisfy",
        "expect_target_to_know_all_values",
    }
    assert report.location == str(lake.docs / "index.html")
    page = unescape(report.tables[0].page.read_text())
    for text in (RUN_ID, "flights", "public.t", "Delta version", "publication's row filter holds"):
        assert text in page


VIOLATIONS = [
    ([*GOOD, (3, "JFK", "1", None)], "key (id) is unique (2 rows)"),
    ([*GOOD, (4, "JFK", None, None)], "NOT NULL column amount has no nulls (1 row)"),
    ([*GOOD, (4, "LGA", "1", None)], f"row filter holds: {FILTER} (1 row)"),
    ([*GOOD, (4, None, "1", None)], f"row filter holds: {FILTER} (1 row)"),
]


def test_violations_are_critical(lake):
    """What contradicts catalog or publication fails, by table, expectation and report."""
    tables = [f"public.t{number}" for number in range(len(VIOLATIONS))]
    for table, (rows, _) in zip(tables, VIOLATIONS, strict=True):
        lake.target(rows, table)
    report = lake.check(left=RunOutcome(written=frozenset(tables)))
    with pytest.raises(QualityFailed) as caught:
        report.raise_if_critical()
    for verdict, (_, message) in zip(report.tables, VIOLATIONS, strict=True):
        assert any(
            failure.startswith(f"{verdict.table}: ") and message in failure
            for failure in report.failures
        ), message
        assert str(verdict.page) in str(caught.value)
        assert verdict.page.is_file()
    assert "LGA" not in str(caught.value)  # values stay in the report


def test_a_changed_schema_is_critical(lake):
    """A column of another type, a missing one and an added one are told."""
    lake.target(
        ddl="id int, origin string, _wd_raw map<string,string>, _wd_lsn bigint", row_filter=None
    )
    report = lake.check()
    observed = report.tables[0].outcomes[0].observed
    assert observed == "amount is missing; id is int, not bigint"


def test_own_expectations(lake):
    """A warning fails nothing, a critical one fails the run; reports have examples."""
    lake.target()
    lake.own("""
        expectations:
          - {type: expect_column_max_to_be_between, kwargs: {column: id, max_value: 2},
             severity: warning}
          - {type: ExpectColumnValuesToBeInSet, kwargs: {column: id, value_set: [1, 3]},
             severity: warning, notes: odd}
        """)
    report = lake.check()
    report.raise_if_critical()
    assert len(report.warnings) == 2
    assert "odd on id (1 row)" in report.warnings[1]
    assert report.location == str(report.tables[0].page)
    # The page's verdict is the one of the list of reports.
    assert '<p><span class="mark warning">' in report.tables[0].page.read_text()
    lake.own(
        "expectations: [{type: expect_column_values_to_be_in_set, kwargs: {column: id, value_set:"
        " [1]}}]"
    )
    report = lake.check()
    assert len(report.failures) == 1
    assert '<p><span class="mark failed">' in report.tables[0].page.read_text()
    with pytest.raises(QualityFailed):
        report.raise_if_critical()


def test_an_expectation_that_cannot_be_evaluated_fails(lake):
    """A column that isn't there is a failure of that expectation alone."""
    lake.target()
    lake.own("expectations: [{type: expect_column_values_to_be_unique, kwargs: {column: gone}}]")
    report = lake.check()
    (failure,) = report.failures
    assert failure.startswith("public.t: couldn't be checked: expectations are refused:")
    assert "kwargs.column: the target has no column gone: " in failure
    assert [o.success for o in report.tables[0].outcomes].count(True) == len(
        report.tables[0].outcomes
    ) - 1


REFUSED = [
    ("type: expect_column_values_to_be_uniqe", "did you mean expect_column_values_to_be_unique?"),
    ("type: frobnicate", "no expectation is called 'frobnicate'"),
    ("type: expect_column_to_exist, kwargs: {colum: id}", "kwargs."),
    ("type: expect_column_to_exist, kwargs: {column: id, severity: info}",
     "kwargs.severity isn't allowed: write it next to kwargs"),
    ("type: expect_target_rows_to_satisfy, kwargs: {condition: id > 0}", "kwargs.meaning"),
    ("type: expect_target_rows_to_satisfy, kwargs: {condition: true, meaning: m}",
     "kwargs.condition"),
    ("type: expect_target_key_to_be_unique, kwargs: {columns: id}", "kwargs.columns"),
    ("type: expect_target_key_to_be_unique, kwargs: {columns: [id], mostly: 1}", "kwargs.mostly"),
    ("type: expect_column_values_to_be_null, kwargs: {column: [id]}", "kwargs.column"),
]  # fmt: skip


def test_refused_expectations(lake):
    """A name or argument that doesn't exist fails its table alone, with its place and remedy."""
    lake.target()
    lake.target([*GOOD, (3, "JFK", "1", None)], table="public.u", row_filter=None)
    lake.target(table="public.v")
    lake.ledger.append(TableState(now(), "r", "public.gone", 1, "synced"))
    lake.own("expectations: [" + ", ".join(f"{{{item}}}" for item, _ in REFUSED) + "]")
    lake.own("expectations: [", "public.v.yml")
    report = lake.check()
    pages = {verdict.table: verdict.page for verdict in report.tables}
    assert (pages.pop("public.gone"), [page.is_file() for page in pages.values()]) == (
        None,
        [True] * 3,
    )
    assert '<th scope="row">public.gone</th>' in (lake.docs / "index.html").read_text()
    with pytest.raises(QualityFailed) as caught:
        report.raise_if_critical()
    told = str(caught.value)
    for number, (_, message) in enumerate(REFUSED):
        assert message in told
        assert f"{lake.suites / 'public.t.yml'}:1: expectations[{number}]" in told
    assert "public.u: key (id) is unique (2 rows)" in told.replace(
        "expect_target_key_to_be_unique: ", ""
    )
    assert "public.gone: couldn't be checked: the target of public.gone isn't at" in told
    assert "run the initial sync again" in told
    assert (
        f"public.v: couldn't be checked: {lake.suites / 'public.v.yml'} is not valid YAML" in told
    )
    assert {type(cause) for cause in caught.value.causes} == {ConfigError, StateError}
    assert not caught.value.retryable
    kept = read_expectation_results(lake.root)
    assert [r.table_name for r in kept if r.success is None] == [
        "public.gone",
        "public.t",
        "public.v",
    ]
    assert {
        name: sum(r.success is True for r in kept if r.table_name == name)
        for name in "tuv"
        for name in [f"public.{name}"]
    } == {"public.t": 7, "public.u": 5, "public.v": 7}


def test_the_version_that_is_there_is_checked(lake):
    """Of a run the one it has left, whatever others wrote since; else the present one."""
    lake.target()
    lake.ledger.append(BatchCut(now(), "r", 1, 10, None, [TargetCut("public.t", 1, 0)]))
    lake.target([(4, "LGA", "1", None)])
    (verdict,) = lake.check(left=RunOutcome({"public.t": 0})).tables
    assert (verdict.version, len(verdict.failed("critical"))) == (0, 0)
    lake.ledger.append(TableState(now(), "r", "public.torn", 1, "synced"))
    log = lake.folder / "lake" / "public" / "torn" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020d}.json").write_text("{")
    for left in (RunOutcome(), RunOutcome(is_upkeep=True)):
        found = {
            v.table: (v.version, len(v.failed("critical"))) for v in lake.check(left=left).tables
        }
        assert found == {"public.t": (1, 1), "public.torn": (None, 1)}


def test_results_are_kept_as_rows(lake):
    """Each outcome is a row with run, version and severity. Only their owner may read reports."""
    lake.target([*GOOD, (4, "LGA", "1", None)])
    lake.check()
    rows = read_expectation_results(lake.root)
    assert {(r.run_id, r.table_name, r.version) for r in rows} == {(RUN_ID, "public.t", 0)}
    assert [(r.origin, r.unexpected_count) for r in rows if not r.success] == [("publication", 1)]
    assert open_to_others(lake.docs) == []


HOSTILE = 'public."<script>alert(1)</script>/../../../$x%2F."'


def test_hostile_names(lake):
    """A table's name can't leave the folder, and is text in the page; the index's links lead on."""
    lake.target(table=HOSTILE)
    report = lake.check(lake.pipeline("profiling"), run_id="manual__<img src=x>/../$y")
    page = report.tables[0].page
    assert page.is_file()
    assert page.is_relative_to(lake.docs)
    for html in (page, lake.docs / "index.html"):
        assert "<script>alert(1)" not in html.read_text()
        assert "<img src=x>" not in html.read_text()
    links = set(re.findall(r"checks/[^\"'<>\\ ]+\.html", (lake.docs / "index.html").read_text()))
    assert links
    assert all((lake.docs / unquote(unescape(link))).is_file() for link in links)


@pytest.mark.nightly("reports of many days")
def test_old_reports_are_pruned(lake):
    """Only the last runs' reports are kept, of each pipeline, and the index has no dead links."""
    lake.target()
    others = lake.check(lake.pipeline("flights_too"), run_id="run_0").tables[0].page
    pages = [lake.check(run_id=f"run_{i}").tables[0].page for i in range(3)]
    assert prune_reports(lake.pipeline(), lake.ledger.lake, keep=1) == 2
    assert [page.exists() for page in pages] == [False, False, True]
    assert others.exists()
    index = (lake.docs / "index.html").read_text()
    assert "run_2" in index
    assert "run_1" not in index
    lake.check(lake.pipeline(keep_reports=1), run_id="run_3")
    assert not pages[2].exists()


def test_tables_and_their_absence(lake):
    """Only the given tables are checked, which may lack rows; nothing to check writes nothing."""
    lake.target()
    lake.target(table="public.u")
    Decisions(Lake(lake.root)).add(
        [Decision(now(), "r", "waiting", "public.u", 1, 1, '{"id": "9"}', ["big"])]
    )
    report = lake.check(tables=["public.u"])
    assert ([t.table for t in report.tables], report.failures) == (["public.u"], ())
    kind = "expect_target_to_know_all_values"
    assert report.warnings == (
        f"public.u: {kind}: no row is in quarantine because a value of it wasn't sent",
    )
    assert lake.check(tables=[]).tables == ()


def test_a_named_folder_has_the_pages(lake, monkeypatch):
    """Also of a lake in an object store; the lake's own folder isn't made."""
    monkeypatch.chdir(lake.folder)
    lake.target(rows=[*GOOD, (4, "LGA", "1", None)])
    chosen = lake.folder / "chosen"
    report = lake.check(lake.pipeline(root="s3a://bucket/lake", data_docs=str(chosen)))
    assert Path(report.location).is_relative_to(chosen)
    assert {path.name for path in lake.folder.iterdir()} == {"expectations", "lake", "chosen"}
    assert not lake.docs.exists()

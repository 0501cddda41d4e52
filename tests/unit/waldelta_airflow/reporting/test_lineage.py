"""Lineage: what OpenLineage's provider gets of a run, by its own classes."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from airflow.sdk import Connection

from tests.cases import cases
from tests.support.pipelines import pipeline_file
from waldelta.config import load_pipeline_file
from waldelta.lake import local_path
from waldelta_airflow.operators.job_operator import ReportOperator

DOCUMENT = {
    "start_lsn": "0/10", "end_lsn": "0/20",
    "tables": {
        "public.flights": {"inserted": 4, "updated": 2, "deleted": 1},
        "public.log": {"inserted": 7},
        "public.idle": {"inserted": 0, "rows": None},
    },
}  # fmt: skip


# It stays out of requirements.txt: installed, Airflow asks it about every task.
PROVIDER = (
    "apache-airflow-providers-openlineage==2.20.3",
    "openlineage-python==1.54.0",
    "openlineage-integration-common==1.54.0",
    "openlineage_sql==1.54.0",
    "httpx2==2.16.2",
    "httpcore2==2.16.2",
    "truststore==0.10.5",
)
CACHE = Path(__file__).resolve().parents[4] / ".cache"


@pytest.fixture(scope="module")
def provider() -> Iterator[None]:
    """The provider in a folder of its own, installed once, and to be imported from here alone."""
    import airflow
    import airflow.providers

    folder = CACHE / "openlineage-2.20.3"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                f"{made}/it",
                *PROVIDER,
            ]
            subprocess.run(command, check=True, timeout=300)
            with suppress(OSError):  # another process may have been first
                Path(made, "it").rename(folder)
    before = list(sys.path), list(airflow.providers.__path__)
    sys.path.append(str(folder))
    airflow.providers.__path__ = [*before[1], str(folder / "airflow/providers")]
    yield
    sys.path[:], airflow.providers.__path__ = before


def test_a_run_s_datasets_and_facets(provider):
    """A table that feeds two targets is read once; an unchanged one isn't part of it."""
    from waldelta_airflow.reporting.lineage import lineage

    tables = {"public.log": {"from": "public.flights", "where": "id > 0", "mode": "changelog"}}
    pipeline = pipeline_file(
        "s3a://lake/root",
        "shop",
        ["public.flights"],
        target={"root": "s3a://lake/root", "tables": tables},
    )
    found = lineage(
        pipeline,
        DOCUMENT,
        Connection(conn_id="shop_source", conn_type="postgres", host="db", schema="app"),
    )
    assert [(i.namespace, i.name) for i in found.inputs] == [
        ("postgres://db:5432", "app.public.flights")
    ]
    assert [
        (o.namespace, o.name, o.outputFacets["outputStatistics"].rowCount) for o in found.outputs
    ] == [("s3a://lake", "/root/public/flights", 7), ("s3a://lake", "/root/public/log", 7)]
    facet = found.run_facets["waldelta_replication"]
    assert (facet.startLsn, facet.endLsn, facet.publications) == ("0/10", "0/20", ["shop_pub"])
    assert facet.filters == {"target public.log": "id > 0"}


def published(name="p", where=None, table="public.flights", **more):
    entry = {"name": table} | ({"where": where} if where else {})
    return {"name": name} | (more or {"tables": [entry]})


PUBLISHED = [
    ("its filter", [published(where="a")], "a"),
    ("of its table alone", [published(where="a", table="public.other")], None),
    ("of its pattern", [published(where="a", table="public.f*")], "a"),
    (
        "its own, whatever a pattern has",
        [{"name": "p", "tables": [{"name": "public.*"}, {"name": "public.flights", "where": "a"}]}],
        "a",
    ),
    ("of several, whatever one lets pass", [published(where="a"), published("q", "b")],
     "(a) or (b)"),
    ("the same in both", [published(where="a"), published("q", "a")], "a"),
    ("all rows, which one of them lets pass", [published(where="a"), published("q")], None),
    ("all rows of all tables",
     [published(where="a"), published("q", all_tables=True, accept_future_tables=True)], None),
    ("all rows of its schema",
     [published(where="a"), published("q", schemas=["public"], accept_future_tables=True)], None),
    ("beside another schema",
     [published(where="a"), published("q", schemas=["pub"], accept_future_tables=True)], "a"),
    ("nobody knows of one that is read as it is",
     [published(where="a"), published("q", manage=False)], None),
    ("nor of its own one there", [{**published(where="a"), "manage": False}], None),
]  # fmt: skip


@cases("publications, expected", PUBLISHED)
def test_the_filter_that_is_in_force(provider, publications, expected):
    """As PostgreSQL joins those of the publications that a slot reads together."""
    from waldelta_airflow.reporting.lineage import lineage

    source = {"conn_id": "c", "slot": "shop", "publications": publications}
    found = lineage(
        pipeline_file("file:///lake", "shop", source=source),
        DOCUMENT,
        Connection(conn_id="shop_source", conn_type="postgres", host="db", schema="app"),
    )
    filters = found.run_facets["waldelta_replication"].filters
    assert filters.get("public.flights") == expected


def test_the_provider_gets_it_of_the_report_s_task(provider, write_pipeline, make_context, job):
    """By the extractor of its listener; the source's place is its connection's."""
    from airflow.providers.openlineage.extractors.base import DefaultExtractor
    from airflow.providers.openlineage.extractors.manager import ExtractorManager

    path = write_pipeline("shop")
    task = ReportOperator(
        task_id="report", pipeline_path=path, pipeline=load_pipeline_file(path), verb="consume"
    )
    assert ExtractorManager().get_extractor_class(task) is DefaultExtractor
    job.does(
        result={"status": "succeeded", "stages": {"report": {"status": "succeeded"}}} | DOCUMENT
    )
    context = make_context()
    task.execute(context)
    found = DefaultExtractor(task).extract_on_complete(context["ti"])
    assert [(i.namespace, i.name) for i in found.inputs] == [
        ("postgres://db:5432", "app.public.flights"),
        ("postgres://db:5432", "app.public.log"),
    ]
    root = local_path(task.pipeline.target.root)
    assert [
        (o.namespace, o.name, o.outputFacets["outputStatistics"].rowCount) for o in found.outputs
    ] == [("file", f"{root}/public/flights", 7), ("file", f"{root}/public/log", 7)]
    assert found.run_facets["waldelta_replication"].endLsn == "0/20"

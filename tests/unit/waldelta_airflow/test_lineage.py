"""Lineage: what OpenLineage's provider gets of a run, by its own classes."""

from __future__ import annotations

import pytest

from tests.pipelines import pipeline_file

DOCUMENT = {
    "start_lsn": "0/10", "end_lsn": "0/20",
    "tables": {
        "public.flights": {"inserted": 4, "updated": 2, "deleted": 1},
        "public.log": {"inserted": 7},
        "public.idle": {"inserted": 0, "rows": None},
    },
}  # fmt: skip


def test_a_run_s_datasets_and_facets():
    """A table that feeds two targets is read once; one that nothing happened to is not part of it."""
    pytest.importorskip("airflow.providers.openlineage")
    from waldelta_airflow.lineage import lineage

    tables = {"public.log": {"from": "public.flights", "where": "id > 0", "mode": "changelog"}}
    pipeline = pipeline_file(
        "s3a://lake/root", "shop", ["public.flights"], target={"root": "s3a://lake/root", "tables": tables}
    )
    found = lineage(pipeline, DOCUMENT, ("db", None, "app"))
    assert [(i.namespace, i.name) for i in found.inputs] == [("postgres://db:5432", "app.public.flights")]
    assert [(o.namespace, o.name, o.outputFacets["outputStatistics"].rowCount) for o in found.outputs] == [
        ("s3a://lake", "/root/public/flights", 7),
        ("s3a://lake", "/root/public/log", 7),
    ]
    facet = found.run_facets["waldelta_replication"]
    assert (facet.startLsn, facet.endLsn, facet.publications) == ("0/10", "0/20", ["shop_pub"])
    assert facet.filters == {"target public.log": "id > 0"}


def test_without_the_provider_the_operator_is_imported_all_the_same():
    from waldelta_airflow.operators import ReportOperator

    assert callable(ReportOperator.get_openlineage_facets_on_complete)

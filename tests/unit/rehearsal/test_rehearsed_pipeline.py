"""A rehearsal leaves everything alone that the pipeline file names in production."""

from __future__ import annotations

from pathlib import Path

from waldelta.config import PipelineFile
from waldelta.rehearsal.production import Production
from waldelta.rehearsal.rehearsed_pipeline import RehearsedPipeline
from waldelta.rehearsal.scratch_server import ScratchDatabase


def test_source_lake_and_catalog_are_not_those_of_production(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRFLOW_CONN_WALDELTA_REHEARSAL", "")  # It is unset again after the test.
    file = PipelineFile.model_validate(
        {
            "pipeline": "shop",
            "source": {
                "conn_id": "prod",
                "read_from": "prod_standby",
                "slot": "shop_cdc",
                "publications": [{"name": "shop", "tables": [{"name": "public.t"}]}],
            },
            "target": {
                "root": "s3a://lake",
                "conn_id": "store",
                "catalog": {"type": "hive", "conn_id": "metastore"},
            },
        }
    )
    scratch = ScratchDatabase("host=127.0.0.1 dbname=rehearsal", Path(tmp_path), 18)
    rehearsed = RehearsedPipeline(file, scratch, Production("", "schema.sql", None)).file
    source, target = rehearsed.source, rehearsed.target
    assert (source.conn_id, source.read_from) == ("waldelta_rehearsal", None)
    assert (target.root, target.conn_id, target.catalog) == (tmp_path.as_uri(), None, None)

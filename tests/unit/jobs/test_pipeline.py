"""The Python API: what is refused before the source is asked."""

import pytest

from tests.support.pipelines import pipeline_file
from waldelta import Pipeline
from waldelta.errors import TargetNotWritable


@pytest.mark.parametrize("verb", ["check", "setup"])
def test_a_lake_that_cant_be_asked_for_is_named(monkeypatch, verb):
    """No connection to the source is needed for that: nothing is made there."""
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", "postgresql://nobody:x@127.0.0.1:1/none")
    with pytest.raises(TargetNotWritable, match="hdfs://nowhere"):
        getattr(Pipeline(pipeline_file("hdfs://nowhere/lake", "s")), verb)()

"""Divisions of a target, and what only Spark can divide."""

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake

from waldelta.changes.merge.divide import without_partitions
from waldelta.errors import EmptyPartitionValue
from waldelta.lake import DeltaTarget, Lake
from waldelta.lake.layout import empty_value


def test_a_table_whose_files_only_spark_knows_keeps_its_partitions(tmp_path):
    """Its files may have rows that are marked as deleted, and other names of columns."""
    uri = str(tmp_path / "t")
    write_deltalake(uri, pa.table({"id": [1], "p": ["a"]}), partition_by=["p"])
    DeltaTable(uri).alter.add_feature(
        TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )
    target = DeltaTarget(Lake(tmp_path.as_uri()), (tmp_path / "t").as_uri())

    def write():
        raise empty_value(["p"])

    before = DeltaTable(uri).version()
    with pytest.raises(EmptyPartitionValue):
        without_partitions(None, target.open, "public.t", write)
    assert DeltaTable(uri).version() == before

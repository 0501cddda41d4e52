"""A small target's rows with other columns, without Spark."""

from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from waldelta.changes.merge.reshape import reshape_small
from waldelta.config import TypeOptions
from waldelta.lake import DeltaTarget, Lake, Tag
from waldelta.lake.ledger import ColumnState
from waldelta.pipeline.drift import Evolution, NewColumn
from waldelta.postgres.type_catalog import PgType
from waldelta.types import column_types

ID = ColumnState("id", 20, -1, "bigint", "bigint", not_null=True, attnum=1)
P = ColumnState("p", 25, -1, "text", "string", not_null=False, attnum=3)


def target_with(folder, **options):
    uri, rows = str(folder / "t"), pa.table({"id": [1, 2], "p": ["a", "b"]})
    write_deltalake(uri, rows, **options)
    return DeltaTarget(Lake(folder.as_uri()), (folder / "t").as_uri())


@pytest.fixture
def target(tmp_path):
    return target_with(tmp_path, partition_by=["p"])


def reshaped(target, column, oid=25):
    kinds = {"id": PgType(20, -1, "bigint"), column.state.name: PgType(oid, -1, "type")}
    types = column_types(kinds, ["id"], TypeOptions())
    columns = Evolution((NewColumn(ID, "id"), column), ("id",), ("p",), ())
    return reshape_small(target, columns, types, Tag.of("app", 1, {}), None, ())


def test_a_partition_column_dropped_and_added_again_with_an_empty_default(target):
    assert reshaped(target, NewColumn(P, None, ""))
    table = DeltaTable(target.uri)
    assert table.metadata().partition_columns == []
    assert table.to_pyarrow_table()["p"].to_pylist() == ["", ""]


@pytest.mark.parametrize(
    ("source", "name", "listed"), [("p", "a.b", "id,`a.b`"), ("p", "p", "id,p"), (None, "q", "id")]
)
def test_a_renamed_column_keeps_its_statistics(tmp_path, source, name, listed):
    configuration = {"delta.dataSkippingStatsColumns": "id,`p`"}
    target = target_with(tmp_path, configuration=configuration)
    assert reshaped(target, NewColumn(replace(P, name=name), source))
    assert DeltaTable(target.uri).metadata().configuration == {
        "delta.dataSkippingStatsColumns": listed
    }


def test_values_that_arrow_cant_cast_are_left_to_spark(target):
    before = DeltaTable(target.uri).version()
    assert not reshaped(target, NewColumn(P, "p", same_type=False), oid=20)
    assert DeltaTable(target.uri).version() == before

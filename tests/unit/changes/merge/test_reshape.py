"""A small target's rows with other columns, without Spark."""

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


@pytest.fixture
def target(tmp_path):
    uri = str(tmp_path / "t")
    write_deltalake(uri, pa.table({"id": [1, 2], "p": ["a", "b"]}), partition_by=["p"])
    return DeltaTarget(Lake(tmp_path.as_uri()), (tmp_path / "t").as_uri())


def reshaped(target, column, oid=25):
    kinds = {"id": PgType(20, -1, "bigint"), "p": PgType(oid, -1, "type")}
    types = column_types(kinds, ["id"], TypeOptions())
    columns = Evolution((NewColumn(ID, "id"), column), ("id",), ("p",), ())
    return reshape_small(target, columns, types, Tag.of("app", 1, {}), None, ())


def test_a_partition_column_dropped_and_added_again_with_an_empty_default(target):
    assert reshaped(target, NewColumn(P, None, ""))
    table = DeltaTable(target.uri)
    assert table.metadata().partition_columns == []
    assert table.to_pyarrow_table()["p"].to_pylist() == ["", ""]


def test_values_that_arrow_cant_cast_are_left_to_spark(target):
    before = DeltaTable(target.uri).version()
    assert not reshaped(target, NewColumn(P, "p", same_type=False), oid=20)
    assert DeltaTable(target.uri).version() == before

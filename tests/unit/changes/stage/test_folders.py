"""Staged changes are gone once the statement that reads them is over."""

from contextlib import suppress

import pyarrow as pa
import pytest
from pyspark.errors.exceptions.connect import (
    AnalysisException,
    SparkConnectGrpcException,
    SparkRuntimeException,
)

from waldelta.changes.stage.folders import staged_in
from waldelta.errors import ApplyError
from waldelta.lake import local_path, write_parquet
from waldelta.spark import OnSpark

# Which kind of session by the module of its class.
Classic = type("SparkSession", (), {"__module__": "pyspark.sql.session"})
Connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})


@pytest.mark.parametrize(
    ("session", "err", "stays"),
    [
        (Connect, None, False),
        (Connect, ApplyError("refused"), False),
        (Connect, SparkRuntimeException("[DELTA_VIOLATE_CONSTRAINT_WITH_VALUES] CHECK constraint"),
         False),
        (Connect, AnalysisException("[TABLE_OR_VIEW_NOT_FOUND]"), False),
        (Connect, KeyError("c1"), False),
        (Connect, SparkConnectGrpcException("<_InactiveRpcError of RPC: UNAVAILABLE>"), True),
        (Connect,
         SparkRuntimeException("[INVALID_HANDLE.OPERATION_ABANDONED] the handle is invalid"), True),
        (Connect, SparkRuntimeException("[OPERATION_CANCELED] Operation has been canceled"), True),
        (Connect, KeyboardInterrupt(), True),
        (Classic, None, False),
        (Classic, RuntimeError("Py4JJavaError"), False),
        (Classic, KeyboardInterrupt(), False),
    ],
)  # fmt: skip
def test_what_is_staged_stays_where_a_statement_may_go_on(lake, session, err, stays):
    folder = f"{lake}/_waldelta/staging/x"
    write_parquet(folder, pa.table({"a": [1]}))
    with suppress(BaseException), staged_in(OnSpark(session()), folder):
        if err is not None:
            raise err
    assert local_path(folder).exists() == stays

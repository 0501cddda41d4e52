"""Spark's daemon of Python workers, which imports what our tasks need before it forks workers.

Spark starts it instead of ``pyspark.daemon`` where executors share the driver's machine
(spark.python.daemon.module). A worker that reads the slot ends with its task, and the next one
would import everything again, which takes half a second per run.
"""

from __future__ import annotations

import adbc_driver_postgresql.dbapi  # noqa: F401
import pandas as pd  # noqa: F401 - pyspark's worker takes it for Arrow
import pyspark.sql.pandas.serializers  # noqa: F401
from pyspark.daemon import manager

import waldelta.changes.merge.file_merge
import waldelta.changes.stage.stage
import waldelta.slot.read.peek  # noqa: F401

if __name__ == "__main__":
    manager()

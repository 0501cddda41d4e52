"""Stages net changes of a batch range as Parquet files, in the driver or in Spark's tasks."""

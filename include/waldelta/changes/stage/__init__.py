"""Stages net changes of a batch range as Parquet files, in this process or in Spark's tasks."""

"""The Spark session and how tasks run: the first package that may import PySpark."""

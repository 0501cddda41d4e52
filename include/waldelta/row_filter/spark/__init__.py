"""Translates an analyzed row filter to Spark SQL that means the same."""

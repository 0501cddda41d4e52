"""Catalogs in which readers find the targets by name: Hive metastore, AWS Glue, Unity Catalog."""

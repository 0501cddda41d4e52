"""Builds SQL that compares values by identity: equal only if a reader can't distinguish them."""

from __future__ import annotations

from waldelta.changes.merge.target_table import VARIANT


def comparable(value: str, spark_type: str) -> str:
    """Return ``value`` as an SQL expression that ``<=>`` and GROUP BY compare by identity."""
    if spark_type == VARIANT:
        return f"to_json({value})"  # to_json() sorts the keys.
    if spark_type in ("float", "double", "array<float>", "array<double>"):
        return f"cast({value} as string)"  # The text distinguishes -0 from 0.
    return comparable_map(value) if spark_type.startswith("map<") else value


def comparable_map(value: str) -> str:
    """Return a map, which has no equality, as an array of entries; an empty map as null."""
    return f"case when size({value}) > 0 then array_sort(map_entries({value})) end"

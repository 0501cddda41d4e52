"""Identity of values: SQL in which equal means that a reader of the target can't tell them
apart.
"""

from __future__ import annotations

from waldelta.changes.merge.target_table import VARIANT


def comparable(value: str, spark_type: str) -> str:
    """The SQL expression ``value`` in a form that ``<=>`` and GROUP BY compare by identity."""
    if spark_type == VARIANT:
        return f"to_json({value})"  # its keys are in order
    if spark_type in ("float", "double", "array<float>", "array<double>"):
        return f"cast({value} as string)"  # as it is written: -0 isn't 0
    return comparable_map(value) if spark_type.startswith("map<") else value


def comparable_map(value: str) -> str:
    """A map, which has no equality, as something that has; an empty one as none."""
    return f"case when size({value}) > 0 then array_sort(map_entries({value})) end"

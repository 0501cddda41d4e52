"""Target columns: how a target's columns differ from the recorded ones, as the check reports it."""

from __future__ import annotations

from collections.abc import Mapping

from waldelta.metadata_columns import PREFIX
from waldelta.spark_sql import simple_type


def column_differences(recorded: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Returns each column that is missing, of another type, or not recorded.

    Names are written as Great Expectations lists them.
    """
    expected = {listed(name): simple_type(type_name) for name, type_name in recorded.items()}
    missing = [f"{name} is missing" for name in expected if name not in held]
    changed = [
        f"{n} is {held[n]}, not {t}" for n, t in expected.items() if n in held and held[n] != t
    ]
    added = [f"{n} isn't recorded" for n in held if n not in expected and not n.startswith(PREFIX)]
    return missing + changed + added


def listed(name: str) -> str:
    """Returns a column's name as Great Expectations lists it: in backticks if it has a dot.

    Backticks within the name stay.
    """
    return name if "." not in name or (name.startswith("`") and name.endswith("`")) else f"`{name}`"

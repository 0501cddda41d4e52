"""Gate: what no gate can judge is refused before anything is merged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spark_jobs.gate import TableGate, _texts, judge
from waldelta.errors import ConfigError


def test_a_target_that_keeps_more_than_a_mirror_has_no_gate():
    """Its staged changes are states, of which several may be of one key: nothing is judged in part."""
    plan = SimpleNamespace(decode=SimpleNamespace(unfolding=object()))
    with pytest.raises(ConfigError, match="no gate judges states"):
        judge(None, None, plan, TableGate("public.t"), None)


ARGUMENTS = [
    ("plain", {"column": "v", "min_value": 1, "mostly": 0.5}, ["v"]),
    ("a list", {"column_list": ["a", "b"]}, ["a", "b"]),
    ("a dict of lists", {"column": "v", "quantile_ranges": {"quantiles": [0.5], "value_ranges": [[None, 1]]}}, ["v"]),
    ("lists in a list", {"column_A": "a", "value_pairs_set": [["x", 1], ["y", None]]}, ["a", "x", "y"]),
    ("a parameter", {"column": "v", "min_value": {"$PARAMETER": "least"}}, ["v", "least"]),
]  # fmt: skip


@pytest.mark.parametrize(("kwargs", "expected"), [case[1:] for case in ARGUMENTS], ids=[case[0] for case in ARGUMENTS])
def test_columns_are_looked_for_in_arguments_of_any_depth(kwargs, expected):
    assert list(_texts(kwargs)) == expected

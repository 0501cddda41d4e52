"""Gate: what no gate can judge is refused before anything is merged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spark_jobs.gate import TableGate, judge
from waldelta.errors import ConfigError


def test_a_target_that_keeps_more_than_a_mirror_has_no_gate():
    """Its staged changes are states, of which several may be of one key: nothing is judged in part."""
    plan = SimpleNamespace(decode=SimpleNamespace(unfolding=object()))
    with pytest.raises(ConfigError, match="no gate judges states"):
        judge(None, None, plan, TableGate("public.t"), None)

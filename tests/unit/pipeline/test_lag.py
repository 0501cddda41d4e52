"""How far behind is too far."""

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from tests.support.data.suites import HELD, ID, state
from waldelta.config.quality import Freshness
from waldelta.pipeline.lag import Lag
from waldelta.stages.check.suite.expectation import SourceRules
from waldelta.stages.check.suite.kinds import plan_suite

AT = datetime(2026, 1, 1, tzinfo=UTC)
CASES = [
    ("as it comes", Lag(3600.0, 1 << 40), {},
     [("warning", "at most 3,600 s behind the source", True, "3,600 s behind")]),
    ("an hour is over", Lag(3601.0), {},
     [("warning", "at most 3,600 s behind the source", False, "3,601 s behind")]),
    ("switched off", Lag(1e9, 1 << 40), {"warn_seconds": None}, []),
    ("unknown", Lag(), {"warn_mb": 1, "critical_mb": 1}, []),
    ("the source's clock is behind", Lag.since(AT + timedelta(seconds=5), AT), {},
     [("warning", "at most 3,600 s behind the source", True, "0 s behind")]),
    ("both, of both", Lag(90.0, 7 << 20),
     {"warn_seconds": 60, "critical_seconds": 120, "warn_mb": 5, "critical_mb": 6},
     [("warning", "at most 60 s behind the source", False, "90 s behind"),
      ("critical", "at most 120 s behind the source", True, "90 s behind"),
      ("warning", "at most 5 MB of WAL behind the source", False, "7 MB of WAL behind"),
      ("critical", "at most 6 MB of WAL behind the source", False, "7 MB of WAL behind")]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lag", "wanted", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_limits(lag, wanted, expected):
    """What isn't known isn't judged; each limit is an expectation of the target."""
    limits = list(lag.limits(Freshness(**wanted)))
    assert [(one.severity, one.meaning, one.is_met, one.observed) for one in limits] == expected
    plan = plan_suite(state([ID]), HELD, None, SourceRules(freshness=limits))
    found = [
        (p.severity, p.meaning, p.kwargs["is_met"], p.kwargs["observed"])
        for p in plan.expectations
        if p.origin == "pipeline"
    ]
    assert found == expected


def test_a_warning_comes_first():
    """A warning that nobody would see before it is critical is a mistake, but for the default."""
    Freshness(critical_seconds=600)
    with pytest.raises(ValidationError, match="warn_mb is more than critical_mb"):
        Freshness(warn_mb=9, critical_mb=8)

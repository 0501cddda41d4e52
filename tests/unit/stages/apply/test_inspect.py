"""What an apply finds out before it applies anything."""

from datetime import timedelta
from types import SimpleNamespace

from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, TableState, TargetCut, now
from waldelta.stages.apply import inspect as module
from waldelta.stages.apply.outcome import Applied


def test_commits_of_a_target_that_cant_be_read_fail_it_alone(monkeypatch, lake):
    """Those of others are reported as ever."""
    states = [TableState(now(), "r", f"public.{name}", 1, "synced") for name in "tu"]
    cut = TargetCut("public.u", 1, 7)

    def read(job, identity, state, *_):
        if state is states[0]:
            raise KeyError("c1")
        return None, cut

    monkeypatch.setattr(module, "read_unreported", read)
    pipeline = SimpleNamespace(
        maintenance=SimpleNamespace(ledger_retention=timedelta(30)),
        target=SimpleNamespace(policy_of=lambda _: "evolve"),
    )
    applied = Applied(SimpleNamespace(ledger=Ledger(Lake(lake)), pipeline=pipeline))
    targets = [SimpleNamespace(state=state, name=state.table_name) for state in states]
    watermarks = SimpleNamespace(cut=None, identity=None)
    assert module._find_unreported(applied, watermarks, targets) == {"public.u": cut}
    assert list(applied.failures) == ["public.t"]

"""Which commits of a target no run has reported: the next run does."""

from datetime import timedelta

import pytest

from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, Run, now
from waldelta.pipeline import RunResult, TableResult
from waldelta.pipeline.reported_commits import ReportedCommits

BEGAN = now()


def at(minutes):
    return BEGAN + timedelta(minutes=minutes)


@pytest.fixture
def ledger(lake):
    return Ledger(Lake(lake))


def tell(ledger, run_id, minutes, version=None, verb="consume"):
    tables = {} if version is None else {"public.t": TableResult(version=version)}
    ledger.append_run(
        Run(
            at(minutes),
            run_id,
            verb,
            "succeeded",
            result=RunResult(verb, run_id, tables=tables).to_json(),
        )
    )


@pytest.mark.parametrize(
    "told, expected",
    [
        pytest.param([("a", 10, 5)], True, id="by its own run"),
        pytest.param([("a", 10, 6)], True, id="by its own run, with a later one"),
        pytest.param([("a", 10, 4)], False, id="its own run told of an earlier one"),
        pytest.param([("a", 10, None), ("b", 20, 5)], True,
                     id="by the run that came after a failed landing"),
        pytest.param([("z", -600, None), ("b", 20, 5)], True,
                     id="by the run that came after a killed one"),
        pytest.param([("z", -600, None), ("b", 20, 4)], False, id="nobody has yet"),
        pytest.param([("a", 10, None)], False,
                     id="its own run failed before it told, the first of the lake"),
        pytest.param([("b", 600, None)], True, id="all runs that are left are later ones"),
        pytest.param([("z", -600, 5000), ("b", 20, None)], False,
                     id="an earlier run told of a table that was there before"),
        pytest.param([("z", -20, 5)], True, id="by a clock that is behind"),
        pytest.param([("z", -40, 5)], False,
                     id="a run told of a table that was there before it was copied, an hour ago"),
        pytest.param([], False, id="no run has told anything"),
    ],
)  # fmt: skip
def test_what_is_told(ledger, told, expected):
    """Of version 5 of a target, which run "a" committed."""
    for run_id, minutes, version in told:
        tell(ledger, run_id, minutes, version)
    assert (
        ReportedCommits(ledger, at(1)).has("a", "public.t", 5, at(0), lambda: at(-30)) == expected
    )


def test_a_run_of_late_without_a_result_was_not_forgotten(ledger):
    """It is the lake's first: all rows that are left are later ones."""
    tell(ledger, "b", 600)
    assert not ReportedCommits(ledger, at(-1)).has("a", "public.t", 5, at(0), lambda: at(-30))


def test_other_verbs_tell_nothing(ledger):
    """A sync's version is that of its copy."""
    tell(ledger, "z", -600)
    tell(ledger, "s", 10, 7, "sync")
    assert not ReportedCommits(ledger, at(1)).has("a", "public.t", 5, at(0), lambda: at(-30))


def test_results_are_read_once_and_none_from_before(ledger, monkeypatch):
    """Many targets with many untold commits each ask for the same few rows."""
    tell(ledger, "z", -6000, 1)
    for number in range(5):
        tell(ledger, f"r{number}", 10 + number)
    parsed, real = [], RunResult.from_json.__func__
    monkeypatch.setattr(
        RunResult,
        "from_json",
        classmethod(lambda cls, text: parsed.append(text) or real(cls, text)),
    )
    told = ReportedCommits(ledger, at(1))
    for version in range(20):
        assert not told.has("a", "public.t", 5 + version, at(0), lambda: at(-30))
        assert not told.has("a", "public.u", 5 + version, at(1), lambda: at(-30))
    assert len(parsed) == 5

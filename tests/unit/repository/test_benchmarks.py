"""What `make bench` computes: ratios, targets, the check against the reference."""

import statistics
from dataclasses import replace

import pytest

from benchmarks import check
from benchmarks.results import REFERENCE, Measurement, Result, Round, Score, read, write
from benchmarks.scores import COMPARISONS, scores
from benchmarks.targets import TARGETS, target_of
from benchmarks.workloads import NATIVE, PEEK, RECVLOGICAL, WORKLOADS


def measured(
    workload,
    contender,
    seconds,
    *,
    backlog="",
    baseline=False,
    changes=1000,
    source_cpu=1.0,
    notes=None,
):
    rounds = [
        Round(
            s,
            {"source": source_cpu, "jvm": s},
            {"jvm": 900.0, "reader": 90.0, "workers": 300.0, "client": 200.0},
            notes or {},
        )
        for s in seconds
    ]
    return Measurement(workload, backlog, contender, changes, rounds, baseline)


BACKLOG = [
    measured("backlog-1m-random", PEEK, [1, 1, 2], baseline=True),
    measured("backlog-1m-random", RECVLOGICAL, [2, 2, 4], baseline=True),
    measured("backlog-1m-random", NATIVE, [4], baseline=True),
    measured("backlog-1m-random", "warm", [6, 10, 12], source_cpu=1.5),
    measured("small", "tasks", [9, 9, 9], notes={"apply": 3.0, "applied": 7.0}),
    measured("growth", "warm", [10, 11], backlog="500,000", changes=500),
    measured("growth", "warm", [100, 121], backlog="5,000,000", changes=5000),
    measured("idle", "idle", [1.2]),
]
RESULT = Result(1, 3, {"cores": 2}, BACKLOG, scores(BACKLOG))


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("backlog-1m-random/warm ÷ pg_recvlogical", [3, 5, 3]),  # round by round
        # Fewer rounds there: by their median.
        ("backlog-1m-random/warm ÷ native subscriber", [1.5, 2.5, 3]),
        ("backlog-1m-random/warm, CPU of the source ÷ COPY of a peek", [1.5, 1.5, 1.5]),
        # A baseline by the raw one alone.
        ("backlog-1m-random/COPY of a peek ÷ pg_recvlogical", [0.5, 0.5, 0.5]),
        ("growth: 5,000,000 ÷ 500,000, per change", [1.0, 1.1]),
        ("small/tasks: apply", [3, 3, 3]),
        ("idle/idle: seconds", [1.2]),
        ("reader's memory", [90]),
    ],
)
def test_scores(name, rounds):
    assert {score.name: score.rounds for score in RESULT.scores}[name] == pytest.approx(rounds)


ESTIMATE = "estimate/fresh: rows, estimated ÷ copied"
CPU, IDLE = "a/warm, CPU of the source ÷ b", "idle/idle: seconds"
DRAINED, GROWTH = (
    "backlog-1m-random/warm ÷ pg_recvlogical",
    "growth: 5,000,000 ÷ 500,000, per change",
)


def score(*rounds, name="a ÷ b", unit="×", against=()):
    return Score(name, unit, list(rounds), list(against))


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (score(4, 4, 4), score(4.1), check.SAME),  # rounds that agree too well: 5% at the least
        (score(4, 4, 4), score(4.3), check.WORSE),
        (score(4, 4, 4), score(3.7), check.BETTER),
        (score(3.9, 4, 4.3), score(4.35), check.SAME),  # from least to most of them it's 10%
        (score(4, 4, 4), score(4, 4.6, 6), check.SAME),  # the last one's are apart
        (score(4, 4, 4), score(4, 5.1, 9), check.WORSE),  # no more than 25% is excused
        (score(2.49, 2.09, 1.49), score(9), check.UNGUARDED),  # 29% off the median
        (score(4), score(4.9), check.SAME),  # one round alone doesn't tell its noise
        (score(4, 4, against=[0.4, 0.4]), score(9), check.UNGUARDED),
        (score(4, 4, name=CPU, against=[0.3, 0.3]), score(9, name=CPU), check.WORSE),
        (score(4, 4, name=CPU, against=[0.1, 0.1]), score(9, name=CPU), check.UNGUARDED),
        # A must needs no quiet rounds.
        (score(2, 3.8, 3.9, name=DRAINED), score(4.1, name=DRAINED), check.MISSED),
        (None, score(4.1, name=DRAINED), check.MISSED),
        (None, score(3.9, name=DRAINED), check.NEW),
        (score(4.2, name=DRAINED), score(4.3, name=DRAINED), check.KNOWN),  # missed before
        (score(1, name=GROWTH), score(0.5, name=GROWTH), check.BETTER),  # less is no miss
        (score(1, name=ESTIMATE), score(0.6, name=ESTIMATE), check.MISSED),  # too little is wrong
        (score(2, name=IDLE, unit="s"), score(3.5, name=IDLE, unit="s"), check.MISSED),
        (score(4), None, check.MISSING),
    ],
)
def test_check(before, now, verdict):
    found = check.compare([before] if before else [], [now] if now else [])
    assert [finding.verdict for finding in found] == [verdict]


@pytest.mark.parametrize("pick", [max, min, statistics.median], ids=["most", "least", "median"])
def test_a_reference_is_never_worse_than_itself(pick):
    """Each of its scores fed with one of its own rounds; what misses a must is known to."""
    stored = read(REFERENCE).scores
    found = check.compare(stored, [replace(one, rounds=[pick(one.rounds)]) for one in stored])
    assert {one.name for one in found if one.verdict == check.WORSE} == set()


def test_the_stored_scores_are_those_of_the_stored_measurements():
    reference = read(REFERENCE)
    assert reference.scores == scores(reference.measurements)


def test_check_command(tmp_path, monkeypatch, capsys):
    """2 without anything to compare; 0 after the result is the reference; 1 once a ratio is worse,
    or a workload failed, or one with limits wasn't measured, unless that is meant.
    """
    monkeypatch.setattr(check, "LAST", tmp_path / "last.json")
    monkeypatch.setattr(check, "REFERENCE", tmp_path / "reference.json")
    assert check.main([]) == 2
    write(RESULT, tmp_path / "last.json")
    assert check.main([]) == 2
    assert check.main(["--accept"]) == 0
    capsys.readouterr()
    assert check.main([]) == 1
    assert "NOT MEASURED, THOUGH THEY HAVE LIMITS: backlog-1m-" in capsys.readouterr().err
    assert check.main(["--accept"]) == 0
    assert check.main(["--partial"]) == 0
    assert check.comparable(RESULT, RESULT) is None
    for other, reason in (
        ({"scale": 0.1}, "at scale 1,"),
        ({"machine": {"cores": 8}}, "on 2 cores"),
    ):
        assert reason in check.comparable(RESULT, replace(RESULT, **other))
    worse = [measured("backlog-1m-random", "warm", [60, 60, 60]), *BACKLOG[:3]]
    write(replace(RESULT, measurements=worse, scores=scores(worse)), tmp_path / "last.json")
    assert check.main(["--partial"]) == 1
    assert "worse" in capsys.readouterr().out
    write(replace(RESULT, failed={"sync": "RuntimeError: no space"}), tmp_path / "last.json")
    assert check.main(["--partial"]) == 1
    assert "sync failed: RuntimeError: no space" in capsys.readouterr().err


# What the reference has no measurements of.
UNMEASURED = {"S3 ÷ folder", "estimate*/fresh: *, estimated ÷ copied"}


def test_comparisons_and_targets_are_of_measured_things():
    """Comparisons name what there is; what runs leave is enough to compute each target's score."""
    reference = read(REFERENCE)
    measured_names = {one.name for one in reference.measurements}
    workloads = {one.workload for one in reference.measurements}
    compared = {name for one in COMPARISONS for name in (one.of, one.to)}
    assert {name.partition("/")[0] for name in compared} <= {one.name for one in WORKLOADS}
    assert {one for one in compared if one.partition("/")[0] in workloads} <= measured_names
    judging = [target_of(score.name) for score in reference.scores]
    assert {target.scores for target in TARGETS if target not in judging} <= UNMEASURED

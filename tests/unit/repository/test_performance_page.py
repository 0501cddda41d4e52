"""docs/explanation/performance.md has the reference's figures, or says when they were taken."""

import re
from pathlib import Path

from benchmarks.results import REFERENCE, Score, read
from benchmarks.targets import target_of

PAGE = Path(__file__).parents[3] / "docs/explanation/performance.md"
REFERENCED = re.compile(r"<!-- (.+?) -->")
EARLIER = re.compile(r"\((?:[^()]*; )?taken earlier, \d{4}-\d\d-\d\d\)")
# What is meant is no figure; 1x is what others are multiples of.
LIMIT = re.compile(r"at (?:most|best) [\d.]+x?|\b1x\b")
RATIO = re.compile(r"(?:(\d+(?:\.\d+)?)–)?(\d+(?:\.\d+)?)(?:x| times| decodes)")


def unfounded(row: str, ratios: dict[str, list[float]]) -> list[str]:
    """Ratios of a table's row that its scores don't have; ``<!-- prefix, prefix -->`` in the row
    names the scores.

    A cell that says when its figures were taken may have any.
    """
    prefixes = tuple(
        f"{name}{end}"
        for found in REFERENCED.findall(row)
        for name in found.split(", ")
        for end in "/: "
    )
    held = [
        value for name, values in ratios.items() if name.startswith(prefixes) for value in values
    ]
    shown = [
        number
        for cell in REFERENCED.sub("", row).split("|")
        if not EARLIER.search(cell)
        for numbers in RATIO.findall(LIMIT.sub("", cell))
        for number in numbers
        if number
    ]
    return [
        number
        for number in shown
        if not any(_rounded_as(number, value) == number for value in held)
    ]


def _rounded_as(number: str, value: float) -> str:
    return f"{value:.{len(number.partition('.')[2])}f}"


def test_ratios_in_the_tables_are_in_the_reference():
    """Each is a round or a median of its workload, rounded; or its cell says from when."""
    scores = [score for score in read(REFERENCE).scores if score.unit == "×"]
    ratios = {score.name: [*score.rounds, score.median] for score in scores}
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {row: found for row in rows if (found := unfounded(row, ratios))} == {}


def test_what_the_page_refers_to_is_in_the_reference():
    """A workload that isn't stored any more would leave its row without figures to compare."""
    names = [score.name for score in read(REFERENCE).scores]
    referred = {
        name for found in REFERENCED.findall(PAGE.read_text()) for name in found.split(", ")
    }
    assert {
        one
        for one in referred
        if not any(f"{name}/".startswith((f"{one}/", f"{one}:", f"{one} ")) for name in names)
    } == set()
    assert len(referred) > 3


def _tells(row: str, score: Score) -> bool:
    """Whether a row says that a score is missed, by the word, a name and the figure."""
    names = [name for found in REFERENCED.findall(row) for name in found.split(", ")]
    is_named = score.name in names or score.name.startswith(
        tuple(f"{name}{end}" for name in names for end in "/: ")
    )
    return "missed" in row and is_named and f" {score.median:.2f}" in row


def test_limits_that_the_reference_misses_are_told():
    """Each in a row of its own, and none is told that the reference keeps."""
    judged = [
        (score, target) for score in read(REFERENCE).scores if (target := target_of(score.name))
    ]
    missed = [score for score, target in judged if target.verdict(score.median) == "missed"]
    rows = [
        line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "missed" in line
    ]
    assert {score.name for score in missed if not any(_tells(row, score) for row in rows)} == set()
    assert {row for row in rows if not any(_tells(row, score) for score in missed)} == set()


def test_the_most_memory_is_that_of_the_reference():
    most = {score.name: score.median for score in read(REFERENCE).scores if score.unit == "MB"}
    page = PAGE.read_text()
    for name, told in (
        ("reader's memory", "of a process that reads the source"),
        ("a worker's memory", "of one that decodes"),
        ("job's memory", "of the job's own"),
        ("JVM's memory", "of the JVM"),
    ):
        assert f"{most[name]:,.0f} MB {told}" in page

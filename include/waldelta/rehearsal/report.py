"""What a rehearsal found, statement by statement, and the forms of its report."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final

from waldelta.quantities import counted, first_of
from waldelta.rehearsal.impact_kinds import KINDS

_PARTS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "application": ("error", "app-error", "lock"),
        "pipeline": ("stop", "copy", "wait", "data-loss", "note"),
        "readers of the lake": ("readers",),
    }
)

# A name or a text of SQL may have characters that XML can't hold.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Impact:
    """One effect: its kind, its table, what happens, and the safe way where there is one."""

    kind: str
    table: str
    text: str
    way: str = ""

    @property
    def description(self) -> str:
        """The text, after its table where it has one."""
        return f"{self.table}: {self.text}" if self.table else self.text


@dataclass(frozen=True, slots=True)
class StepReport:
    """A statement, or a transaction of several, with what it did; ``seconds`` on scratch rows."""

    place: str
    sql: Sequence[str]
    impacts: Sequence[Impact]
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """The gravest kind that was found; ``follows`` where the pipeline needs nobody."""
        kinds = {impact.kind for impact in self.impacts}
        return next((kind for kind in KINDS if kind in kinds), "follows")


@dataclass(frozen=True, slots=True)
class Report:
    """A rehearsal: where, with what, and what each step did."""

    pipeline: str
    server: str
    steps: Sequence[StepReport]
    notes: Sequence[str] = field(default=())

    def failures(self, fail_on: Sequence[str]) -> list[tuple[StepReport, Impact]]:
        """Returns what was found of these kinds."""
        return [
            (step, impact)
            for step in self.steps
            for impact in step.impacts
            if impact.kind in fail_on
        ]

    def summary(self, fail_on: Sequence[str]) -> str:
        """Returns one sentence: how many steps have a finding of these kinds."""
        steps = counted(len(self.steps), "step")
        failing = self.failures(fail_on)
        if not failing:
            return f"{steps} rehearsed: none of {', '.join(fail_on)}"
        by_kind: dict[str, int] = {}
        for _, impact in failing:
            by_kind[impact.kind] = by_kind.get(impact.kind, 0) + 1
        numbers = ", ".join(f"{number} × {kind}" for kind, number in by_kind.items())
        return f"{steps} rehearsed: {numbers}"

    def as_json(self) -> dict[str, Any]:
        """Returns the report as a document."""
        steps = [{**asdict(step), "verdict": step.verdict} for step in self.steps]
        return {
            "pipeline": self.pipeline,
            "server": self.server,
            "steps": steps,
            "notes": list(self.notes),
        }

    def as_text(self, fail_on: Sequence[str]) -> str:
        """Returns the report for a terminal."""
        lines = [f"pipeline {self.pipeline}, rehearsed on {self.server}"]
        lines += [f"note: {note}" for note in self.notes]
        for step in self.steps:
            lines += ["", f"{step.place}: {step.verdict}", *(f"    {text}" for text in _code(step))]
            if not step.impacts:
                lines.append("  the pipeline follows by itself")
            for part, impacts in _by_part(step):
                lines.append(f"  {part}")
                for impact in impacts:
                    lines.append(f"    {impact.kind}: {impact.description}")
                    if impact.way:
                        lines.append(f"      safe way: {impact.way}")
        return "\n".join([*lines, "", self.summary(fail_on)])

    def as_markdown(self, fail_on: Sequence[str]) -> str:
        """Returns the report as a comment on a pull request."""
        lines = [
            f"### Rehearsal of pipeline `{self.pipeline}`",
            "",
            f"On {self.server}. **{self.summary(fail_on)}**",
            *(f"\n> {note}" for note in self.notes),
            "",
            "| statement | verdict | what happens |",
            "| --- | --- | --- |",
        ]
        for step in self.steps:
            cell = "<br>".join(
                f"**{impact.kind}**: {_cell(impact.description)}"
                + (f"<br>*safe way:* {_cell(impact.way)}" if impact.way else "")
                for _, impacts in _by_part(step)
                for impact in impacts
            )
            code = first_of([" ".join(text.split())[:120] for text in step.sql], between="; ")
            code = code.replace("|", "\\|").replace("`", "'")
            lines.append(f"| `{step.place}`<br>`{code}` | {step.verdict} | {cell or 'nothing'} |")
        return "\n".join([*lines, ""])

    def as_junit(self, fail_on: Sequence[str]) -> str:
        """Returns the report as JUnit's XML: a test case for each step."""
        failing = {id(step) for step, _ in self.failures(fail_on)}
        suite = ET.Element(
            "testsuite",
            name=f"waldelta rehearse {self.pipeline}",
            tests=str(len(self.steps)),
            failures=str(len(failing)),
        )
        for step in self.steps:
            case = ET.SubElement(
                suite,
                "testcase",
                name=step.place,
                classname=self.pipeline,
                time=f"{step.seconds:.2f}",
            )
            if id(step) in failing:
                impacts = [impact for impact in step.impacts if impact.kind in fail_on]
                failure = ET.SubElement(
                    case, "failure", message=impacts[0].text, type=impacts[0].kind
                )
                failure.text = "\n".join(f"{one.kind}: {one.description}" for one in impacts)
        return _NOT_XML.sub("\ufffd", ET.tostring(suite, "unicode", xml_declaration=True))


def _by_part(step: StepReport) -> Iterator[tuple[str, list[Impact]]]:
    for part, kinds in _PARTS.items():
        if impacts := [impact for kind in kinds for impact in step.impacts if impact.kind == kind]:
            yield part, impacts


def _code(step: StepReport) -> Iterator[str]:
    for text in step.sql:
        yield from text.splitlines()


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("`", "'")

"""What a verb prints on stdout: text for people by rich, or one JSON document with ``--json``; and
the results of check, setup and decide in both forms.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from waldelta.control_characters import visible, visible_json
from waldelta.error_catalog import REMEDIES
from waldelta.quantities import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from waldelta.config import PipelineFile
    from waldelta.stages.setup.setup import SetupPlan

# What an installation calls the command line, and what messages and pages call it.
COMMAND: Final = "waldelta"
# Where there is no terminal, such as in a task's log: eighty columns would cut table names.
_WIDTH = 120
_NARROWEST = 80


# How each kind of finding is shown; plain text has the words alone.
STYLES = {"problem": "bold red", "warning": "yellow"}
_WAITING = ("id", "table", "key", "status", "since", "reason", "actions", "by", "why")


class Output:
    """Prints text at once, and the JSON document at the end, with the error if there is one."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._document: Any = None
        self._error: Mapping[str, Any] | None = None

    def show(self, document: Any, text: RenderableType) -> None:
        """Print the text, or keep the document for close(); a string is printed as it is."""
        if self.as_json:
            self._document = document
        else:
            sys.stdout.write(f"{visible(text)}\n" if isinstance(text, str) else rendered(text))

    def fail(self, error: Mapping[str, Any]) -> None:
        """Keep an error, as describe_error() has it, for close()."""
        self._error = {**error, "remedy": REMEDIES.get(str(error["class"]), "")}

    def close(self) -> None:
        """Print the JSON document; an error becomes its key ``error``, or the whole document."""
        if not self.as_json:
            return
        document = self._document
        if self._error is not None:
            parts = document if isinstance(document, Mapping) else {}
            document = {**parts, "error": self._error}
        if document is not None:
            printed = json.dumps(document, indent=2, ensure_ascii=False)
            sys.stdout.write(f"{visible_json(printed)}\n")


def terminal(width: int | None = None) -> Console:
    """Returns a console on stdout; plain text where that is no terminal, or with NO_COLOR."""
    from rich.console import Console
    from rich.segment import Segment

    class VisibleConsole(Console):
        """Prints no control character of a text; rich's own styles are no part of the texts."""

        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            return super()._render_buffer(
                part if part.control else Segment(visible(part.text), part.style) for part in buffer
            )

    # Narrower columns would split every name.
    width = width or (max(Console().width, _NARROWEST) if sys.stdout.isatty() else _WIDTH)
    return VisibleConsole(
        width=width,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        emoji=False,
    )


def rendered(text: RenderableType, width: int | None = None) -> str:
    """Returns what a console prints, without spaces at the ends of lines.

    The lines of a Text stay unwrapped, so that SQL can be copied.
    """
    from rich.text import Text

    console = terminal(width)
    with console.capture() as captured:
        console.print(text, soft_wrap=isinstance(text, Text), crop=False)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()) + "\n"


def styled(text: str, style: str) -> str:
    """Returns a text in a style, on a terminal; works without rich, too."""
    try:
        console = terminal()
    except ImportError:
        return text
    with console.capture() as captured:
        console.print(text, style=style, end="", markup=False)
    return captured.get()


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    title: str = "",
    numbers: Collection[str] = (),
) -> Table:
    """Returns a table of texts in the style of all verbs, with ``numbers`` at the right of their
    columns; None is an empty cell.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in headings:
        result.add_column(
            heading,
            justify="right" if heading in numbers else "left",
            overflow="fold",
            no_wrap=heading == "id",  # It is copied into the next command.
        )
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else cell for cell in row)
        result.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
    return result


def plan_document(pipeline: PipelineFile, plan: SetupPlan) -> dict[str, Any]:
    """Returns setup's plan as JSON has it: findings, what setup makes, its SQL, and the estimate
    of the copy if there is one.
    """
    return {
        "pipeline": pipeline.pipeline,
        "findings": [
            {"severity": finding.severity, "text": finding.text} for finding in plan.reported()
        ],
        "targets": plan.targets.describe(),
        "estimate": None if plan.estimate is None else plan.estimate.as_json(),
        "slot": {"name": plan.source.slot, "create": plan.create_slot},
        "statements": [
            {"sql": statement.text(), "reason": statement.reason} for statement in plan.statements
        ],
        "sql": plan.as_sql(),
        "digest": plan.digest,
    }


def plan_text(plan: SetupPlan) -> RenderableType:
    """Returns findings and plan with the findings' severities marked."""
    from rich.text import Text

    text = Text(plan.describe())
    for severity, style in STYLES.items():
        text.highlight_regex(re.compile(rf"^  - {severity}:", re.MULTILINE), style)
    text.highlight_regex(re.compile(r"^(preflight|targets|plan):", re.MULTILINE), "bold")
    return text


def waiting_table(items: Sequence[Mapping[str, Any]], file: str = "FILE") -> RenderableType:
    """Returns the rows and messages that wait for a decision, with the columns that any of them
    has; and below the tables that a gate stops. Commands name the pipeline file as ``file``.
    """
    from rich.console import Group
    from rich.text import Text

    if not items:
        return "nothing waits for a decision"
    rows = [one for one in items if "waiting" not in one]
    columns = [name for name in _WAITING if any(one.get(name) is not None for one in rows)]
    parts: list[RenderableType] = []
    if rows:
        parts.append(
            table(
                columns, [[_cell(_cell_value(one, name), name) for name in columns] for one in rows]
            )
        )
    file = shlex.quote(file)
    if any("id" in one for one in rows):
        parts.append(
            unwrapped(f"  to decide: {COMMAND} decide {file} ACTION --ids ID --reason TEXT")
        )
    gates: dict[str, list[Mapping[str, Any]]] = {}
    for one in items:
        if "waiting" in one:
            gates.setdefault(one["table"], []).append(one)
    if gates:
        parts.append(Text("Stopped by a gate", style="bold"))
    for name, unmet in gates.items():
        parts += _stopped_table(name, unmet, file)
    return Group(*parts)


def _cell_value(one: Mapping[str, Any], name: str) -> object:
    is_taken = name == "status" and one.get("applied") is False
    return f"{one['status']}, not applied yet" if is_taken else one.get(name)


def waiting_details(items: Sequence[Mapping[str, Any]], file: str = "FILE") -> RenderableType:
    """Returns the same with all that is known of each: values, messages, rows that fail."""
    from rich.console import Group

    parts = [waiting_table(items, file)]
    for one in items:
        parts.append(unwrapped(""))
        for name, value in one.items():
            each = value if isinstance(value, list) else [value]
            parts += [unwrapped(f"{name}: {_cell(item)}") for item in each if item is not None]
    return Group(*parts)


def _stopped_table(
    name: str, unmet: Sequence[Mapping[str, Any]], file: str
) -> list[RenderableType]:
    """Returns lines about a table that a gate stops: why, since when, and the commands."""
    from rich.text import Text

    gate, since = unmet[0], min(one["since"] for one in unmet)
    count, reasons = gate["waiting"], "; ".join(one["reason"] for one in unmet)
    waits = "changes wait" if count is None else counted(count, "change waits", "changes wait")
    lines: list[RenderableType] = [Text(f"  {name}: since {moment(since)}, {waits}: {reasons}")]
    consume, release = f"{COMMAND} consume {file}", f"{COMMAND} decide {file} release"
    if gate["status"] == "released":
        return [*lines, unwrapped(f"    released; to merge them: {consume}")]
    lines.append(unwrapped(f"    after you have corrected the data or the expectation: {consume}"))
    if gate["may_pass"]:
        lines += [
            Text("    if the data is right:"),
            unwrapped(f"    {release} --tables {shlex.quote(name)} --reason TEXT"),
        ]
    return lines


def moment(text: str) -> str:
    """Returns an ISO time as the pages show it; UTC unless it has an offset."""
    at = datetime.fromisoformat(text)
    at = at.astimezone(UTC) if at.tzinfo else at
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def unwrapped(text: str) -> RenderableType:
    """Returns a line that isn't broken, so that it can be copied from any terminal."""
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ignore")


def _cell(value: object, name: str = "") -> object:
    if name == "since" and value is not None:
        return moment(str(value))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        values = {**(value.get("key") or {}), **value["values"]} if "values" in value else value
        return json.dumps(values, ensure_ascii=False)
    return value

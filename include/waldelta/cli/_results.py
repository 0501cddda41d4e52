"""The results of check, setup and quarantine: as JSON, and as text for people."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from waldelta.cli._output import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from waldelta.config import PipelineFile
    from waldelta.stages.setup import SetupPlan

# How each kind of finding is shown; plain text has the words alone.
STYLES = {"problem": "bold red", "warning": "yellow"}
_QUARANTINE = ("id", "table", "key", "status", "reason", "by", "upto", "examples")


def plan_document(pipeline: PipelineFile, plan: SetupPlan) -> dict[str, Any]:
    """Returns setup's plan as JSON has it: findings, what setup makes, its SQL, and the estimate
    of the copy if there is one.
    """
    return {
        "pipeline": pipeline.pipeline,
        "findings": [{"severity": found.severity, "text": found.text} for found in plan.reported()],
        "targets": list(plan.sources),
        "estimate": None if plan.estimate is None else plan.estimate.as_json(),
        "slot": {"name": plan.slot, "create": plan.create_slot},
        "statements": [
            {"sql": statement.text(), "reason": statement.reason} for statement in plan.statements
        ],
        "sql": plan.as_sql(),
    }


def plan_text(plan: SetupPlan) -> RenderableType:
    """Returns findings and plan with the findings' severities marked."""
    from rich.text import Text

    text = Text(plan.describe())
    for severity, style in STYLES.items():
        text.highlight_regex(re.compile(rf"^  - {severity}:", re.MULTILINE), style)
    text.highlight_regex(re.compile(r"^(preflight|targets|plan):", re.MULTILINE), "bold")
    return text


def quarantine_table(found: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Returns quarantined rows, or decisions on them, with the columns that any of them has."""
    if not found:
        return "nothing is in quarantine"
    columns = [
        name for name in _QUARANTINE if any(one.get(name) not in (None, []) for one in found)
    ]
    return table(columns, [[_cell(one.get(name)) for name in columns] for one in found])


def _cell(value: object) -> object:
    if isinstance(value, list):
        return "\n".join(
            json.dumps({**(one.get("key") or {}), **one["values"]}, ensure_ascii=False)
            for one in value
        )
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value

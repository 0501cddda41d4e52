"""Decisions on what was kept out of targets, made on the quarantine's page.

Each is a run of the _quarantine DAG, if the reader may trigger one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from fastapi import HTTPException, Request

from waldelta.decision_options import DECISIONS

# What a form must name for a decision that isn't about whole tables.
_OF_ROWS = {
    "accept": "the rows to accept",
    "discard": "the rows to discard",
    "skip": "the messages to skip",
}
_GATE = "a decision against a gate is recorded with its reason"
# Why a decision needs a reason, for the error message.
_WHY = {
    "accept": _GATE,
    "release": _GATE,
    "discard": "the quarantine keeps the reason",
    "skip": "tables miss the changes of skipped messages",
}
_MOST_BYTES = 1 << 20
_ROW = re.compile(r"[0-9a-f]{16}")
_LONGEST_REASON = 200
_TOO_LONG = (
    "The form is longer than 1 MB: trigger the DAG with params instead, or choose fewer rows."
)


async def read_form(request: Request) -> dict[str, list[str]]:
    """Returns the fields of a form; raises 413 for a body over the limit.

    The length in the request's header is checked first; a chunked request has none, so no more than
    the limit is kept in memory.
    """
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > _MOST_BYTES:
        raise HTTPException(413, _TOO_LONG)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BYTES:
            raise HTTPException(413, _TOO_LONG)
    return parse_qs(body.decode("utf-8", "replace"))


def decision(form: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns a form's decision as the DAG's params; raises 400 for an invalid one."""
    action, rows, tables = (
        (form.get("action") or [""])[0],
        list(form.get("row", ())),
        list(form.get("table", ())),
    )
    reason = (form.get("reason") or [""])[0].strip()[:_LONGEST_REASON]
    if action not in DECISIONS or not all(map(_ROW.fullmatch, rows)):
        raise HTTPException(400, "The form has an unknown action or row: reload the page.")
    if action in _OF_ROWS and not rows:
        raise HTTPException(400, f"Choose {_OF_ROWS[action]}.")
    if action == "release" and not tables:
        raise HTTPException(400, "Choose the table whose changes to release.")
    if action in _WHY and not reason:
        raise HTTPException(400, f"Say why: {_WHY[action]}.")
    return {
        "action": action,
        "tables": tables if action not in _OF_ROWS and tables else None,
        "rows": rows if action in _OF_ROWS else None,
        "reason": reason if action != "retry" and reason else None,
    }

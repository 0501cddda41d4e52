"""The page of what waits for a decision, that of one row, and what was decided.

Each decision is a run of the _decide DAG, if the reader may trigger one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.compute as pc
from fastapi import APIRouter, Depends, HTTPException, Request

from waldelta.config import dag_id_of
from waldelta.config.parse_text import parse_json
from waldelta.decision_kinds import ACTIONS, WAITING_KINDS, DecisionRequest, WaitingKind
from waldelta.errors import ConfigError
from waldelta.lake.ledger import WAITING, Decision, Decisions, Ledger, SentMessage
from waldelta.monitoring.decisions import (
    Waiting,
    read_by_id,
    read_decided,
    read_open,
    read_since,
    read_waiting,
)
from waldelta.pipeline.targets import target_generations
from waldelta_airflow.views._access import PipelineDep
from waldelta_airflow.views._pages import Turning
from waldelta_airflow.views._render import server_folders

routes = APIRouter()
_ROWS_PER_PAGE = 50
_MOST_CHOICES = 20
_DECISIONS_PER_PAGE = 50
# The most characters of a value in the list and on its row's page, and the most bytes of a message
# there. The command line shows everything.
_IN_LIST, _ON_PAGE, _BYTES_SHOWN = 200, 20_000, 4_096
_BYTES_PER_LINE = 16
_MOST_BYTES = 1 << 20
_ID = re.compile(r"[0-9a-f]{16}")
_LONGEST_REASON = 200
_TOO_LONG = (
    "The form is longer than 1 MB: trigger the DAG with params instead, or choose fewer rows."
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The rows that the reader wants to see, by table and reason, and which page of them; and which
    of the ``earlier`` decisions.
    """

    page: int = 1
    earlier: int = 1
    table: str | None = None
    reason: str | None = None

    def but(self, **values: str | None) -> dict[str, str]:
        """Returns table and reason, or other ones (None: any), as parameters of an address."""
        choice = {"table": self.table, "reason": self.reason} | values
        return {kind: text for kind, text in choice.items() if text is not None}


@routes.get("/p/{name}/waiting")
def waiting_page(
    request: PipelineDep,
    chosen: Annotated[Chosen, Depends()],
    run: str | None = None,
    refused: str | None = None,
) -> str:
    """Returns the page of what waits, with possible decisions, and of what was decided.

    It has the rows' keys and values only for readers who may see them.
    """
    ledger, pipeline = request.ledger, request.pipeline
    dag = request.action_dag("decide", run, refused)
    keys = _open_keys(ledger)
    choices = [
        (kind, _counted(_of(keys, chosen.but(**{kind: None})), column))
        for kind, column in _COLUMNS.items()
    ]
    turn = Turning.of(chosen.page, _of(keys, chosen.but()), _ROWS_PER_PAGE)
    shown = read_open(ledger, turn.rows)
    decided, waiting = read_decided(ledger), read_waiting(pipeline, ledger)
    return request.render(
        "waiting.html",
        rows=shown,
        values={row.id: list(_values(row, _IN_LIST)) for row in shown},
        messages=[
            (message, *_dump(message.original)) for message in waiting.of("message", "skipped")
        ],
        turn=turn,
        chosen=chosen,
        count=keys.num_rows,
        choices=choices,
        decided=Turning.of(chosen.earlier, decided, _DECISIONS_PER_PAGE),
        dag=dag,
        is_under_way=dag.is_under_way,
        stopped=waiting.of("gate", "released"),
        kinds=WAITING_KINDS,
        sections=list(_sections(waiting)),
        is_doing={name: f"is {action.is_doing}" for name, action in ACTIONS.items()},
        may_repair=request.reader.may_trigger(dag_id_of(pipeline.pipeline, "reconcile")),
        waits=waiting.count + keys.num_rows,
    )


def _sections(waiting: Waiting) -> Iterator[tuple[str, WaitingKind, Sequence[Decision]]]:
    listed = {name: kind for name, kind in WAITING_KINDS.items() if kind.heads}
    for name, kind in listed.items():
        rows = [row for row in waiting.of(*listed, "answered") if row.kind in kind.stored]
        if rows:
            yield name, kind, rows


def _open_keys(ledger: Ledger) -> pa.Table:
    """Returns the keys of the quarantined rows, with their reasons.

    Folders of this server are left out of the reasons, because an address contains them too.
    """
    keys = Decisions(ledger.lake).scan_open(target_generations(ledger), ("reason",))
    reason = pc.fill_null(keys["reason"], "")
    for folder in server_folders():
        reason = pc.replace_substring(reason, folder, "")
    return keys.set_column(keys.column_names.index("reason"), "reason", reason)


_COLUMNS = {"table": "table_name", "reason": "reason"}


def _of(keys: pa.Table, values: dict[str, str]) -> pa.Table:
    for kind, value in values.items():
        keys = keys.filter(pc.field(_COLUMNS[kind]) == value)
    return keys


def _counted(keys: pa.Table, column: str) -> list[tuple[str, int]]:
    found = [(item["values"], item["counts"]) for item in keys[column].value_counts().to_pylist()]
    return sorted(found, key=lambda choice: (-choice[1], choice[0]))[:_MOST_CHOICES]


@routes.get("/p/{name}/waiting/row/{row_id}")
def row_page(request: PipelineDep, row_id: str) -> str:
    """Returns one quarantined row's page with its values, messages and decisions."""
    request.check_values()
    ledger = request.ledger
    row = read_by_id(ledger, row_id)
    if row is None:
        raise HTTPException(404, "There is no such row in quarantine (any more).")
    return request.render(
        "waiting_row.html",
        here="waiting",
        row=row,
        since=read_since(ledger, row),
        WAITING=WAITING,
        is_past=target_generations(ledger).get(row.table_name) != row.generation,
        values=list(_values(row, _ON_PAGE)),
        messages=[(message, *_dump(message)) for message in row.messages or ()],
    )


def _values(row: Decision, most: int) -> Iterator[tuple[str, str | None, int]]:
    """Yields each column, its text as PostgreSQL sent it, and how many characters are left out."""
    try:
        values = parse_json(row.values or "{}")
    except ValueError:
        values = {}
    for column, value in values.items() if isinstance(values, dict) else ():
        text = value if value is None or isinstance(value, str) else json.dumps(value)
        yield str(column), text and text[:most], max(0, len(text or "") - most)


def _dump(message: SentMessage) -> tuple[str, int]:
    """Returns a message's bytes as a hexadecimal and ASCII dump, and their total number."""
    raw = message.raw or b""
    lines = []
    for first in range(0, min(len(raw), _BYTES_SHOWN), _BYTES_PER_LINE):
        part = raw[first : first + _BYTES_PER_LINE]
        plain = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        lines.append(f"{first:06x}  {part.hex(' '):<{3 * _BYTES_PER_LINE}} {plain}")
    return "\n".join(lines), len(raw)


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


def reason_of(form: Mapping[str, Sequence[str]]) -> str:
    return (form.get("reason") or [""])[0].strip()[:_LONGEST_REASON]


def decision(form: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns a form's decision as the DAG's params; raises 400 for an invalid one."""
    action, reason = (form.get("action") or [""])[0], reason_of(form)
    ids, tables = list(form.get("id", ())), list(form.get("table", ()))
    if action not in ACTIONS or not all(map(_ID.fullmatch, ids)):
        raise HTTPException(400, "The form has an unknown action or id: reload the page.")
    try:
        DecisionRequest(action, ids, tables, reason).check()
    except ConfigError as err:
        raise HTTPException(400, f"{err}.".capitalize()) from None
    return {
        "action": action,
        "tables": tables or None,
        "ids": ids or None,
        "reason": reason or None,
    }

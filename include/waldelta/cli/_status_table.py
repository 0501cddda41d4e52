"""The output of ``status`` for people: slot, last run and targets as a table.

``list``: the pipelines of a folder, each with its last run as its lake's ledger has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from waldelta.cli._output import Output, moment, table, waiting_table
from waldelta.config import PipelineFile
from waldelta.config.pipeline_folder import PipelineFolder, existing_folder
from waldelta.errors import SlotError
from waldelta.lake import named_write_errors
from waldelta.monitoring.attention import SLOT_WORDS
from waldelta.pipeline import describe_error, ledger_of
from waldelta.pipeline.targets import RequiredAction
from waldelta.quantities import counted, size
from waldelta.slot.slot import lost_slot, missing_slot

_NEXT = {
    RequiredAction.FIRST: "initial sync",
    RequiredAction.COPY: "copied by the next run",
    RequiredAction.WAIT: "wait for the running copy",
    RequiredAction.REMOVED: "none: not published",
    RequiredAction.BROKEN: "sync it",
}


def slot_error(status: Mapping[str, Any]) -> SlotError | None:
    """The error of a slot that is missing or lost; None for any other slot."""
    slot = status["slot"]
    if slot["wal_status"] == "missing":
        return missing_slot(slot["name"])
    if slot["wal_status"] == "lost":
        return lost_slot(slot["name"], slot["confirmed_flush_lsn"], slot["invalidation_reason"])
    return None


def status_table(status: Mapping[str, Any], file: str = "FILE") -> Group:
    """The status of a pipeline, as ``read_status`` returns it, laid out for a terminal.

    Commands name the pipeline file as ``file``.
    """
    targets = status["targets"]
    rows = (
        (
            name,
            _state(of),
            _next(of),
            of["mode"],
            of["rows_copied"],
            of["quarantined"],
            of["reason"],
        )
        for name, of in sorted(targets.items())
    )
    title, numbers = counted(len(targets), "target"), ("rows copied", "in quarantine")
    headings = ("table", "status", "next", "mode", *numbers, "reason")
    parts: list[RenderableType] = [_facts(status), Text(), table(headings, rows, title, numbers)]
    if waiting := status["waiting"]:
        parts += [Text("\nWaiting for a decision", style="bold"), waiting_table(waiting, file)]
    for heading, lines in _findings(status):
        parts += [Text(f"\n{heading}", style="bold"), *(Text(f"  {line}") for line in lines)]
    return Group(*parts)


def _facts(status: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("Pipeline", status["pipeline"])
    table.add_row("Slot", _slot(status["slot"]))
    run, cut = status["last_run"], status["last_cut"]
    table.add_row(
        "Last run",
        f"{run['run_id']} ({run['verb']}): {run['status']}, {moment(run['at'])}"
        if run
        else "none yet",
    )
    if cut is not None:
        cut = cut.get("problem") or f"batch {cut['batch']}, {moment(cut['at'])}"
    table.add_row("Last cut", cut or "none yet")
    return table


def _slot(slot: Mapping[str, Any]) -> str:
    state = slot["wal_status"]
    if state in SLOT_WORDS:
        state = f"{SLOT_WORDS[state]} ({state})"
    if "lag_bytes" not in slot:
        return f"{slot['name']}: {state}"
    parts = [
        f"{slot['name']}: {state}",
        f"unread WAL {size(slot['lag_bytes'])}",
        f"keeps {size(slot['retained_bytes'] or 0)} of WAL",
    ]
    if slot["safe_wal_size"] is not None:
        parts.append(f"{size(slot['safe_wal_size'])} left before PostgreSQL may drop it")
    return ", ".join(parts)


def _state(target: Mapping[str, Any]) -> str:
    state = str(target["status"] or "not copied")
    if (gate := target["stopped"]) is not None:
        state = "stopped by a gate" if gate == "stopped" else gate
    elif (error := target["error"]) is not None:
        state = f"behind: {error['class']}"
    return f"{state}, no initial copy" if target["copy_skipped"] else state


def _next(target: Mapping[str, Any]) -> str:
    if (gate := target["stopped"]) is not None:
        return "decide: see below" if gate == "stopped" else "consume"
    return _NEXT.get(target["action"], str(target["action"]))


def _findings(status: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """What needs attention or limits the targets, by heading; nothing of a healthy mirror."""
    targets = sorted(status["targets"].items())
    lines_by_heading = {
        "Behind": [
            f"{name}: since run {error['run_id']}, {moment(error['at'])}: {error['class']}:"
            f" {error['message'].removeprefix(f'{name}: ')}"
            for name, one in targets
            if (error := one["error"]) is not None
        ],
        "Data gaps": [
            f"{gap['from_lsn']}..{gap['to_lsn'] or '?'}: {gap['cause']}: {gap['remedy']}"
            for gap in status["gaps"]
        ],
        "Slot": list(status["slot"]["warnings"]),
        "Publications": list(status["absent_publications"]),
        "In the pipeline file, but not published": list(status["unpublished"]),
        "New tables that match a pattern, but not published": list(status["new_tables"]),
        "Unreadable partitions": list(map(str, status["unreadable_partitions"])),
        "Not all rows and columns of the source": [
            f"{name}: {'; '.join(one['limits'])}" for name, one in targets if one["limits"]
        ],
        "Publication drift": [
            f"{name}: {drift}" for name, one in targets for drift in one["drift"]
        ],
    }
    return ((heading, lines) for heading, lines in lines_by_heading.items() if lines)


LAKE_TIMEOUT_S = 10.0
_AT_ONCE = 8
_HEADINGS = ("pipeline", "slot", "connection", "publishes", "root", "schedule", "last run")


def list_pipelines(folder: Path | None, output: Output) -> bool:
    """Show every pipeline file of a folder; returns whether one is refused.

    A lake that doesn't answer is part of its own line only.
    """
    from rich.console import Group
    from rich.text import Text

    folder = existing_folder(folder)
    pipeline_folder = PipelineFolder.read(folder)
    runs = _last_runs(pipeline_folder.pipelines)
    entries = [
        _entry(path, pipeline) | runs[path] for path, pipeline in pipeline_folder.pipelines.items()
    ]
    refused = pipeline_folder.refusals()
    document = {"folder": str(folder), "pipelines": entries, "refused": refused}
    rows = [
        (
            entry["pipeline"],
            entry["slot"],
            entry["conn_id"],
            "\n".join(map(_published_text, entry["publications"])),
            entry["root"],
            entry["schedule"] or "by hand",
            _run(entry),
        )
        for entry in entries
    ]
    title = f"{counted(len(rows), 'pipeline')} in {folder}"
    errors = [Text(_error_text(entry), style="red") for entry in refused]
    output.show(document, Group(table(_HEADINGS, rows, title) if rows else Text(title), *errors))
    return bool(refused)


def _entry(path: Path, pipeline: PipelineFile) -> dict[str, Any]:
    source = pipeline.source
    return {
        "pipeline": pipeline.pipeline,
        "file": str(path),
        "slot": source.slot,
        "conn_id": source.conn_id,
        "publications": [
            {
                "name": one.name,
                "tables": len(one.tables),
                "all_tables": one.all_tables,
                "schemas": list(one.schemas),
            }
            for one in source.publications
        ],
        "root": pipeline.target.root,
        "schedule": pipeline.schedule,
    }


def _last_runs(pipelines: Mapping[Path, PipelineFile]) -> dict[Path, dict[str, Any]]:
    pool = ThreadPoolExecutor(_AT_ONCE)
    futures = {path: pool.submit(_last_run, pipeline) for path, pipeline in pipelines.items()}
    runs: dict[Path, dict[str, Any]] = {}
    for path, answer in futures.items():
        try:
            runs[path] = {"last_run": answer.result(LAKE_TIMEOUT_S), "lake_error": None}
        except TimedOut:
            why = f"its lake did not answer within {LAKE_TIMEOUT_S:g} s"
            runs[path] = {"last_run": None, "lake_error": why}
        except Exception as err:  # An error of one lake doesn't hide the others.
            described = describe_error(err)
            why = f"{described['class']}: {described['message']}"
            runs[path] = {"last_run": None, "lake_error": why}
    pool.shutdown(wait=False, cancel_futures=True)
    return runs


def _last_run(pipeline: PipelineFile) -> dict[str, Any] | None:
    with named_write_errors(pipeline.target.root):
        run = ledger_of(pipeline).last_run()
    if run is None:
        return None
    return {
        "run_id": run.run_id,
        "verb": run.verb,
        "status": run.status,
        "at": run.at.isoformat(timespec="seconds"),
    }


def _error_text(one: Mapping[str, Any]) -> str:
    """Returns the error with its file, which the message of a named error contains."""
    error = str(one["error"])
    return error if one["file"] in error else f"{one['file']} is refused: {error}"


def _published_text(publication: Mapping[str, Any]) -> str:
    if publication["all_tables"]:
        what = "all tables"
    elif schemas := publication["schemas"]:
        what = f"schema {', '.join(schemas)}"
    elif count := publication["tables"]:
        what = counted(count, "table")
    else:
        what = "as it is"
    return f"{publication['name']}: {what}"


def _run(entry: Mapping[str, Any]) -> str:
    run = entry["last_run"]
    if run is None:
        return entry["lake_error"] or "none yet"
    return f"{run['verb']} {run['status']}, {run['at']}"

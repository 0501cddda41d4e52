"""``list``: the pipelines of a folder, each with its last run as its lake's ledger has it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from pathlib import Path
from typing import Any

from waldelta.cli._output import Output, table
from waldelta.config import PipelineFile
from waldelta.config.pipeline_folder import PipelineFolder, existing_folder
from waldelta.lake import named_write_errors
from waldelta.pipeline import describe_error, ledger_of
from waldelta.quantities import counted

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
            "\n".join(map(_published, entry["publications"])),
            entry["root"],
            entry["schedule"] or "by hand",
            _run(entry),
        )
        for entry in entries
    ]
    title = f"{counted(len(rows), 'pipeline')} in {folder}"
    errors = [Text(_refused(entry), style="red") for entry in refused]
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
    asked = {path: pool.submit(_last_run, pipeline) for path, pipeline in pipelines.items()}
    found: dict[Path, dict[str, Any]] = {}
    for path, answer in asked.items():
        try:
            found[path] = {"last_run": answer.result(LAKE_TIMEOUT_S), "lake_error": None}
        except TimedOut:
            why = f"its lake did not answer within {LAKE_TIMEOUT_S:g} s"
            found[path] = {"last_run": None, "lake_error": why}
        except Exception as err:  # An error of one lake doesn't hide the others.
            described = describe_error(err)
            why = f"{described['class']}: {described['message']}"
            found[path] = {"last_run": None, "lake_error": why}
    pool.shutdown(wait=False, cancel_futures=True)
    return found


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


def _refused(one: Mapping[str, Any]) -> str:
    """Returns the error with its file, which the message of a named error contains."""
    error = str(one["error"])
    return error if one["file"] in error else f"{one['file']} is refused: {error}"


def _published(publication: Mapping[str, Any]) -> str:
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

"""The list of a pipeline's reports: a small file per checked table, which both indexes read.

Great Expectations' own index needs scripts from the network, and reads every stored result again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from waldelta.config.parse_text import parse_json
from waldelta.pipeline.report_folder import ENTRIES_FOLDER

_RunVerdict = Literal["failed", "warning", "passed"]


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """One table's check in one run.

    ``page`` is relative to the reports' folder, and empty for a table that couldn't be checked.
    ``version`` is None for a missing target. ``told`` is the result's text where the result isn't a
    count of met expectations.
    """

    at: datetime
    pipeline: str
    run_id: str
    table: str
    version: int | None
    expectations: int
    failures: tuple[str, ...]  # Critical expectations that failed, in words without values.
    warnings: tuple[str, ...]
    page: str
    told: str | None = None

    @property
    def verdict(self) -> _RunVerdict:
        """Returns the worst result."""
        return "failed" if self.failures else "warning" if self.warnings else "passed"


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """The tables of one check, failed ones first."""

    at: datetime
    pipeline: str
    run_id: str
    entries: tuple[ReportEntry, ...]

    @property
    def verdict(self) -> _RunVerdict:
        """Returns the worst verdict of its tables."""
        return self.entries[0].verdict


def add_entry(folder: Path, entry: ReportEntry) -> None:
    """Add a report to the list; concurrent readers never see a partial file."""
    write_whole(
        _entry_path(folder, entry.page or _pageless(entry)),
        json.dumps(dump_entry(entry)),
    )


def dump_entry(entry: ReportEntry) -> dict[str, Any]:
    """Returns an entry for JSON."""
    return asdict(entry) | {"at": entry.at.isoformat()}


def parse_entry(row: Any) -> ReportEntry | None:
    """Returns the entry of a JSON object that dump_entry() made; None for anything else."""
    try:
        entry = ReportEntry(
            **{
                **row,
                "at": datetime.fromisoformat(row["at"]),
                "failures": tuple(map(str, row["failures"])),
                "warnings": tuple(map(str, row["warnings"])),
            }
        )
    except (ValueError, KeyError, TypeError):
        return None
    texts = (entry.pipeline, entry.run_id, entry.table, entry.page)
    numbers = (entry.expectations, entry.version or 0)
    is_one = all(isinstance(text, str) for text in texts) and isinstance(entry.told, str | None)
    is_one &= all(type(number) is int for number in numbers) and entry.at.tzinfo is not None
    return entry if is_one else None


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, in a folder that only its owner can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def remove_entry(folder: Path, page: str) -> None:
    """Remove a report from the list, if it is listed."""
    _entry_path(folder, page).unlink(missing_ok=True)


def drop_old_pageless(folder: Path, pipeline: str, keep: int) -> int:
    """Remove list entries without a page, except those of a pipeline's last ``keep`` runs.

    Returns the number of removed entries.
    """
    entries = [
        entry for entry in read_entries(folder) if entry.pipeline == pipeline and entry.told is None
    ]
    kept = {_run_of(entry) for entry in entries}
    old = kept - set(sorted(kept, reverse=True)[:keep])
    dropped = [entry for entry in entries if not entry.page and _run_of(entry) in old]
    for entry in dropped:
        remove_entry(folder, _pageless(entry))
    return len(dropped)


def entry_of(folder: Path, page: str) -> ReportEntry | None:
    """Returns the list entry of one page, or None."""
    return _read_entry(_entry_path(folder, page))


def read_entries(folder: Path) -> list[ReportEntry]:
    """Returns all listed reports whose page exists, or that have none, in no order."""
    found = (_read_entry(path) for path in (folder / ENTRIES_FOLDER).glob("*.json"))
    return [
        entry
        for entry in found
        if entry is not None and (not entry.page or (folder / entry.page).is_file())
    ]


def checked_runs(entries: Iterable[ReportEntry]) -> list[CheckedRun]:
    """Returns the reports by run, newest first; within a run failed ones come first, then by
    name.
    """
    worst: Sequence[_RunVerdict] = ("failed", "warning", "passed")
    ordered = sorted(entries, key=lambda e: (worst.index(e.verdict), e.table))
    ordered.sort(key=_run_of, reverse=True)
    grouped = ((key, tuple(of_run)) for key, of_run in groupby(ordered, key=_run_of))
    return [CheckedRun(at, pipeline, run_id, of_run) for (at, pipeline, run_id), of_run in grouped]


def _run_of(entry: ReportEntry) -> tuple[datetime, str, str]:
    return entry.at, entry.pipeline, entry.run_id


def _pageless(entry: ReportEntry) -> str:
    """Returns the identifier of a check without a page; no page has such a name."""
    return "\n".join((entry.at.isoformat(), entry.pipeline, entry.run_id, entry.table))


def _entry_path(folder: Path, page: str) -> Path:
    return folder / ENTRIES_FOLDER / f"{hashlib.sha256(page.encode()).hexdigest()[:32]}.json"


def _read_entry(path: Path) -> ReportEntry | None:
    """Returns the entry in a file.

    Returns None where there is no valid entry, or its page would be outside the reports' folder.
    """
    folder = path.parent.parent.resolve()
    try:
        entry = parse_entry(parse_json(path.read_text(encoding="utf-8")))
        # Pruning deletes the pages that entries name: neither ".." nor a linked folder may lead
        # outside.
        stays = (
            entry is not None
            and ".." not in Path(entry.page).parts
            and (folder / entry.page).resolve().is_relative_to(folder)
        )
    except (OSError, ValueError):
        return None  # The file was just pruned, or is no list entry.
    return entry if stays else None

"""The reports of a lake in an object store: a folder for each run, with its pages and their list.

    <root>/_waldelta/data_docs/checks/2026-01-01T120000.000000Z-<digest>/public.orders.html
    <root>/_waldelta/data_docs/checks/2026-01-01T120000.000000Z-<digest>/entries.json

The list is written after the pages, as one object, so that a run costs few requests and no reader
finds a page that isn't there yet. The store has no index of all runs: Airflow's pages make it from
the lists. Read access to the bucket gives access to the values in the pages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock

from pyarrow.fs import FileSelector, FileSystem, FileType

from waldelta.config.parse_text import parse_json
from waldelta.lake import Lake, named_write_errors
from waldelta.pipeline.report_folder import docs_uri
from waldelta.stages.check.reports.index import ReportEntry, dump_entry, parse_entry

CHECKS, RECONCILIATIONS = "checks", "reconciliations"
_LIST = "entries.json"
_RUN = re.compile(r"\d{4}-\d\d-\d\dT\d{6}\.\d{6}Z-[0-9a-f]{16}")
_PAGE = re.compile(rf"((?:{CHECKS}|{RECONCILIATIONS})/{_RUN.pattern})/[^/]+\.html")
# Lists are read this many at once, because object stores are slow.
_AT_ONCE = 8
_MOST_REMEMBERED = 2000


class _RememberedLists:
    """The lists that this process has read, by their URI; a list never changes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lists: OrderedDict[str, tuple[ReportEntry, ...]] = OrderedDict()

    def find(self, uri: str) -> tuple[ReportEntry, ...] | None:
        with self._lock:
            return self._lists.get(uri)

    def remember(self, uri: str, entries: tuple[ReportEntry, ...]) -> None:
        with self._lock:
            self._lists[uri] = entries
            if len(self._lists) > _MOST_REMEMBERED:
                self._lists.popitem(last=False)


_remembered = _RememberedLists()


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where one run writes its pages: ``uri`` is the folder's address, ``path`` its place among
    the reports.
    """

    uri: str
    path: str
    files: FileSystem

    def write_page(self, name: str, text: str) -> str:
        """Write a page and return its URI; raises TargetNotWritable."""
        self._write(f"{name}.html", text)
        return f"{self.uri}/{name}.html"

    def page_of(self, uri: str) -> str:
        """Return a page's place among the reports."""
        return self.path + uri.removeprefix(self.uri)

    def write_list(self, entries: Sequence[ReportEntry]) -> None:
        """Write the list of this run's pages, which then appear; raises TargetNotWritable."""
        self._write(_LIST, json.dumps([dump_entry(entry) for entry in entries]))

    def _write(self, name: str, text: str) -> None:
        content = text.encode()
        with named_write_errors(f"{self.uri}/{name}"):
            # With a larger buffer than the content, delta-rs gets bytes instead of Arrow's buffer.
            size = len(content) + 1
            with self.files.open_output_stream(f"{self.path}/{name}", buffer_size=size) as file:
                file.write(content)


class StoreReports:
    """A pipeline's reports in the object store of its lake, opened as the lake is."""

    def __init__(self, lake: Lake) -> None:
        self._uri = docs_uri(lake.root)
        self._files = lake.files(self._uri)

    def begin(self, kind: str, run_id: str, at: datetime) -> RunFolder:
        """Return the folder for a run's pages; nothing is written yet."""
        path = f"{kind}/{at.astimezone(UTC):%Y-%m-%dT%H%M%S.%fZ}-{_digest(run_id)}"
        return RunFolder(f"{self._uri}/{path}", path, self._files)

    def read_entries(self, run_id: str | None = None) -> list[ReportEntry]:
        """Return all listed reports, or those of one run, in no order; raises OSError."""
        of_run = None if run_id is None else f"-{_digest(run_id)}"
        runs = [
            run
            for kind in (CHECKS, RECONCILIATIONS)
            for run in self._runs(kind)
            if of_run is None or run.endswith(of_run)
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = [entry for entries in pool.map(self._list_of, runs) for entry in entries]
        return [entry for entry in found if run_id is None or entry.run_id == run_id]

    def read_page(self, pipeline: str, page: str) -> bytes | None:
        """Return the content of a page, or None for what isn't a listed page of this pipeline.

        Only the name of a page in a run's own folder is looked for, so no path leads outside.
        Raises OSError.
        """
        named = _PAGE.fullmatch(page)
        listed = self._list_of(named[1]) if named is not None else ()
        if not any((entry.pipeline, entry.page) == (pipeline, page) for entry in listed):
            return None
        return self._read(page)

    def prune(self, kind: str, keep: int) -> int:
        """Remove all but the last ``keep`` runs of one kind; returns how many were removed."""
        runs = self._runs(kind)
        return sum(map(self._remove, runs[: max(0, len(runs) - keep)]))

    def _runs(self, kind: str) -> list[str]:
        """Return the folders of runs, oldest first, also those that a killed run hasn't listed."""
        found = self._files.get_file_info(FileSelector(kind, allow_not_found=True))
        return sorted(f"{kind}/{i.base_name}" for i in found if _RUN.fullmatch(i.base_name))

    def _list_of(self, run: str) -> tuple[ReportEntry, ...]:
        uri = f"{self._uri}/{run}"
        if (known := _remembered.find(uri)) is not None:
            return known
        if (content := self._read(f"{run}/{_LIST}")) is None:
            return ()
        entries = tuple(_parse(content, run))
        _remembered.remember(uri, entries)
        return entries

    def _read(self, path: str) -> bytes | None:
        try:
            with self._files.open_input_file(path) as file:
                return bytes(file.read())
        except FileNotFoundError:  # It was just pruned, or its run is still writing.
            return None

    def _remove(self, run: str) -> bool:
        """Remove a run's folder, its list first; returns whether there was anything in it.

        Some object stores list a folder, or the marker of one, for a while after its last object
        was deleted.
        """
        found = self._files.get_file_info(FileSelector(run, allow_not_found=True))
        files = sorted(
            (info.path for info in found if info.type == FileType.File and info.size),
            key=lambda path: not path.endswith(f"/{_LIST}"),
        )
        for path in files:
            with named_write_errors(f"{self._uri}/{path}"), suppress(FileNotFoundError):
                self._files.delete_file(path)  # Another run may have pruned it since.
        return bool(files)


def _parse(content: bytes, run: str) -> list[ReportEntry]:
    """Return the entries of a list, without those that name a page of another folder."""
    try:
        rows = parse_json(content)
    except ValueError:
        return []
    found = [parse_entry(row) for row in (rows if isinstance(rows, list) else [])]
    return [
        entry
        for entry in found
        if entry is not None
        and (not entry.page or ((named := _PAGE.fullmatch(entry.page)) and named[1] == run))
    ]


def _digest(run_id: str) -> str:
    return hashlib.sha256(run_id.encode()).hexdigest()[:16]

"""A pipeline's Data Docs, in a folder of this machine or in the object store of its lake: a folder
for each run, with its pages and their list.

    <docs>/checks/2026-01-01T120000.000000Z-shop-<digest>/public.orders.html
    <docs>/checks/2026-01-01T120000.000000Z-shop-<digest>/entries.json
    <docs>/index.html

The list is written after the pages, as one object, so that a run costs few requests and no reader
finds a page that isn't there yet. Only a local folder has an index of all runs; Airflow's pages
make it from the lists. Read access to the bucket gives access to the values in the pages; the files
of a local folder are their owner's alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from pyarrow.fs import FileSelector, FileType

from waldelta.config import PipelineFile
from waldelta.config.parse_text import parse_json
from waldelta.lake import Lake, named_write_errors
from waldelta.pipeline.report_folder import (
    CHECKS,
    RECONCILIATIONS,
    docs_folder,
    docs_uri,
    own_docs_folder,
)
from waldelta.stages.check.reports.entries import (
    ReportEntry,
    checked_runs,
    dump_entry,
    parse_entry,
)

_LIST, _INDEX = "entries.json", "index.html"
_RUN = re.compile(r"\d{4}-\d\d-\d\dT\d{6}\.\d{6}Z-(\w+)-[0-9a-f]{16}", re.ASCII)
_PAGE = re.compile(rf"((?:{CHECKS}|{RECONCILIATIONS})/{_RUN.pattern})/[^/]+\.html", re.ASCII)
# Lists are read this many at once, because object stores are slow.
_AT_ONCE = 8
_MOST_REMEMBERED = 10_000


# The lists that this process has read, by their URI; a list never changes.
_remembered: dict[str, tuple[ReportEntry, ...]] = {}


class DocsStore:
    """A pipeline's Data Docs; other pipelines may have theirs in the same place."""

    def __init__(self, pipeline: PipelineFile, lake: Lake) -> None:
        self.pipeline = pipeline
        self._folder = docs_folder(pipeline)
        self.uri = docs_uri(lake.root) if self._folder is None else f"file://{self._folder}"
        self._files = lake.files(self.uri)

    def begin(self, kind: str, run_id: str, at: datetime) -> RunFolder:
        """Returns the folder for a run's pages; nothing is written yet.

        Raises ConfigError as own_docs_folder() does.
        """
        own_docs_folder(self.pipeline)
        name = f"{at.astimezone(UTC):%Y-%m-%dT%H%M%S.%fZ}-{self.pipeline.pipeline}"
        return RunFolder(self, f"{kind}/{name}-{_digest(run_id)}")

    def write(self, path: str, text: str) -> Path | str:
        """Write a file, which appears as a whole; returns its path or URI.

        Raises TargetNotWritable.
        """
        with named_write_errors(f"{self.uri}/{path}"):
            if self._folder is not None:
                return _write_local(self._folder, path, text)
            content = text.encode()
            # With a larger buffer than the content, delta-rs gets bytes instead of Arrow's buffer.
            size = len(content) + 1
            with self._files.open_output_stream(path, buffer_size=size) as file:
                file.write(content)
        return f"{self.uri}/{path}"

    @property
    def index(self) -> Path | None:
        """The index of a local folder; None where there is none."""
        index = None if self._folder is None else self._folder / _INDEX
        return index if index is not None and index.exists() else None

    def write_index(self) -> Path | str | None:
        """Write the index of all runs in a local folder; returns its path."""
        if self._folder is None:
            return None
        # A check that writes no page doesn't load the templates.
        from waldelta.stages.check.reports.page import static_index

        runs = checked_runs(self.read_entries())
        return self.write(_INDEX, static_index(self.pipeline.pipeline, runs))

    def read_entries(self, run_id: str | None = None) -> list[ReportEntry]:
        """Returns all listed reports, or those of one run, in no order; raises OSError."""
        of_run = None if run_id is None else f"-{_digest(run_id)}"
        runs = [
            run
            for kind in (CHECKS, RECONCILIATIONS)
            for run in self._runs(kind)
            if of_run is None or run.endswith(of_run)
        ]
        lists = {run: _remembered.get(f"{self.uri}/{run}") for run in runs}
        if unread := [run for run, entries in lists.items() if entries is None]:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                lists |= zip(unread, pool.map(self._list_of, unread), strict=True)
        all_entries = [entry for entries in lists.values() for entry in entries or ()]
        return [entry for entry in all_entries if run_id is None or entry.run_id == run_id]

    def read_page(self, page: str) -> bytes | None:
        """Returns the content of a page, or None for what isn't a listed page of this pipeline.

        Only the name of a page in a run's own folder is looked for, so no path leads outside.
        Raises OSError.
        """
        match = _PAGE.fullmatch(page)
        listed = self._list_of(match[1]) if match is not None else ()
        page_key = (self.pipeline.pipeline, page)
        if not any((entry.pipeline, entry.page) == page_key for entry in listed):
            return None
        return self._read(page)

    def prune(self, kind: str, keep: int) -> int:
        """Remove all but the pipeline's last ``keep`` runs of one kind; returns how many were
        removed.
        """
        of_pipeline = f"Z-{self.pipeline.pipeline}-"
        runs = [run for run in self._runs(kind) if of_pipeline in run]
        return sum(map(self._remove, runs[: max(0, len(runs) - keep)]))

    def _runs(self, kind: str) -> list[str]:
        """Returns the folders of runs, oldest first, also those that a killed run hasn't listed."""
        infos = self._files.get_file_info(FileSelector(kind, allow_not_found=True))
        runs = sorted(f"{kind}/{i.base_name}" for i in infos if _RUN.fullmatch(i.base_name))
        return [*filter(self._is_inside, runs)]

    def _is_inside(self, path: str) -> bool:
        """Returns whether no symbolic link leads from the docs' folder elsewhere.

        Another account may have made one, to have a file outside shown or removed.
        """
        if self._folder is None:
            return True
        parts = accumulate(path.split("/"), "{}/{}".format)
        return not any((self._folder / part).is_symlink() for part in parts)

    def _list_of(self, run: str) -> tuple[ReportEntry, ...]:
        uri = f"{self.uri}/{run}"
        if (remembered_entries := _remembered.get(uri)) is not None:
            return remembered_entries
        if (content := self._read(f"{run}/{_LIST}")) is None:
            return ()
        entries = tuple(_parse(content, run))
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
        _remembered[uri] = entries
        return entries

    def _read(self, path: str) -> bytes | None:
        if not self._is_inside(path):
            return None
        try:
            with self._files.open_input_file(path) as file:
                return bytes(file.read())
        except FileNotFoundError:  # Another run has just pruned the page, or is still writing it.
            return None

    def _remove(self, run: str) -> bool:
        """Remove a run's folder, in a store its list first; returns whether there was anything in
        it.

        Some object stores list a folder, or the marker of one, for a while after its last object
        was deleted.
        """
        if self._folder is not None:
            with suppress(FileNotFoundError):
                shutil.rmtree(self._folder / run)
            return True
        infos = self._files.get_file_info(FileSelector(run, allow_not_found=True))
        files = sorted(
            (info.path for info in infos if info.type == FileType.File and info.size),
            key=lambda path: not path.endswith(f"/{_LIST}"),
        )
        for path in files:
            with named_write_errors(f"{self.uri}/{path}"), suppress(FileNotFoundError):
                self._files.delete_file(path)  # Another run may have pruned the page since.
        return bool(files)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run's pages; ``path`` is relative to the folder of all reports."""

    docs: DocsStore
    path: str

    def write_page(self, name: str, text: str) -> Path | str:
        """Write a page and return its path or URI; raises TargetNotWritable."""
        return self.docs.write(f"{self.path}/{name}.html", text)

    def page_of(self, written: Path | str) -> str:
        """Returns a page's place among the docs."""
        return f"{self.path}/{str(written).rpartition('/')[2]}"

    def write_list(self, entries: Sequence[ReportEntry]) -> Path | str:
        """Write the list of this run's pages, which then appear.

        Returns the index of all, or the run's folder in a store. Raises TargetNotWritable.
        """
        self.docs.write(f"{self.path}/{_LIST}", json.dumps([*map(dump_entry, entries)]))
        return self.docs.write_index() or f"{self.docs.uri}/{self.path}"


def _write_local(folder: Path, path: str, text: str) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    file = folder / path
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    return draft.replace(file)


def _parse(content: bytes, run: str) -> list[ReportEntry]:
    """Returns the entries of a list, without those that name a page of another folder."""
    try:
        rows = parse_json(content)
    except ValueError:
        return []
    parsed_entries = [parse_entry(row) for row in (rows if isinstance(rows, list) else [])]
    return [
        entry
        for entry in parsed_entries
        if entry is not None
        and (not entry.page or ((match := _PAGE.fullmatch(entry.page)) and match[1] == run))
    ]


def _digest(run_id: str) -> str:
    return hashlib.sha256(run_id.encode()).hexdigest()[:16]

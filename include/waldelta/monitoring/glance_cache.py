"""The glance at each pipeline, cached until its ledger changes, for pages of many pipelines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import Lock

from waldelta.config import PipelineFile
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    BatchCut,
    Decision,
    ExpectationResult,
    Gap,
    Ledger,
    LedgerVersions,
    Reconciliation,
    Run,
    SlotMove,
    TableState,
)
from waldelta.monitoring.overview import (
    OVERVIEW,
    OVERVIEW_AT_ONCE,
    AirflowRuns,
    Glance,
    read_glance,
)
from waldelta.monitoring.table_list import read_column_names

# The tables of the ledger that a glance is read from.
_KINDS = (BatchCut, Decision, ExpectationResult, Gap, Reconciliation, Run, SlotMove, TableState)
# A glance is about the last hours, which pass while its ledger stays as it is.
_KEEP_S = 600.0
# The page says for how long a run that may have been killed has recorded nothing.
_KEEP_RUNNING_S = 60.0
# A pipeline that no page has shown for a day is read again, or is gone.
_FORGET_S = 86_400.0
# A ledger isn't looked at again within this time.
_CHECKED_S = 3.0
# A page waits this long for pipelines that this process hasn't read yet, and for others.
FIRST_S, AGAIN_S = 3.0, 0.1


@dataclass(frozen=True, slots=True)
class CachedGlance:
    """A pipeline as it was read last, or the error of reading it; both are None before the first.

    ``columns`` has the names of each table's columns. ``is_current``: the ledger hasn't changed
    since, as far as a page can wait for the answer.
    """

    glance: Glance | None = None
    error: Exception | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_current: bool = False


@dataclass(frozen=True, slots=True)
class _Entry:
    pipeline: PipelineFile
    active: frozenset[str]
    cached: CachedGlance
    versions: LedgerVersions
    read_at: float
    checked_at: float

    def is_of(self, pipeline: PipelineFile, active: frozenset[str]) -> bool:
        return self.active == active and (self.pipeline is pipeline or self.pipeline == pipeline)


class GlanceCache:
    """The glances that this process has read; ``open_lake`` opens a pipeline's lake.

    Threads read what has changed. A page waits for them only for a moment: it shows what was read
    last, and says so.
    """

    def __init__(self, open_lake: Callable[[PipelineFile], Lake]) -> None:
        self._open_lake = open_lake
        self._pool = ThreadPoolExecutor(OVERVIEW_AT_ONCE, "glances")
        self._lock = Lock()
        self._entries: dict[str, _Entry] = {}
        self._reading: dict[str, Future[None]] = {}

    def read(
        self,
        pipelines: Collection[PipelineFile],
        active: Mapping[str, frozenset[str]],
        at: datetime,
    ) -> dict[str, CachedGlance]:
        """Returns the pipelines in the scope OVERVIEW, by name.

        ``active`` are the ids of each one's unfinished runs. Idle checks aren't taken into account:
        see after_idle_check().
        """
        self._forget()
        is_first = any(one.pipeline not in self._entries for one in pipelines)
        reading = {
            one.pipeline: future
            for one in pipelines
            if (future := self._refresh(one, active.get(one.pipeline, frozenset()), at))
        }
        futures = (
            wait(reading.values(), FIRST_S if is_first else AGAIN_S).done if reading else set()
        )
        return {
            one.pipeline: self._cached_glance(one, reading.get(one.pipeline), futures)
            for one in pipelines
        }

    def _forget(self) -> None:
        with self._lock:
            begin = time.monotonic() - _FORGET_S
            for name in [name for name, of in self._entries.items() if of.checked_at < begin]:
                del self._entries[name]
                self._reading.pop(name, None)

    def _cached_glance(
        self,
        pipeline: PipelineFile,
        reading: Future[None] | None,
        futures: Collection[Future[None]],
    ) -> CachedGlance:
        entry = self._entries.get(pipeline.pipeline)
        # Of a file that was changed, another lake may have been read.
        if entry is None or entry.pipeline.target.root != pipeline.target.root:
            return CachedGlance()
        return replace(entry.cached, is_current=reading is None or reading in futures)

    def _refresh(
        self, pipeline: PipelineFile, active: frozenset[str], at: datetime
    ) -> Future[None] | None:
        """Returns what reads a pipeline; None if it was just read."""
        name = pipeline.pipeline
        with self._lock:
            entry = self._entries.get(name)
            is_fresh = entry is not None and time.monotonic() - entry.checked_at < _CHECKED_S
            if is_fresh and entry is not None and entry.is_of(pipeline, active):
                return None
            future = self._reading.get(name)
            if future is None or future.done():
                future = self._pool.submit(self._read, pipeline, active, at)
                self._reading[name] = future
            return future

    def _read(self, pipeline: PipelineFile, active: frozenset[str], at: datetime) -> None:
        name, began = pipeline.pipeline, time.monotonic()
        entry = self._entries.get(name)
        versions: LedgerVersions = ()
        try:
            ledger = Ledger(self._open_lake(pipeline))
            if entry is not None and entry.is_of(pipeline, active) and entry.cached.error is None:
                is_running = entry.cached.glance and entry.cached.glance.latest_status == "running"
                is_old = began - entry.read_at > (_KEEP_RUNNING_S if is_running else _KEEP_S)
                if not is_old and ledger.is_at(entry.versions):
                    self._entries[name] = replace(entry, checked_at=began)
                    return
            # They are read first: what is written in the meantime is read the next time.
            versions = ledger.versions(_KINDS)
            glance = read_glance(pipeline, ledger, at, OVERVIEW, AirflowRuns(active=active))
            cached = CachedGlance(glance, columns=read_column_names(ledger))
        except Exception as err:  # An error of one lake must not hide the others.
            cached = CachedGlance(error=err)
        self._entries[name] = _Entry(pipeline, active, cached, versions, began, began)

"""How much WAL one call reads and how long it may take; both adapt to the server, from run to run.

After a statement timeout, the window is halved, down to a megabyte; then the timeout is doubled, up
to three hours. Where the server lacks room for the answer, only the window is halved. After an
answer within a quarter of the timeout, a raised timeout is halved, or else a window that was read
to its end is doubled, up to the pipeline file's. So the next call is expected to take at most half
of its timeout.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from waldelta.config.pipeline_file import LONGEST_TIMEOUT_S
from waldelta.errors import PeekTimeout
from waldelta.lake.ledger import now
from waldelta.lake.ledger.records import ReadWindowSetting
from waldelta.pipeline import Job
from waldelta.postgres import open_transactions
from waldelta.quantities import size

log = logging.getLogger(__name__)

SMALLEST_WINDOW_BYTES = 1 << 20
# A share of the timeout: a call that was answered sooner would be answered in time with twice the
# window.
_SOON = 0.25


@dataclass(frozen=True, slots=True)
class ReadWindow:
    """The WAL that one call reads at most, and how long it may take."""

    window_bytes: int
    timeout_s: int

    def narrower(self) -> ReadWindow | None:
        """Returns half of the window; None when it is the smallest."""
        if self.window_bytes <= SMALLEST_WINDOW_BYTES:
            return None
        return replace(self, window_bytes=max(self.window_bytes // 2, SMALLEST_WINDOW_BYTES))

    def after_timeout(self) -> ReadWindow | None:
        """Returns the next window after a statement timeout; None when none is left to try."""
        if (narrower := self.narrower()) is not None:
            return narrower
        if self.timeout_s >= LONGEST_TIMEOUT_S:
            return None
        return replace(self, timeout_s=min(2 * self.timeout_s, LONGEST_TIMEOUT_S))

    def after_answer(self, seconds: float, widest: ReadWindow, *, is_whole: bool) -> ReadWindow:
        """Returns the next window after an answer.

        ``is_whole``: the window was read to its end, not only up to the end of the available WAL.
        """
        if seconds > self.timeout_s * _SOON:
            return self
        if self.timeout_s > widest.timeout_s:
            return replace(self, timeout_s=max(self.timeout_s // 2, widest.timeout_s))
        if is_whole:
            return replace(self, window_bytes=min(self.window_bytes * 2, widest.window_bytes))
        return self

    def within(self, widest: ReadWindow) -> ReadWindow:
        """Returns an earlier run's window, limited by the current pipeline file.

        Only the smallest window has a raised timeout.
        """
        if self.window_bytes <= SMALLEST_WINDOW_BYTES:
            return ReadWindow(
                self.window_bytes, max(min(self.timeout_s, LONGEST_TIMEOUT_S), widest.timeout_s)
            )
        return replace(widest, window_bytes=min(self.window_bytes, widest.window_bytes))

    def __str__(self) -> str:
        return f"{size(self.window_bytes)} of WAL, {self.timeout_s} s"


class ReadWindows:
    """The read windows of one drain; ``next`` is the next one. The holder of the slot's lock is its
    only user.

    Changes after timeouts are written to the ledger at once. Otherwise an Airflow task that its own
    time limit kills would never reach a window that the server manages, however often it is
    retried.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        batch = job.pipeline.batch
        self._file = self._widest = ReadWindow(batch.wal_window_mb << 20, batch.statement_timeout_s)
        setting = job.ledger.table(ReadWindowSetting).newest()
        self._kept = (
            None
            if setting is None or setting.window_bytes is None
            else ReadWindow(setting.window_bytes, setting.timeout_s)
        )
        self.next = self._file if self._kept is None else self._kept.within(self._file)

    def timed_out(self) -> None:
        """Shrink the window after a timeout.

        Raises PeekTimeout when even the smallest window had the longest timeout.
        """
        smaller = self.next.after_timeout()
        if smaller is None:
            raise PeekTimeout(
                f"reading the smallest read window ({self.next}) took too long: {self._suspect()}"
            )
        if smaller.timeout_s > self.next.timeout_s:
            log.warning(
                "the smallest read window took longer than %d s: %s",
                self.next.timeout_s,
                self._suspect(),
            )
        log.warning("the server was too slow: next read window: %s", smaller)
        self._take(smaller)

    def lacks_room(self, *, is_disk_full: bool = False) -> bool:
        """Shrink the window when the server has no room for the answer; False when it is the
        smallest.

        No later window of this drain is larger: a quick answer says nothing about the room that it
        needs. A full disk is met once more at most: other sessions need it, too, and a server that
        can't write WAL stops.
        """
        narrower = self.next.narrower()
        if narrower is not None and is_disk_full:
            narrower = replace(narrower, window_bytes=SMALLEST_WINDOW_BYTES)
        if not self._narrow(narrower):
            return False
        self._take(self.next)
        return True

    def ended_by_replay(self) -> bool:
        """Shrink the window after a standby's replay ended the read; False when it is the smallest.

        A shorter read may not be in replay's way. No later window of this drain is larger: how long
        replay waits doesn't depend on the statement timeout.
        """
        return self._narrow(self.next.narrower())

    def _narrow(self, narrower: ReadWindow | None) -> bool:
        """Use a narrower window, and let none be wider from now on; False when there is none."""
        if narrower is None:
            return False
        self._widest = replace(self._widest, window_bytes=narrower.window_bytes)
        self.next = narrower
        log.warning("the next read window is narrower: %s", narrower)
        return True

    def answered(self, seconds: float, *, is_whole: bool) -> None:
        """Adapt the window after an answer in ``seconds``; ``is_whole`` as in
        ReadWindow.after_answer().
        """
        larger = self.next.after_answer(seconds, self._widest, is_whole=is_whole)
        if larger != self.next:
            log.info("the server answered in %.1f s: next read window: %s", seconds, larger)
            self._take(larger)

    def _take(self, read_window: ReadWindow) -> None:
        self.next = read_window
        setting = read_window if read_window != self._file else None
        if setting == self._kept:
            return
        window, timeout = (
            (setting.window_bytes, setting.timeout_s) if setting is not None else (None, 0)
        )
        self._job.ledger.append(ReadWindowSetting(now(), self._job.run_id, window, timeout))
        self._kept = setting

    def _suspect(self) -> str:
        """Returns a sentence on the transaction that likely determines the slot's restart_lsn.

        A standby's transactions are its primary's.
        """
        with self._job.source.connect("bite") as primary:
            oldest = next(iter(open_transactions(primary)), None)
        if oldest is None:
            return (
                "no transaction is open, so a huge transaction that has ended waits in the slot:"
                " raise the server's logical_decoding_work_mem, give it faster disks, or find out"
                " what else keeps it busy"
            )
        who, since = oldest
        return (
            f"every call reads from the start of the oldest open transaction, {who}, open since"
            f" {since}: end it if it is stuck"
        )

"""A connection that is used repeatedly, with other work in between.

It is opened at first use, and opened again after it was lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Self

import psycopg

from waldelta.pipeline.job import Job
from waldelta.postgres import Connection


class SharedConnection:
    """A connection to the job's primary, for uses that leave no state in its session.

    It is closed at the end of its ``with`` block. A server or a firewall may end it while it is
    idle, so each use first checks that it still works. An exception within a use closes it, because
    the session's state isn't known then.
    """

    def __init__(self, job: Job, purpose: str) -> None:
        self._job, self._purpose = job, purpose
        self._opened: tuple[AbstractContextManager[Connection], Connection] | None = None

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """Yield the connection; raises as SourceConnections.connect() does."""
        connection = self._alive()
        try:
            yield connection
        except BaseException as err:
            self._close(type(err), err, err.__traceback__)
            raise

    def _alive(self) -> Connection:
        if self._opened is not None:
            try:
                self._opened[1].execute("select 1")
            except psycopg.Error:
                with suppress(psycopg.Error):
                    self._close()
        if self._opened is None:
            opening = self._job.source.connect(self._purpose)
            self._opened = (opening, opening.__enter__())
        return self._opened[1]

    def _close(
        self,
        kind: type[BaseException] | None = None,
        err: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].__exit__(kind, err, trace)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(psycopg.Error):
            self._close()

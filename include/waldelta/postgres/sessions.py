"""Sessions that are used again: on a rehearsal's scratch server, where many short uses follow each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Generic, TypeVar

import psycopg
from psycopg import sql

from waldelta.postgres.connection import (
    NAME_BYTES,
    Connection,
    adbc_driver,
    connect,
    connect_arrow,
    pin,
)

if TYPE_CHECKING:
    import adbc_driver_postgresql.dbapi

C = TypeVar("C", bound="Connection | adbc_driver_postgresql.dbapi.Connection")


class Sessions(Generic[C]):
    """Opens sessions of one driver; within a block of reuse(), idle ones are used again.

    Opening one takes longer than most queries: the server starts a process, and ADBC reads all
    types. So ADBC's session doesn't know a type that was made later. A use must not leave a
    temporary slot, or change the factories of the session's rows and cursors.

    A source's sessions are never used again: DISCARD ALL ends the role and the settings that a
    login trigger has given to a session (before PostgreSQL 15.9 and 16.5 also the role of ALTER
    ROLE … SET), and an idle session stays on a server that a failover has replaced.
    """

    def __init__(
        self, open_: Callable[[str, str], C], error: Callable[[], type[Exception]]
    ) -> None:
        self._open, self._error = open_, error
        self._blocks = 0
        self._idle: dict[str, list[C]] = {}

    @contextmanager
    def reuse(self) -> Iterator[None]:
        """Keep sessions within the block; threads may share it."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            self._close_idle()

    @contextmanager
    def session(self, conninfo: str, application_name: str) -> Iterator[C]:
        """Yields a session with the pinned settings; raises as its driver's connect() does.

        It is closed unless it is kept, always after an exception.
        """
        with ExitStack() as closing:
            session = self._take(conninfo, application_name)
            closing.callback(session.close)
            yield session
            if self._blocks:
                with suppress(self._error()):
                    _reset(session, "waldelta idle")
                    closing.pop_all()
                    self._idle.setdefault(conninfo, []).append(session)
                self._close_idle()

    def _close_idle(self) -> None:
        """Close the idle sessions, unless a block keeps them."""
        while not self._blocks and self._idle:
            for session in self._idle.popitem()[1]:
                session.close()

    def _take(self, conninfo: str, application_name: str) -> C:
        while idle := self._idle.get(conninfo):
            with suppress(IndexError):  # Another thread took it.
                session = idle.pop()
                with ExitStack() as closing:
                    closing.callback(session.close)
                    with suppress(self._error()):  # The server may have ended it.
                        _reset(session, application_name)
                        pin(conninfo, session)
                        closing.pop_all()
                        return session
        return self._open(conninfo, application_name)


def _reset(session: Connection | adbc_driver_postgresql.dbapi.Connection, name: str) -> None:
    """Undo what a use set and left open; raises its driver's error where that fails."""
    if isinstance(session, psycopg.Connection):
        session.rollback()
    with session.cursor() as cursor:
        cursor.execute("discard all")
        cursor.execute(sql.SQL("set application_name = {}").format(name[:NAME_BYTES]).as_string())


PLAIN_SESSIONS = Sessions(connect, lambda: psycopg.Error)
# A slot's messages are of types that every server has, and copies select values of others as text.
ARROW_SESSIONS = Sessions(connect_arrow, lambda: adbc_driver().Error)

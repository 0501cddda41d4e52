"""The connections of one run to its source: to the primary, and to the server that has the slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import psycopg

from waldelta.config import Source
from waldelta.errors import ConfigError
from waldelta.postgres import (
    Connection,
    connect,
    ended_by_replay,
    lacks_room,
    name_unreadable,
    named_loss,
    privilege_missing,
)
from waldelta.server_errors.sqlstate import ServerError


@dataclass(frozen=True, slots=True)
class SourceConnections:
    """Opens connections to a source; ``conninfo`` connects to its primary.

    ``conninfo`` is empty for a job that only reads the lake. ``read_conninfo`` connects to the
    standby of source.read_from, and is None without one.
    """

    config: Source
    conninfo: str = field(default="", repr=False)
    read_conninfo: str | None = field(default=None, repr=False)

    @property
    def slot_conninfo(self) -> str:
        """The connection string of the server that has the slot: the primary, or the standby of
        source.read_from.
        """
        if self.config.read_from is None:
            return self.conninfo
        if not self.read_conninfo:
            raise ConfigError(
                f"connection {self.config.read_from!r} (source.read_from) wasn't passed to this run"
            )
        return self.read_conninfo

    def connect(self, purpose: str) -> AbstractContextManager[Connection]:
        """Open a connection to the source's primary; its application_name contains the purpose.

        Raises PrivilegeMissing where the server refuses a statement without a more specific error,
        SourceError where it has no room for a query's result,
        NameUnreadable where it can't send a name as UTF-8, and SourceUnreachable where the
        connection is lost.
        """
        return self._connect(self.conninfo, purpose)

    def connect_slot(
        self, purpose: str, primary: Connection | None = None
    ) -> AbstractContextManager[Connection]:
        """Open a connection to the server that has the slot; raises as connect() does.

        Unless source.read_from names a standby, it is the caller's ``primary`` connection when
        given.
        """
        if self.config.read_from is None and primary is not None:
            return nullcontext(primary)
        return self._connect(self.slot_conninfo, purpose)

    @contextmanager
    def _connect(self, conninfo: str, purpose: str) -> Iterator[Connection]:
        with (
            named_loss(conninfo),
            connect(conninfo, f"waldelta {purpose} {self.config.slot}") as connection,
        ):
            try:
                yield connection
            except psycopg.errors.InsufficientPrivilege as err:
                raise privilege_missing(connection, err) from err
            except psycopg.errors.UntranslatableCharacter as err:
                # The text is in a row that the slot decodes, not in a name.
                if ServerError.of(err).is_from_decoding:
                    raise
                raise name_unreadable(conninfo, err) from err
            except psycopg.errors.SerializationFailure as err:
                # A session of ours is never serializable: replay of a standby is the other cause.
                raise ended_by_replay(
                    f"{purpose} of slot {self.config.slot!r}", ServerError.of(err)
                ) from err
            except psycopg.OperationalError as err:
                if (full := lacks_room(err)) is not None:
                    raise full from err
                raise


class SharedConnection(AbstractContextManager["SharedConnection"]):
    """A connection to the source's primary, for uses with other work in between that leave no state
    in its session.

    It is opened at first use, and closed at the end of its ``with`` block. A server or a firewall
    may end it while it is idle, so each use first checks that it still works. An exception within a
    use closes it, because the session's state isn't known then.
    """

    def __init__(self, source: SourceConnections, purpose: str) -> None:
        self._source, self._purpose = source, purpose
        self._connection: Connection | None = None
        self._opened = ExitStack()

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """Yield the connection; raises as SourceConnections.connect() does."""
        if self._connection is not None:
            try:
                self._connection.execute("select 1")
            except psycopg.Error:
                self._close()
        if self._connection is None:
            self._connection = self._opened.enter_context(self._source.connect(self._purpose))
        try:
            yield self._connection
        except BaseException:
            self._connection = None
            with self._opened.pop_all():  # It names the error, and closes the connection.
                raise

    def _close(self) -> None:
        self._connection = None
        with suppress(psycopg.Error):
            self._opened.close()

    def __exit__(self, *_: object) -> None:
        self._close()

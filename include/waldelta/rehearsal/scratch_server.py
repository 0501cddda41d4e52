"""A throw-away PostgreSQL for one rehearsal, and the folder of its lake.

A second process waits until the first one has ended, and then stops the server and removes the
folder. So nothing stays, however the rehearsal ends, kill -9 included. Where the second process is
killed as well, the next rehearsal removes what they left.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from waldelta.errors import ConfigError
from waldelta.postgres import Connection, connect
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres, local_versions
from waldelta.stages.setup.facts.source_facts import read_server

# Nothing outlives the rehearsal, so nothing must reach the disk. Whatever keeps WAL or moves a
# horizon by the clock would make two rehearsals differ.
_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "autovacuum": "off",
    "shared_buffers": "64MB",
    "max_wal_size": "1GB",
    # Segments in /dev/shm would outlive a killed server; these are in the folder.
    "dynamic_shared_memory_type": "mmap",
}
# Databases of killed rehearsals whose second process was killed as well. A rehearsal connects to
# its database as soon as that is there.
_ABANDONED_DATABASES = """
select datname from pg_database
where datname ~ '^waldelta_rehearsal_[0-9]+_[0-9a-f]{8}$'
  and (pg_stat_file('base/' || oid)).modification < now() - interval '1 minute'
  and not exists (select from pg_stat_activity where datid = pg_database.oid)
"""
_PREFIX = "waldelta-rehearsal-"
_SOON_S = 60.0
# When the files of a killed rehearsal are removed again, in seconds after the time before.
_WAITS = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class ScratchDatabase:
    """An empty database that belongs to one rehearsal; ``lake`` is the folder for its targets."""

    conninfo: str = field(repr=False)
    lake: Path
    version: int

    def connect(self) -> Connection:
        """Open a connection in autocommit, as the role that made the database."""
        return psycopg.connect(self.conninfo, autocommit=True, application_name="rehearsal")


@contextmanager
def scratch_database(version: int | None, dsn: str | None = None) -> Iterator[ScratchDatabase]:
    """Yields an empty database on a server of this major version, or on the one of ``dsn``.

    Without ``version`` the newest one of this machine serves, and without programs of that version
    the next newer one. Raises ConfigError where this machine has no PostgreSQL that is as new, and
    for a ``dsn`` that doesn't decode logically, or whose role is no superuser; connect()'s errors.
    """
    _remove_abandoned_folders()
    database = f"waldelta_rehearsal_{os.getpid()}_{secrets.token_hex(4)}"
    with _temporary_folder(dsn, database) as folder:
        yield _create_database(_start(folder, version) if dsn is None else dsn, database, folder)


def _start(folder: Path, version: int | None) -> str:
    """Start a server; returns the connection string of its superuser.

    The socket is in a folder that the server's user alone may enter, so it needs no password.
    Checking one takes longer than most statements of a rehearsal.
    """
    try:
        server = EmbeddedPostgres(folder / "server", _choose_version(version), _SETTINGS).start()
    except (OSError, RuntimeError) as err:
        raise ConfigError(
            f"PostgreSQL didn't start for the rehearsal ({err}): set TMPDIR to a folder that every"
            " user may enter, or pass --scratch"
        ) from None
    return make_conninfo(host=str(server.data), port=server.port, user="postgres")


def _choose_version(version: int | None) -> int:
    versions = local_versions()
    if not versions:
        raise ConfigError(
            "no PostgreSQL for the rehearsal on this machine: run `pip install"
            " 'waldelta[rehearse]'`, or pass --scratch with the connection of a server that may be"
            " written to"
        )
    if version is None:
        return versions[-1]
    newer = [one for one in versions if one >= version]
    if not newer:
        raise ConfigError(
            f"the source is PostgreSQL {version}, and this machine has only the older"
            f" {', '.join(map(str, versions))}: install {version} or newer, or pass --scratch with"
            " the connection of such a server that may be written to"
        )
    return newer[0]


def _create_database(dsn: str, database: str, folder: Path) -> ScratchDatabase:
    with connect(dsn, "waldelta rehearse") as connection:
        server = read_server(connection)
        if not server.superuser:
            raise ConfigError(
                f"role {server.role!r} of the --scratch connection is no superuser: a"
                " rehearsal makes roles and writes rows without triggers"
            )
        if (level := server.settings["wal_level"]) != "logical":
            raise ConfigError(
                f"wal_level of the --scratch server is {level!r}, and a slot needs logical: alter"
                " system set wal_level = 'logical' there, and restart it"
            )
        for (name,) in connection.execute(_ABANDONED_DATABASES).fetchall():
            _drop(connection, name)
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(database)))
    return ScratchDatabase(
        make_conninfo(dsn, dbname=database), folder / "lake", server.version // 10_000
    )


def _remove_abandoned_folders() -> None:
    """Remove the folders of rehearsals that have ended; a server that still runs there ends by
    itself.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another user's folder can't be opened. One in use is locked, soon after it is made.
        with suppress(OSError), _lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as handle:
            if os.fstat(handle).st_mtime < time.time() - _SOON_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock_folder(folder: Path, mode: int) -> Iterator[int]:
    """Yields a handle of the folder, which is locked until all processes have closed it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, mode)
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _temporary_folder(dsn: str | None, database: str) -> Iterator[Path]:
    """Yields a new folder, which another process removes with the database, as soon as this one
    leaves the block or ends.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with _lock_folder(folder, fcntl.LOCK_EX) as handle:
        # Its standard input ends when the last process that can write to it has ended. It takes no
        # part in signals to this process's group. The connection string has a password, so it is
        # sent there.
        remover = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), database],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[handle],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    pipe = remover.stdin
    assert pipe is not None  # noqa: S101 - Popen's types don't say so
    try:
        pipe.write(f"{dsn or ''}\0".encode())
        pipe.flush()
        yield folder
    finally:
        pipe.write(b"\0")  # This process isn't killed: nothing else writes to the folder.
        pipe.close()
        remover.wait()


def role_comment(database: str) -> str:
    """Returns the comment by which a rehearsal finds the roles to drop that it has created."""
    return f"waldelta rehearse {database}"


def _drop(connection: Connection, database: str) -> None:
    """Drop a rehearsal's database, with its slots and the roles that were made for it."""
    slots = "select slot_name from pg_replication_slots where database = %s"
    for (slot,) in connection.execute(slots, [database]).fetchall():
        connection.execute("select pg_drop_replication_slot(%s)", [slot])
    drop = sql.SQL("drop database if exists {} with (force)")
    connection.execute(drop.format(sql.Identifier(database)))
    roles = "select rolname from pg_roles where shobj_description(oid, 'pg_authid') = %s"
    for (role,) in connection.execute(roles, [role_comment(database)]).fetchall():
        connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def _remove(folder: Path, database: str, dsn: str, was_killed: bool) -> None:
    if dsn:
        # The server may be gone as well.
        with suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as connection:
            _drop(connection, database)
    # A program that was killed with the rehearsal, or not yet, may still be writing. A server whose
    # files are gone ends by itself.
    for wait in (0.0, *_WAITS):
        time.sleep(wait)
        server = EmbeddedPostgres(folder / "server")
        with suppress(OSError, ValueError):
            server.version = int((server.data / "PG_VERSION").read_text())
            server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)
        if not was_killed:
            return


if __name__ == "__main__":
    _dsn, *_end = sys.stdin.read().split("\0")
    _remove(Path(sys.argv[1]), sys.argv[2], _dsn, was_killed=len(_end) < 2)

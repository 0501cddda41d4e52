"""What a million changes cost the source: CPU seconds of our backends, and temporary files, by way of acknowledging.

Run: python -m benchmarks.source_cost [changes]

No lake: a peek is read and counted as landing does, then the slot is moved as consuming does.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg

from benchmarks.main_job import BACKLOG, FILL, ORDERS
from benchmarks.measured import Measured
from demo.embedded_postgres import EmbeddedPostgres
from waldelta.connection import connect
from waldelta.consume import SlotIdentity, consume
from waldelta.ledger import Ledger
from waldelta.peek import PeekBound, peek
from waldelta.pipeline_file import Source
from waldelta.recover import slot_move
from waldelta.server import ServerPosition, read_position
from waldelta.tally import COLUMNS, Landed, Tally

CHANGES = 1_000_000
ROWS = 200_000
ACKNOWLEDGE = ("get", "advance", "peek")


@dataclass(frozen=True)
class Cost:
    """Of one piece of work: CPU seconds of the backends it needed, elapsed seconds, bytes of temporary files."""

    cpu_s: float
    seconds: float
    temp_bytes: int

    def row(self, name: str, changes: int) -> Measured:
        """A row of the result, per million changes."""
        million = changes / 1e6
        notes = {"CPU s": round(self.cpu_s / million, 1), "temporary MB": round(self.temp_bytes / million / 1e6)}
        return Measured(f"{name}, per million changes", self.seconds / million, notes=notes)


class Meter:
    """Adds up what a server's backends cost; each piece of work has connections of its own, and closes them."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        self._postmaster = psutil.Process(int((server.data / "postmaster.pid").read_text().split()[0]))

    def measure(self, work: Callable[[], Landed | None]) -> tuple[Cost, Landed | None]:
        """Do it, wait until its backends have ended, and count."""
        before, began = self._read(), time.perf_counter()
        done = work()
        seconds = time.perf_counter() - began
        after = self._read()
        return Cost(after[0] - before[0], seconds, after[1] - before[1]), done

    def _read(self) -> tuple[float, int]:
        """CPU seconds of backends that have ended, and temporary bytes: a backend reports these when it ends."""
        with psycopg.connect(self._server.conninfo(), application_name="meter", autocommit=True) as connection:
            statement = "select count(*) from pg_stat_activity where application_name like 'waldelta%'"
            while connection.execute(statement).fetchone() != (0,):
                time.sleep(0.01)
            (temp,) = connection.execute(
                "select temp_bytes from pg_stat_database where datname = 'postgres'"
            ).fetchone()
        times = self._postmaster.cpu_times()
        return times.children_user + times.children_system, temp


def run(changes: int = CHANGES) -> list[Measured]:
    """Write the same changes for each way, read them, and move the slot."""
    measured = []
    with (
        tempfile.TemporaryDirectory() as name,
        EmbeddedPostgres(Path(name, "postgres"), settings={"autovacuum": "off"}) as server,
    ):
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute(ORDERS)
            connection.execute(FILL.format(rows=ROWS).encode())
            connection.execute("create publication orders_pub for table orders")
        ledger, meter = Ledger(Path(name, "lake").as_uri()), Meter(server)
        for acknowledge in ACKNOWLEDGE:
            source = Source.model_validate(
                {"conn_id": "bench", "slot": f"s_{acknowledge}", "publications": [{"name": "orders_pub", "manage": False}],
                 "options": {"acknowledge": acknowledge}}
            )  # fmt: skip
            with psycopg.connect(server.conninfo(), autocommit=True) as connection:
                connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (source.slot,))
                backlog = BACKLOG.format(transactions=changes // 100 - 1, first=1, among=ROWS)
                connection.execute(backlog.encode())
                position = read_position(connection)
            _peek(server, source, position)  # the first reading of fresh rows and catalogs isn't counted
            read, landed = meter.measure(lambda s=source, p=position: _peek(server, s, p))
            moved, _ = meter.measure(lambda s=source, p=position, x=landed: _move(server, s, p, ledger, x))
            assert landed is not None
            count = landed.transactions.changes
            measured.append(read.row(f"reading the slot ({acknowledge})", count))
            measured.append(moved.row(f"moving the slot, acknowledge: {acknowledge}", count))
            with psycopg.connect(server.conninfo(), autocommit=True) as connection:
                connection.execute("select pg_drop_replication_slot(%s)", (source.slot,))
        server.delete()
    return measured


def _peek(server: EmbeddedPostgres, source: Source, position: ServerPosition) -> Landed:
    tally = Tally(1)
    for batch in peek(server.conninfo(), source, PeekBound(position.flush_lsn, None, 3600, position.next_xid8)):
        tally.add(batch.select(COLUMNS))
    return tally.landed()


def _move(server: EmbeddedPostgres, source: Source, position: ServerPosition, ledger: Ledger, landed: Landed) -> None:
    identity = SlotIdentity(source.slot, position.system_identifier, position.timeline, "0/0")
    move = slot_move(identity, "bench", landed.end_lsn, landed.batch)
    with connect(server.conninfo(), "waldelta bench") as connection:
        consume(connection, source, ledger, move, landed.transactions)


if __name__ == "__main__":
    for row in run(*(int(argument) for argument in sys.argv[1:])):
        print(f"{row.name}: {row.seconds:.1f} s, {row.notes}", flush=True)

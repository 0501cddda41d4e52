"""The place of a workload: its own database on the source, filled and published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.sources import Source
from benchmarks.stack import Stack, database

PUBLICATION, RAW_SLOT = "bench", "bench_raw"


class Place:
    """One workload's database on the source, and a folder for lakes and pipeline files."""

    def __init__(self, stack: Stack, source: Source, name: str, conninfo: str) -> None:
        self.stack, self.source, self.name, self.conninfo = stack, source, name, conninfo
        self.folder = stack.folder / name
        self.folder.mkdir()
        self.server = stack.source

    def sql(self, statement: str) -> list[tuple]:
        """Run statements on the source."""
        return self.stack.sql(statement, self.name)

    def publish(self, name: str = PUBLICATION, where: str | None = None) -> None:
        """Create a publication of all tables."""
        condition = f" where ({where})" if where else ""
        tables = ", ".join(f"{table}{condition}" for table in self.source.tables)
        self.sql(
            f"create publication {name} for table {tables} with (publish_via_partition_root ="
            f" {self.source.via_root})"
        )

    def flushed(self) -> str:
        """Returns the server's flushed WAL position."""
        return self.sql("select pg_current_wal_flush_lsn()::text")[0][0]


@contextmanager
def place(stack: Stack, source: Source, name: str, rows: int) -> Iterator[Place]:
    """Create a database with the source's tables, filled and published."""
    # A workload's name may be a keyword of SQL, so it gets a prefix.
    database_name = f"bench_{name.replace('-', '_')}"
    with database(stack.source, database_name) as conninfo:
        made = Place(stack, source, database_name, conninfo)
        made.sql(source.create)
        made.sql(source.fill.format(rows=rows))
        made.sql("vacuum analyze")
        made.publish()
        made.sql(f"select pg_create_logical_replication_slot('{RAW_SLOT}', 'pgoutput')")
        try:
            yield made
        finally:
            made.sql(f"select pg_drop_replication_slot('{RAW_SLOT}')")

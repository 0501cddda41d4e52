"""A naive program from PostgreSQL to Delta, written like a first try: a baseline.

psycopg fetches what the slot has, a Python loop decodes message by message and keeps the last state
of each key, ``createDataFrame`` passes the rows to the JVM, MERGE applies them, and then the slot
moves. The comparison is fair: it runs in its own warm session with our jobs' settings, peeks before
it moves the slot, casts values with C code where Python has it, and merges once. It leaves out what
makes such a program long: keys that change, values that aren't sent (unchanged TOAST), TRUNCATE,
and correctness after a crash.

Run: python -m benchmarks.naive CONNINFO SLOT PUBLICATION TABLE TARGET. Each line "copy" or "apply"
on standard input runs that action, and the answer is "done" with the number of rows or messages.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FETCH_ROWS = 100_000
# By oid: the function from PostgreSQL's text to a Python value, and the type in Spark.
CASTS: dict[int, tuple[Callable[[str], object], str]] = {
    20: (int, "bigint"),
    23: (int, "int"),
    25: (str, "string"),
    1700: (Decimal, "decimal(12,2)"),
    1184: (datetime.fromisoformat, "timestamp"),
}
PEEK = """
select lsn::text, data
  from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1',
    'publication_names', %s)
"""


class Relation:
    """The columns of a Relation message: names, casts and which of them are the key."""

    def __init__(self, data: bytes) -> None:
        at = data.index(b"\0", 5) + 1
        at = data.index(b"\0", at) + 2
        (count,) = struct.unpack_from("!H", data, at)
        at += 2
        self.names: list[str] = []
        self.key: list[int] = []
        self.casts: list[Callable[[str], object]] = []
        for number in range(count):
            end = data.index(b"\0", at + 1)
            if data[at]:
                self.key.append(number)
            self.names.append(data[at + 1 : end].decode())
            (oid,) = struct.unpack_from("!I", data, end + 1)
            self.casts.append(CASTS[oid][0])
            at = end + 9

    def values(self, data: bytes, at: int) -> list[object]:
        """Returns the values of the tuple that starts at an offset."""
        (count,) = struct.unpack_from("!H", data, at)
        at += 2
        found: list[object] = []
        for number in range(count):
            if data[at] == ord("t"):
                (length,) = struct.unpack_from("!I", data, at + 1)
                at += 5
                found.append(self.casts[number](data[at : at + length].decode()))
                at += length
            else:
                found.append(None)
                at += 1
        return found


def last_states(messages: Iterator[bytes]) -> list[tuple]:
    """Returns the last change of each key: its kind (I, U, D), then the values."""
    relations: dict[bytes, Relation] = {}
    states: dict[tuple, tuple] = {}
    for data in messages:
        kind = data[:1]
        if kind == b"R":
            relations[data[1:5]] = Relation(data)
        elif kind in (b"I", b"U", b"D"):
            relation = relations[data[1:5]]
            values = relation.values(data, 6)
            states[tuple(values[number] for number in relation.key)] = (kind.decode(), *values)
    return list(states.values())


class NaiveJob:
    """Replicates one table from one slot into one target."""

    def __init__(self, spark: SparkSession, source: psycopg.Connection, *names: str) -> None:
        self.spark, self.source = spark, source
        self.slot, self.publication, self.table, self.target = names
        self.identifier = sql.Identifier(*self.table.split("."))
        empty = source.execute(sql.SQL("select * from {} limit 0").format(self.identifier))
        self.columns = [
            (column.name, CASTS[column.type_code][1]) for column in empty.description or ()
        ]
        self.schema = ", ".join(f"{name} {kind}" for name, kind in self.columns)

    def copy(self) -> int:
        """Copy the table into a new target."""
        mode, count = "overwrite", 0
        with self.source.transaction(), self.source.cursor("naive") as cursor:
            cursor.itersize = FETCH_ROWS
            cursor.execute(sql.SQL("select * from {}").format(self.identifier))
            while rows := cursor.fetchmany(FETCH_ROWS):
                frame = self.spark.createDataFrame(rows, self.schema)
                frame.write.format("delta").mode(mode).save(self.target)
                mode, count = "append", count + len(rows)
        return count

    def apply(self) -> int:
        """Apply what the slot has."""
        messages = self.source.execute(PEEK, (self.slot, self.publication), binary=True).fetchall()
        if not messages:
            return 0
        states = last_states(data for _, data in messages)
        frame = self.spark.createDataFrame(states, f"_kind string, {self.schema}")
        frame.createOrReplaceTempView("naive_changes")
        names = [name for name, _ in self.columns]
        self.spark.sql(
            f"""
            merge into delta.`{self.target}` as target
            using naive_changes as change on target.id = change.id
            when matched and change._kind = 'D' then delete
            when matched then update set {", ".join(f"{name} = change.{name}" for name in names)}
            when not matched and change._kind <> 'D' then
                insert ({", ".join(names)}) values
                  ({", ".join(f"change.{name}" for name in names)})"""
        ).collect()
        last_lsn = messages[-1][0]
        self.source.execute(
            "select pg_replication_slot_advance(%s, %s::pg_lsn)", (self.slot, last_lsn)
        )
        return len(messages)


def main(conninfo: str, *names: str) -> None:
    """Run the commands from standard input until it ends."""
    from waldelta.spark import spark_session

    spark = spark_session("local[*]", name="naive")
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with psycopg.connect(conninfo, autocommit=True) as source:
            source.execute("set datestyle = iso; set timezone = utc")
            job = NaiveJob(spark, source, *names)
            _answer("ready", 0)
            for line in sys.stdin:
                _answer("done", getattr(job, line.strip())())
    finally:
        spark.stop()


def _answer(word: str, count: int) -> None:
    sys.stdout.write(f"{word} {count}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

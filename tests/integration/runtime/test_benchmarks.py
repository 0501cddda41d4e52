"""`make bench` works: what it writes, measures and compares, at sizes that say nothing about
speed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from psycopg.rows import dict_row

from benchmarks import results, runners
from benchmarks.__main__ import main
from benchmarks.baselines import Naive
from benchmarks.ours import Waldelta
from benchmarks.place import RAW_SLOT, place
from benchmarks.scores import scores
from benchmarks.sources import (
    DOCUMENTS,
    ONE_TRANSACTION,
    ORDERS,
    TINY,
    UUID_MIXED,
    UUID_ORDERS,
    WIDE,
    WIDE_MIXED,
    busy,
    many,
    partitioned,
)
from benchmarks.stack import Stack
from benchmarks.workloads import (
    NATIVE,
    PEEK,
    RECVLOGICAL,
    WARM,
    Backlog,
    Variant,
    chosen,
)

pytestmark = [pytest.mark.pg, pytest.mark.soak("the benchmark is no part of the product")]


def test_baselines_beside_each_other(postgres):
    """The raw drains and PostgreSQL's own subscription, which has applied what was written; no slot
    or database stays.
    """
    (workload,) = chosen(["backlog-1m-clustered"])
    with Stack(postgres) as stack:
        measured = runners.run(
            stack, replace(workload, contenders=(PEEK, RECVLOGICAL, NATIVE)), runners.Plan(0.001, 1)
        )
        left = """select slot_name::text from pg_replication_slots where slot_name like 'bench%'
                  union all select datname::text from pg_database where datname like 'bench%'"""
        assert stack.sql(left) == []
    assert [(one.contender, one.changes, len(one.rounds)) for one in measured] == [
        (PEEK, 1000, 1),
        (RECVLOGICAL, 1000, 1),
        (NATIVE, 1000, 1),
    ]
    assert "source" in measured[0].rounds[0].cpu_s
    assert "subscriber" in measured[2].rounds[0].cpu_s
    assert "backlog-1m-clustered/native subscriber ÷ pg_recvlogical" in {
        score.name for score in scores(measured)
    }


def drained(there):
    """How many messages of each kind came through the slot."""
    return dict(
        there.sql(f"""
            select chr(get_byte(data, 0)), count(*)::int
              from pg_logical_slot_get_binary_changes('{RAW_SLOT}', null, null, 'proto_version',
                '1', 'publication_names', 'bench')
             group by 1""")
    )


def rows_of(there):
    """Where each row is, which an update changes."""
    tables = (
        (name, there.sql(f"select id, tableoid::text || ctid::text from {name}"))
        for name in there.source.tables
    )
    return {(name, key): at for name, found in tables for key, at in found}


@pytest.mark.parametrize(
    ("source", "rows", "backlog", "transactions"),
    [
        (ORDERS, 5000, Backlog(1000), 10),
        (ORDERS, 5000, Backlog(1000, clustered=True), 10),
        (ORDERS, 100, Backlog(500), 5),  # too few rows at first: some are updated again and again
        (ORDERS, 5000, Backlog(1000, ONE_TRANSACTION), 1),
        (ORDERS, 5000, Backlog(1000, TINY), 1000),
        (WIDE, 5000, Backlog(1000, WIDE_MIXED), 10),
        (UUID_ORDERS, 5000, Backlog(1000, UUID_MIXED), 10),
        (partitioned(3), 5000, Backlog(1000), 10),
        (many(3, large=1), 5000, Backlog(1000, busy(3)), 10),
    ],
    ids=[
        "random",
        "clustered",
        "few-rows",
        "one-transaction",
        "tiny",
        "wide",
        "uuid",
        "partitions",
        "busy",
    ],
)
def test_mixed_backlogs_touch_rows_that_were_there_before(
    postgres, source, rows, backlog, transactions
):
    """One after the other: half inserts, 40% updates, 10% deletes of older rows, and none is
    updated and deleted.
    """
    with Stack(postgres) as stack, place(stack, source, "mixed", rows) as there:
        for _ in range(3):
            before = rows_of(there)
            runners.write_backlog(there, backlog)
            after = rows_of(there)
            came = drained(there)
            counts = backlog.changes // 2, backlog.changes * 4 // 10, backlog.changes // 10
            assert (came["I"], came["U"], came["D"], came["B"]) == (*counts, transactions)
            deleted = before.keys() - after.keys()
            changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
            updated = (min(backlog.changes // 2, len(before)) - counts[2]) // 40 * 40
            assert (len(after.keys() - before.keys()), len(changed), len(deleted)) == (
                counts[0],
                updated,
                counts[2],
            )
            if backlog.clustered:
                assert deleted | changed == set(sorted(before)[-500:])
            elif source is ORDERS and rows > 1000:
                tenths = [
                    {key * 10 // max(before)[1] for _, key in keys} for keys in (deleted, changed)
                ]
                assert all(set(range(10)) <= found for found in tenths)  # all over the table


def as_arrow(rows):
    """Rows with decimals as the source declares them."""
    found = pa.Table.from_pylist(rows)
    return found.cast(
        pa.schema(
            [
                (f.name, pa.decimal128(12, 2) if pa.types.is_decimal(f.type) else f.type)
                for f in found.schema
            ]
        )
    )


@pytest.mark.parametrize(
    "source",
    [ORDERS, WIDE, partitioned(3), DOCUMENTS],
    ids=["orders", "wide", "partitions", "toast"],
)
def test_a_lake_that_is_not_what_its_source_is_counts_as_failed(postgres, source):
    """Equal to begin with; then values of two rows are swapped, which leaves count and sums as they
    were, or a row is missing.
    """
    (name,) = source.tables
    with Stack(postgres) as stack, place(stack, source, "verified", 20) as there:
        there.sql(f"insert into {name} select 1000")  # its other columns are null
        ours = Waldelta(there, WARM, Variant(), 0)
        with psycopg.connect(
            there.conninfo, row_factory=dict_row, options="-c timezone=UTC"
        ) as connection:
            rows = connection.execute(f"select * from {name} order by id".encode()).fetchall()
        write_deltalake(ours.target(name), as_arrow(rows))
        ours.verify()
        column = (
            list(rows[0])[-1] if source is DOCUMENTS else "amount" if "amount" in rows[0] else "c1"
        )
        rows[0][column], rows[1][column] = rows[1][column], rows[0][column]
        for wrong, count in ((rows, 21), (rows[1:], 20)):
            write_deltalake(ours.target(name), as_arrow(wrong), mode="overwrite")
            told = rf"warm's {name} \(rows, checksum\) is \({count}, .*source's \(21, "
            with pytest.raises(RuntimeError, match=told):
                ours.verify()


@pytest.mark.soak("the benchmark is no part of the product")
@pytest.mark.spark
@pytest.mark.parametrize(
    ("who", "workload"), [(Waldelta, "tables-20"), (Waldelta, "sync"), (Naive, "sync")]
)
def test_a_row_that_differs_in_the_lake_fails_its_workload(tmp_path, monkeypatch, who, workload):
    """Whoever is fast and wrong isn't published: a row is lost behind its back, after the last
    round.
    """

    verify = who.verify

    def tampered(self):
        for table in self.place.source.tables:
            assert DeltaTable(self.target(table)).delete("id = 7")["num_deleted_rows"] == 1
        verify(self)

    monkeypatch.setattr(who, "verify", tampered)
    only = ["--scale", "0.001", "--rounds", "1", "--results", str(tmp_path), "--only", workload]
    assert main(only) == 1
    ((failed, error),) = results.read(tmp_path / "last.json").failed.items()
    left, there = map(int, re.findall(r"\((\d+), ", error))
    assert (failed, there - left) == (workload, 1)


@pytest.mark.soak("the benchmark is no part of the product")
def test_pages_over_a_long_history_take_less_than_a_second():
    """100 tables, 10,000 runs, each page by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pages"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert done.stdout.count("/p/shop") > 5

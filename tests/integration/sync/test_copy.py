"""Reading chunks of one snapshot: every row once, or a named error; never a silent hole."""

import re
from types import SimpleNamespace

import pyarrow as pa
import pytest

from waldelta.errors import (
    PrivilegeMissing,
    SnapshotLost,
    SourceUnreachable,
    TableBusy,
)
from waldelta.postgres import connect
from waldelta.postgres.published_tables import read_published_tables
from waldelta.snapshot.chunks import plan_chunks
from waldelta.snapshot.exported_snapshot import SnapshotHolder
from waldelta.snapshot.read_selected import read_choices, whole_table
from waldelta.snapshot.read_table import (
    chunk_query,
    lock_query,
    plan_copy,
    raw_map,
    read_chunks,
)
from waldelta.snapshot.source_columns import MOST_EXPRESSIONS

pytestmark = pytest.mark.pg


class Copying:
    """A published table, a snapshot of it, and its chunks."""

    def __init__(self, database, holder, bytes_per_chunk=1 << 30):
        self.conninfo, self.holder = database.conninfo, holder
        (self.table,) = read_published_tables(holder.connection, ["p"])
        files = holder.relfilenodes([leaf.oid for leaf in self.table.leaves])
        self.copy = plan_copy(self.table, holder.snapshot_id, files, holder.lsn.value)
        self.chunks = plan_chunks(self.table.leaves, bytes_per_chunk)

    def read(self, chunks=None, conninfo=None):
        batches = read_chunks(
            conninfo or self.conninfo, self.copy, chunks or self.chunks, "waldelta copy test"
        )
        return pa.Table.from_batches(list(batches), schema=self.copy.schema)

    def rows(self, chunks=None):
        names = [name for name, _ in self.copy.columns]
        rows = self.read(chunks).select(names).to_pylist()
        return sorted(tuple(row.values()) for row in rows)


@pytest.fixture
def copying(database):
    """Open a snapshot on the table that publication p publishes."""
    holders = []

    def start(*statements, **options):
        for statement in statements:
            database.execute(statement)
        holders.append(SnapshotHolder(database.conninfo).__enter__())
        return Copying(database, holders[-1], **options)

    yield start
    for holder in holders:
        holder.__exit__(None, None, None)


class TestRows:
    def test_one_snapshot_keeps_a_row_that_moves_between_chunks(self, database, copying):
        """A row that leaves an unread chunk for one already read is still read, once, as it was."""
        table = copying(
            "create table f (id int primary key, v text) with (autovacuum_enabled = off)",
            "insert into f select g, repeat('x', 500) from generate_series(1, 1500) g",
            "delete from f where id <= 60",
            "vacuum f",
            "create publication p for table f",
            bytes_per_chunk=50 * 8192,
        )
        assert len(table.chunks) == 2
        first = table.rows(table.chunks[:1])
        moved = None
        for candidate in range(1440, 1501):
            database.execute("update f set v = repeat('m', 500) where id = %s", (candidate,))
            if database.execute("select ctid < '(50,0)' from f where id = %s", (candidate,)) == [
                (True,)
            ]:
                moved = candidate
                break
        assert moved is not None, "no row moved into the first chunk"
        rows = first + table.rows(table.chunks[1:])
        assert [row[0] for row in sorted(rows)] == list(range(61, 1501))
        assert {row[1] for row in rows} == {"x" * 500}

    def test_rows_behind_the_planned_end_are_read(self, database, copying):
        """The size may be older than the snapshot: the last chunk is open-ended."""
        table = copying(
            "create table t (id int primary key, v text)",
            "insert into t select g, repeat('x', 900) from generate_series(1, 100) g",
            "create publication p for table t",
        )
        shorter = [type(table.table.leaves[0])(leaf.id, leaf.oid, leaf.relfilenode, 2, 2 * 8192)
                   for leaf in table.table.leaves]  # fmt: skip
        chunks = plan_chunks(shorter, 8192)
        assert len(chunks) == 2
        assert len(table.rows(chunks)) == 100

    def test_odd_identifiers(self, copying):
        """Quotes, dots, spaces, percent and braces in names are names."""
        table = copying(
            'create schema "sch""ema.%s"',
            """create table "sch""ema.%s"."ta'ble {x} %(y)s" ("c o.l" int primary key,"""
            """ "c""1" int, "ctid;--" int, "{}" int, "%" int)""",
            """insert into "sch""ema.%s"."ta'ble {x} %(y)s" values (1, 2, 3, 4, 5)""",
            """create publication p for table "sch""ema.%s"."ta'ble {x} %(y)s" """
            """where ("{}" > 0 and "%" > 0)""",
        )
        assert table.rows() == [(1, 2, 3, 4, 5)]
        assert table.read().column_names[:5] == ["c o.l", 'c"1', "ctid;--", "{}", "%"]

    @pytest.mark.parametrize("most", [MOST_EXPRESSIONS, 3])
    def test_values_carry_the_snapshots_lsn_and_what_a_type_cannot_hold(
        self, copying, monkeypatch, most
    ):
        """Metadata columns: position, no time, PostgreSQL's text of a null value."""
        monkeypatch.setattr("waldelta.snapshot.source_columns.MOST_EXPRESSIONS", most)
        table = copying(
            "create table t (id int primary key, n numeric(12,2), ts timestamptz)",
            "insert into t values (1, 1.50, '2020-01-01 00:00+00'), (2, 'NaN', 'infinity'), (3,"
            " null, null)",
            "create publication p for table t",
        )
        rows = {row["id"]: row for row in table.read().to_pylist()}
        assert {row["_wd_lsn"] for row in rows.values()} == {table.holder.lsn.value}
        assert {row["_wd_commit_ts"] for row in rows.values()} == {None}
        assert (rows[2]["n"], rows[2]["ts"]) == (None, None)
        assert dict(rows[2]["_wd_raw"]) == {"n": "NaN", "ts": "infinity"}
        assert (rows[1]["_wd_raw"], rows[3]["_wd_raw"]) == (None, None)


class TestSnapshotLost:
    FILL = (
        "create table t (id int primary key, v text, w text)",
        "insert into t select g, repeat('x', 900) from generate_series(1, 100) g",
        "create publication p for table t",
    )

    @pytest.mark.parametrize(
        "statement",
        [
            "truncate t", "vacuum full t", "cluster t using t_pkey",
            "alter table t alter id type bigint",
            "alter table t add x timestamptz default clock_timestamp()",
            "alter table t set unlogged", "alter table t rename v to v2", "alter table t drop v",
            "alter table t rename to t2", "drop table t",
        ],
    )  # fmt: skip
    def test_rewritten_altered_or_dropped_table(self, database, copying, statement):
        """A rewrite would leave the snapshot an empty or changed table without a word."""
        table = copying(*self.FILL, bytes_per_chunk=4 * 8192)
        assert len(table.chunks) > 2
        assert table.rows(table.chunks[:1])
        if "unlogged" in statement:
            database.execute("drop publication p")
        database.execute(statement)
        with pytest.raises(SnapshotLost, match=r"(starts|run) again"):
            table.rows(table.chunks[1:])

    @pytest.mark.parametrize(
        "statement", ["alter table t add x int", "create index on t (v)", "vacuum t", "analyze t"]
    )
    def test_harmless_commands_go_unnoticed(self, database, copying, statement):
        """What rewrites nothing disturbs nothing."""
        table = copying(*self.FILL)
        database.execute(statement)
        assert len(table.rows()) == 100

    def test_truncate_while_a_chunk_is_read_waits_for_it(self, database, copying):
        """A chunk's lock is held until it is read to its end, and not a moment longer."""
        table = copying(*self.FILL, bytes_per_chunk=4 * 8192)
        reading = read_chunks(table.conninfo, table.copy, table.chunks, "waldelta copy test")
        next(reading)
        with (
            database.connect(options="-c lock_timeout=1ms") as ddl,
            pytest.raises(Exception, match="lock timeout"),
        ):
            ddl.execute("truncate t")
        rest = sum(batch.num_rows for batch in reading)
        assert rest > 0
        database.execute("set lock_timeout = '1s'")
        database.execute("truncate t")

    @pytest.mark.parametrize("whole", [False, True], ids=["by chunks", "by a condition"])
    def test_a_lock_that_stays_is_waited_for_no_longer_than_so(
        self, database, copying, monkeypatch, whole
    ):
        """Whoever waits keeps the snapshot, and vacuum, waiting; who is in the way is named."""
        monkeypatch.setattr("waldelta.snapshot.read_table.COPY_LOCK_TIMEOUT_MS", 50)
        table = copying(
            "create table t (id int primary key) partition by range (id)",
            "create table t1 partition of t for values from (0) to (100)",
            "create publication p for table t with (publish_via_partition_root = true)",
        )
        choice = whole_table(table.table, "true", table.copy.relfilenodes)
        # Without the limit, its end lets the reader through.
        options = {
            "options": "-c idle_in_transaction_session_timeout=10s",
            "application_name": "vacuum-like",
        }
        with database.connect(**options) as locked:
            locked.execute("lock table t1 in access exclusive mode")
            with pytest.raises(
                TableBusy,
                match=r"can't be copied now: .* \(vacuum-like\) on public\.t1\): run again",
            ) as told:
                (
                    list(read_choices(table.conninfo, table.copy, [choice], "test"))
                    if whole
                    else table.rows()
                )
        assert told.value.retryable
        assert "\n" not in str(told.value)
        assert table.rows() == []

    def test_holder_killed(self, database, copying):
        """Without its holder a snapshot can't be imported any more."""
        table = copying(*self.FILL, bytes_per_chunk=4 * 8192)
        assert table.rows(table.chunks[:1])
        database.execute("select pg_terminate_backend(%s, 10000)", (table.holder.pid,))
        with pytest.raises(SnapshotLost, match=r"the snapshot of public\.t is gone"):
            table.rows(table.chunks[1:])

    def test_reader_killed(self, database, copying):
        """A broken connection is worth another try."""
        table = copying(*self.FILL, bytes_per_chunk=4 * 8192)
        reading = read_chunks(table.conninfo, table.copy, table.chunks, "waldelta copy test")
        next(reading)
        database.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name ="
            " 'waldelta copy test'"
        )
        with pytest.raises(SourceUnreachable) as caught:
            list(reading)
        assert caught.value.retryable


class TestThroughTheRoot:
    """SELECT on the partitioned table alone covers the partitions, read through that table."""

    TABLES = (
        "create table t (id int, v text) partition by range (id)",
        "create table t1 partition of t for values from (0) to (1000)",
        "create table t2 partition of t for values from (1000) to (2000) partition by list (id)",
        "create table t21 (gone int, v text, id int)",
        "alter table t21 drop column gone",
        "alter table t2 attach partition t21 default",
        "create table t3 partition of t for values from (2000) to (3000)",
        "insert into t select g, repeat('x', 500) from generate_series(1, 700) g",
        "insert into t select g, repeat('y', 500) from generate_series(1000, 1300) g",
    )
    ROOT = "create publication p for table t with (publish_via_partition_root = true)"

    @pytest.fixture
    def reading(self, database):
        """Open a snapshot and plan as this role; the server's superuser alone owns anything."""
        role = f"reader_{database.name}"
        database.execute(f"create role {role} login password 'p'")
        conninfo = database.server.conninfo(database.name, role, "p")
        opened = []

        def start(*statements, bytes_per_chunk=8 * 8192):
            for statement in (*self.TABLES, *statements):
                database.execute(statement.format(role=role))
            opened.append(SnapshotHolder(conninfo).__enter__())
            return Copying(SimpleNamespace(conninfo=conninfo), opened[-1], bytes_per_chunk)

        yield start
        for holder in opened:
            holder.__exit__(None, None, None)
        database.execute(f"drop owned by {role}; drop role {role}")

    def test_every_row_once_in_chunks_of_like_size(self, database, reading):
        """Partitions of several sizes, nested and empty; what is attached since isn't read."""
        waiting = "create table t4 as select g as id, 'old' as v from generate_series(3000, 3009) g"
        table = reading(self.ROOT, "grant select on t to {role}", waiting)
        assert len(table.chunks) > 4
        assert {(chunk.id.name, len(chunk.leaves)) for chunk in table.chunks} == {("t", 3)}
        database.execute("alter table t attach partition t4 for values from (3000) to (4000)")
        database.execute("insert into t values (1, 'new')")
        expected = [*range(1, 701), *range(1000, 1301)]
        assert sorted(table.read()["id"].to_pylist()) == expected
        parts = [table.read([chunk]).num_rows for chunk in table.chunks]
        assert sum(parts) == len(expected)
        assert max(parts) < len(expected) / 2

    @pytest.mark.parametrize(
        "change",
        ["truncate t3", "truncate t1", "alter table t detach partition t1", "vacuum full t21"],
    )
    def test_what_the_snapshot_does_not_show_any_more(self, database, reading, change):
        table = reading(self.ROOT, "grant select on t to {role}")
        database.execute(change)
        with pytest.raises(
            SnapshotLost,
            match=r"public\.t was truncated, rewritten or detached while its rows were read",
        ):
            table.rows()

    def test_a_partition_that_is_published_as_itself(self, database, reading):
        """PostgreSQL leaves the others alone, by their bounds; what may be read itself is."""
        table = reading("create publication p for table t1", "grant select on t to {role}")
        assert {chunk.id.name for chunk in table.chunks} == {"t"}
        assert sorted(table.read()["id"].to_pylist()) == [*range(1, 701)]
        bounds = "((id IS NOT NULL) AND (id >= 0) AND (id < 1000))"
        with connect(table.conninfo, "test") as conn:
            ((is_other, found),) = conn.execute(lock_query(table.copy, table.chunks[0])).fetchall()
            assert (is_other, found) == (False, bounds)
            plan = conn.execute(
                "explain " + chunk_query(table.copy, table.chunks[0], found)
            ).fetchall()
        assert "on t1" in str(plan)
        assert not re.search("on t(21|3)", str(plan))
        database.execute(f"grant select on t1 to reader_{database.name}")
        with connect(table.conninfo, "test") as conn:
            (own,) = read_published_tables(conn, ["p"])
        assert [leaf.through for leaf in own.leaves] == [None]

    def test_the_tables_owner_runs_nothing_as_the_reader(self, database, reading):
        """A key's expression calls functions, in the session of a role that reads other tables."""
        table = reading(
            "create table ran (by name)",
            "create function note() returns void language sql as 'insert into public.ran values"
            " (current_user)'",
            "create function key_of(int) returns int language plpgsql immutable as 'begin perform"
            " public.note(); return $1; end'",
            "create table e (id int) partition by list (key_of(id))",
            "create table e1 partition of e for values in (1)",
            "create table e2 partition of e for values in (2) partition by range (id)",
            "create table e22 partition of e2 default",
            "insert into e values (1), (2)",
            "create publication p for table e22",
            "grant select on e to {role}",
        )
        assert [(chunk.id.name, len(chunk.leaves)) for chunk in table.chunks] == [("e", 1)]
        # It would write, which a copy's transaction refuses.
        assert table.rows() == [(2,)]

    def test_the_lock_is_the_readers_own(self, database, reading):
        """Nobody may take the files away once they were looked at, without a lock of ours."""
        table = reading(self.ROOT, "grant select on t to {role}")
        with connect(table.conninfo, "test") as conn, conn.transaction():
            conn.execute(lock_query(table.copy, table.chunks[0]))
            locked = (
                "select relation::regclass::text from pg_locks where pid = %s and"
                " relation::regclass::text ~ '^t[0-9]+$'"
            )
            assert {"t1", "t21", "t3"} <= {
                name for (name,) in database.execute(locked, (conn.info.backend_pid,))
            }

    def test_grants_on_columns(self, database, reading):
        """Without ctid there is one chunk, without tableoid no way through the root."""
        table = reading(self.ROOT, "grant select (id, v, tableoid) on t to {role}")
        assert [(chunk.id.name, chunk.last_block) for chunk in table.chunks] == [("t", None)]
        assert len(table.rows()) == 1001
        database.execute(f"revoke select (tableoid) on t from reader_{database.name}")
        with connect(table.conninfo, "test") as conn:
            (none,) = read_published_tables(conn, ["p"])
        assert [(leaf.through, leaf.readable) for leaf in none.leaves] == [(None, False)] * 3
        database.execute(
            "create table u (id int primary key, v text); insert into u select id, v from t"
        )
        database.execute(
            f"grant select (id, v) on u to reader_{database.name}; alter publication p set table u"
        )
        with SnapshotHolder(table.conninfo) as holder:
            assert (
                len(Copying(SimpleNamespace(conninfo=table.conninfo), holder, 8192).rows()) == 1001
            )


class TestRefused:
    def plain_role(self, database, *grants):
        role = f"r_{database.name}"
        for grant in (
            f"create role {role} login password 'plainpw-42'",
            *(g.format(role=role) for g in grants),
        ):
            database.execute(grant)
        return role, database.server.conninfo(database.name, user=role, password="plainpw-42")

    @pytest.fixture
    def role(self, database):
        yield lambda *grants: self.plain_role(database, *grants)
        database.execute(f"drop owned by r_{database.name}")
        database.execute(f"drop role r_{database.name}")

    def test_row_level_security_raises_instead_of_hiding_rows(self, database, copying, role):
        """A policy that applies to the role stops the copy."""
        _, conninfo = role("create table t (id int primary key)", "grant select on t to {role}")
        table = copying(
            "insert into t values (1), (2)",
            "alter table t enable row level security",
            "create policy first_row on t using (id = 1)",
            "create publication p for table t",
        )
        with pytest.raises(PrivilegeMissing, match="bypassrls") as caught:
            table.read(conninfo=conninfo)
        assert "plainpw" not in str(caught.value)
        database.execute(f"alter role r_{database.name} bypassrls")
        assert table.read(conninfo=conninfo).num_rows == 2

    def test_missing_privilege_names_the_grant_and_published_columns_are_enough(
        self, database, copying, role
    ):
        """SELECT on the published columns suffices."""
        _, conninfo = role("create table t (id int primary key, v int, secret text)")
        table = copying(
            "insert into t values (1, 2, 's')", "create publication p for table t (id, v)"
        )
        with pytest.raises(PrivilegeMissing, match=r"public\.t can't be copied .*: grant select"):
            table.read(conninfo=conninfo)
        database.execute(f"grant select (id, v) on t to r_{database.name}")
        assert table.read(conninfo=conninfo).num_rows == 1


def test_chunk_query_text(database, conn):
    """The shape of what the server is asked."""
    database.execute("create table t (id int primary key, v text)")
    database.execute("create publication p for table t where (id > 5)")
    (table,) = read_published_tables(conn, ["p"])
    copy = plan_copy(table, "id", {}, None)
    leaf = type(table.leaves[0])(table.id, 1, 1, 3, 3 * 8192)
    queries = [
        chunk_query(copy, chunk).partition(" from ")[2] for chunk in plan_chunks([leaf], 8192)
    ]
    assert queries == [
        """only "public"."t" where ctid >= '(0,0)'::tid and ctid < '(1,0)'::tid and ((id > 5))""",
        """only "public"."t" where ctid >= '(1,0)'::tid and ctid < '(2,0)'::tid and ((id > 5))""",
        """only "public"."t" where ctid >= '(2,0)'::tid and ((id > 5))""",
    ]


@pytest.mark.parametrize(
    "raws, expected",
    [
        ({}, [None, None, None]),
        ({"a": [None, "NaN", None]}, [None, {"a": "NaN"}, None]),
        (
            {"a": ["NaN", None, "x"], "b": ["infinity", None, None]},
            [{"a": "NaN", "b": "infinity"}, None, {"a": "x"}],
        ),
    ],
)
def test_raw_map(raws, expected):
    """One map per row, only for rows that have something in it."""
    arrays = {name: pa.array(values, pa.string()) for name, values in raws.items()}
    rows = raw_map(arrays, 3).to_pylist()
    assert [None if row is None else dict(row) for row in rows] == expected

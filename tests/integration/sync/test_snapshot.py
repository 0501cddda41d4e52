"""When a snapshot may be taken and what keeps it alive; traps of real servers, harmless."""

import threading

import psycopg
import pytest

from tests.support.waiting import wait_until
from waldelta.errors import NotPrimary, SnapshotLost, SourceUnreachable, TransactionsStillOpen
from waldelta.lsn import Lsn
from waldelta.postgres import connect
from waldelta.postgres.server_position import WRITTEN_SQL
from waldelta.snapshot.exported_snapshot import (
    SnapshotHolder,
    reader_name,
    wait_for_old_transactions,
)


def visible(holder, query):
    return [row[0] for row in holder.connection.execute(query).fetchall()]


def is_alive(holder):
    """Whether readers can still import the snapshot."""
    try:
        return holder.connection.execute("select true").fetchone() == (True,)
    except psycopg.Error:
        return False


def decoded_inserts(execute, slot, publication):
    query = (
        f"select count(*) from pg_logical_slot_peek_binary_changes('{slot}', null, null,"
        f" 'proto_version', '1', 'publication_names', '{publication}') where get_byte(data, 0) ="
        " ascii('I')"
    )
    return execute(query)[0][0]


class TestOldTransactions:
    def test_nothing_open_returns_at_once(self, database, conn):
        """Transactions without an xid of their own (readers) don't count."""
        with database.connect() as reader:
            reader.execute("select 1")
            wait_for_old_transactions(conn, 0)

    def test_returns_when_the_last_old_one_ends_and_ignores_newer_ones(self, database, conn):
        """Only transactions open at the call are waited for."""
        database.execute("create table t (id int)")
        old, newer = database.connect(), database.connect()
        old.execute("insert into t values (1)")
        pauses = []

        def sleep(seconds):
            pauses.append(seconds)
            newer.execute("insert into t values (2)")
            if len(pauses) == 2:
                old.commit()

        wait_for_old_transactions(conn, 60, sleep=sleep)
        assert len(pauses) == 2
        newer.close()
        old.close()

    def test_timeout_names_pid_and_gid(self, database, conn):
        """Whoever is on call reads which session or prepared transaction to end."""
        database.execute("create table t (id int)")
        with database.connect(application_name="nightly job") as session:
            session.execute("insert into t values (1)")
            prepared = database.connect()
            prepared.execute("begin")
            prepared.execute("insert into t values (2)")
            prepared.execute("prepare transaction 'left behind'")
            prepared.close()
            try:
                with pytest.raises(TransactionsStillOpen) as caught:
                    wait_for_old_transactions(conn, 0)
                assert caught.value.retryable
                text = str(caught.value)
                assert f"pid {session.info.backend_pid} (nightly job) since 2" in text
                assert "prepared transaction 'left behind' since 2" in text
            finally:
                database.execute("rollback prepared 'left behind'")
            session.rollback()
        wait_for_old_transactions(conn, 0)


def test_commit_that_waits_for_a_synchronous_standby(new_server):
    """It is decoded already, but no snapshot sees it: the snapshot waits until it does."""
    with new_server() as server:
        conninfo = server.conninfo()
        with connect(conninfo, "waldelta sync") as conn:
            conn.execute("set synchronous_commit = local")
            conn.execute("create table public.a (id int primary key)")
            conn.execute("create publication pa for table public.a")
            conn.execute("select pg_create_logical_replication_slot('ra', 'pgoutput')")
            conn.execute("alter system set synchronous_standby_names = 'nobody'")
            conn.execute("select pg_reload_conf()")
            wait_until(
                lambda: conn.execute("show synchronous_standby_names").fetchone() == ("nobody",)
            )
            waiting = connect(conninfo, "waiting writer")
            thread = threading.Thread(
                target=lambda: waiting.execute("insert into public.a values (1)")
            )
            thread.start()
            pid = waiting.info.backend_pid
            event = "select wait_event from pg_stat_activity where pid = %s"
            wait_until(lambda: conn.execute(event, (pid,)).fetchone() == ("SyncRep",))

            def execute(query):
                return conn.execute(query).fetchall()

            assert decoded_inserts(execute, "ra", "pa") == 1
            with SnapshotHolder(conninfo) as early:
                assert visible(early, "select id from public.a") == []
            with pytest.raises(TransactionsStillOpen, match=f"pid {pid} .waiting writer."):
                wait_for_old_transactions(conn, 0)
            wait_for_old_transactions(
                conn, 60, sleep=lambda _: conn.execute("select pg_cancel_backend(%s)", (pid,))
            )
            with SnapshotHolder(conninfo) as holder:
                assert visible(holder, "select id from public.a") == [1]
            thread.join()
            waiting.close()
    server.delete()


class TestHolder:
    def test_snapshot_is_exported_and_closed(self, database):
        """It is named as pg_current_snapshot() names it; readers import it until it ends."""
        with SnapshotHolder(database.conninfo) as holder:
            assert holder.connection.execute("select pg_current_snapshot()::text").fetchone() == (
                holder.snapshot,
            )
            assert is_alive(holder)
            assert holder.lsn.value > 0
            with database.connect() as reader:
                reader.execute("begin isolation level repeatable read")
                reader.execute(f"set transaction snapshot '{holder.snapshot_id}'")
                assert reader.execute("select pg_current_snapshot()::text").fetchone() == (
                    holder.snapshot,
                )
        assert not is_alive(holder)

    def test_it_takes_no_xid_and_no_lock_on_tables(self, database):
        """Holding a snapshot writes nothing and blocks nobody's DDL."""
        database.execute("create table t (id int)")
        with SnapshotHolder(database.conninfo) as holder:
            held = (
                "select locktype from pg_locks where pid = %s and locktype in ('relation',"
                " 'transactionid')"
            )
            assert database.execute(held, (holder.pid,)) == []

    def test_survives_the_databases_timeouts(self, database):
        """idle_in_transaction_session_timeout and transaction_timeout never end the holder."""
        settings = ["idle_in_transaction_session_timeout", "statement_timeout"]
        if database.connection.info.server_version >= 170000:
            settings.append("transaction_timeout")
        for setting in settings:
            database.execute(f"alter database {database.name} set {setting} = '50ms'")
        with SnapshotHolder(database.conninfo) as holder:
            other = database.connect()
            other.execute("select 1")  # opens a transaction and idles in it
            gone = "select count(*) from pg_stat_activity where pid = %s"
            wait_until(lambda: database.execute(gone, (other.info.backend_pid,)) == [(0,)])
            assert is_alive(holder)
            other.close()

    def test_files_are_those_that_the_snapshot_sees(self, database):
        """A TRUNCATE between the snapshot and the look at the files doesn't go unnoticed."""
        database.execute("create table t (id int)")
        oid, before = database.execute(
            "select 't'::regclass::oid::bigint, pg_relation_filenode('t')::bigint"
        )[0]
        with SnapshotHolder(database.conninfo) as holder:
            database.execute("truncate t")
            assert holder.relfilenodes([oid]) == {oid: before}

    def test_end_of_its_session_is_named(self, database):
        """Whoever asks a dead holder learns that the copy must start again."""
        with SnapshotHolder(database.conninfo) as holder:
            database.execute("select pg_terminate_backend(%s, 10000)", (holder.pid,))
            with pytest.raises(SnapshotLost, match="ended"):
                holder.relfilenodes([1])
            assert not is_alive(holder)

    def test_readers_are_seen_at_work(self, database):
        """The server shows which tasks are reading, wherever they run."""
        with SnapshotHolder(database.conninfo) as holder:
            assert holder.active_tasks() == {}
            with (
                database.connect(application_name=reader_name(holder.pid, 3, "public.t")),
                database.connect(application_name=reader_name(holder.pid + 1, 4, "public.t")),
            ):
                assert holder.active_tasks() == {3: 0}
            wait_until(lambda: holder.active_tasks() == {})

    def test_refused_on_a_standby(self, new_server):
        """A standby's snapshots leave running transactions out."""
        server = new_server()
        with server:
            pass
        (server.data / "standby.signal").touch()
        with server, pytest.raises(NotPrimary, match="primary"), SnapshotHolder(server.conninfo()):
            pass


def test_password_is_in_no_error(database):
    """A refused connection names host and database only."""
    with pytest.raises(SourceUnreachable) as caught, SnapshotHolder(database.conninfo + " port=1"):
        pass
    assert psycopg.conninfo.conninfo_to_dict(database.conninfo)["password"] not in repr(
        caught.value
    )


# What a message's record has beside a long message, and how much of a page isn't its header.
OVERHEAD, USABLE = 55, 8192 - 24


@pytest.mark.parametrize("behind", [0, 8, 16, 24], ids="{} bytes on the page".format)
def test_where_the_last_record_ends(database, behind):
    """Records that end with a page, or behind the next one's header: PostgreSQL tells where."""
    for _ in range(20):  # others write, too
        ((start,),) = database.execute("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        length = (8192 - int(start) % 8192) + behind + USABLE - OVERHEAD
        ((end, written, segment_bytes),) = database.execute(
            f"select pg_logical_emit_message(false, 'p', repeat('x', %s))::text, {WRITTEN_SQL}",
            (length,),
        )
        insert = Lsn.parse(written)
        if insert.value % 8192 == 24 + behind and insert.value % segment_bytes > 8192:
            break
    assert (insert.value % 8192, Lsn.parse(end).value % 8192) == (
        24 + behind,
        24 + behind if behind else 0,
    )
    assert insert.of_record(segment_bytes) == Lsn.parse(end)


def test_where_the_last_record_of_a_file_ends(database):
    """Its rest counts as the record; the next one begins behind a longer header, yet unwritten."""
    ((written, segment_bytes),) = database.execute(f"select {WRITTEN_SQL} from pg_switch_wal()")
    assert Lsn.parse(written).value % segment_bytes == 40
    ends = str(Lsn.parse(written).of_record(segment_bytes))
    assert database.execute("select pg_current_wal_flush_lsn() >= %s::pg_lsn", (ends,)) == [(True,)]

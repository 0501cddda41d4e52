"""What a real server sends: every message of protocol version 1, read to its last byte."""

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from waldelta.config import Source
from waldelta.errors import PeekTimeout
from waldelta.pgoutput.envelope import Envelope
from waldelta.pgoutput.messages import read_logical_message, read_relation, read_truncate
from waldelta.pgoutput.rows import decode_rows
from waldelta.postgres import connect
from waldelta.postgres.connection import connect_arrow
from waldelta.postgres.server_position import read_position
from waldelta.slot.read.peek import PeekBound
from waldelta.slot.read.peek import peek as peek_slot

QUERY = """
    select (lsn - '0/0')::bigint as lsn, xid::text::bigint as xid, data
    from pg_logical_slot_peek_binary_changes(
        's', null, null, 'proto_version', '1', 'publication_names', 'p', 'messages', 'true'{more})
"""


@pytest.fixture
def published(any_database):
    """Table t (id, mood, long text), table u, publication p and slot s."""
    database = any_database
    database.execute("create type mood as enum ('sad', 'ok')")
    database.execute("create table t (id int primary key, m mood, big text)")
    database.execute("alter table t alter big set storage external")
    database.execute("create table u (id int primary key references t)")
    database.execute("create publication p for table t, u")
    database.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    return database


def peek(database, more="", batch_rows=3):
    """The slot's messages in small record batches, with their envelope."""
    (next_xid8,) = database.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")[
        0
    ]
    with connect_arrow(database.conninfo, "test") as connection, connection.cursor() as cursor:
        cursor.execute(QUERY.format(more=more))
        table = cursor.fetch_arrow_table().combine_chunks()
    envelope = Envelope(next_xid8)
    batches = [
        envelope.add(*(c for c in batch.columns))
        for batch in table.to_batches(max_chunksize=batch_rows)
    ]
    return pa.Table.from_batches(batches).combine_chunks()


def rows_of(table, relation_id, kinds="IUD"):
    wanted = pc.and_(
        pc.equal(table["relation_id"], relation_id), pc.is_in(table["kind"], pa.array(list(kinds)))
    )
    return table.filter(wanted)["data"].combine_chunks()


def message(table, kind):
    return [
        m
        for m, k in zip(table["data"].to_pylist(), table["kind"].to_pylist(), strict=True)
        if k == kind
    ]


def test_every_kind(published):
    """Inserts, updates, old keys, unchanged TOAST, deletes, TRUNCATE, types, messages."""
    run = published.execute
    run("insert into t values (1, 'ok', repeat('x', 10000)), (2, null, 'y')")
    run("update t set m = 'sad' where id = 1")
    run("update t set id = 3 where id = 1")
    run("delete from t where id = 2")
    run("select pg_logical_emit_message(true, 'in', 'a')")
    run("select pg_logical_emit_message(false, 'out', 'b')")
    run("truncate t restart identity cascade")
    run("alter table t replica identity full")
    run("insert into t values (9, 'sad', null)")
    run("delete from t")
    table = peek(published)
    kinds = [k for k in table["kind"].to_pylist() if k not in "BC"]
    assert {"Y", "R", "I", "U", "D", "M", "T"} == set(kinds)
    relation = read_relation(message(table, "R")[0])
    assert (relation.schema, relation.name, relation.replica_identity) == ("public", "t", "d")
    assert [(c.name, c.is_key) for c in relation.columns] == [
        ("id", True),
        ("m", False),
        ("big", False),
    ]
    assert message(table, "Y")[0].endswith(b"\0mood\0")
    assert len(read_truncate(message(table, "T")[0])) == 2
    assert {
        (m.prefix, m.content, m.is_transactional)
        for m in map(read_logical_message, message(table, "M"))
    } == {("in", b"a", True), ("out", b"b", False)}
    rows = decode_rows(rows_of(table, relation.relation_id), 3)
    assert bytes(rows.op) == b"IIUUDID"
    assert bytes(rows.old_kind).replace(b"\0", b" ") == b"   KK O"
    assert rows.new[0].to_pylist() == [b"1", b"2", b"1", b"3", None, b"9", None]
    assert rows.new[1].to_pylist() == [b"ok", None, b"sad", b"sad", None, b"sad", None]
    assert rows.new[2].to_pylist() == [b"x" * 10000, b"y", None, None, None, None, None]
    assert rows.unchanged[2].tolist() == [False, False, True, True, False, False, False]
    assert rows.old[0].to_pylist() == [None, None, None, b"1", b"2", None, b"9"]
    assert rows.old[1].to_pylist() == [None] * 6 + [b"sad"]


def test_transactions(published):
    """Every row has its commit's position and time and the top-level xid."""
    with connect(published.conninfo, "test") as connection, connection.transaction():
        xid = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()[0]
        connection.execute("insert into public.t values (1)")
        with connection.transaction():
            connection.execute("insert into public.t values (2)")
    published.execute("insert into t values (3)")
    rows = peek(published).to_pylist()
    first = [r for r in rows if r["xid8"] == xid]
    assert [r["kind"] for r in first if r["kind"] in "BIC"] == ["B", "I", "I", "C"]
    commit = next(r for r in first if r["kind"] == "C")
    assert {(r["commit_lsn"], r["commit_ts"]) for r in first} == {
        (commit["commit_lsn"], commit["commit_ts"])
    }
    assert commit["end_lsn"] == commit["lsn"] > commit["commit_lsn"]
    assert [r["end_lsn"] for r in first if r["kind"] != "C"] == [None] * (len(first) - 1)
    assert [r["seq"] for r in rows] == list(range(len(rows)))
    (now,) = published.execute("select now()")[0]
    assert 0 <= (now - commit["commit_ts"]).total_seconds() < 60
    assert len({r["xid8"] for r in rows}) == 2


def test_binary_format_is_recognised(published):
    """With option binary the values are bytes of another meaning, and are not read as text."""
    published.execute("insert into t values (7, 'ok', 'z')")
    table = peek(published, ", 'binary', 'true'")
    relation = read_relation(message(table, "R")[0])
    rows = decode_rows(rows_of(table, relation.relation_id), 3)
    assert (rows.new.format(0), rows.new.values(0).to_pylist()) == ("b", [b"\0\0\0\7"])
    assert rows.new.values(2).to_pylist() == [b"z"]


def test_a_bite_that_takes_too_long_is_named(published):
    """The driver reports it through Arrow, not by an error of its own."""
    published.execute(
        "insert into t select g, 'ok', repeat('x', 900) from generate_series(1, 50000) g"
    )
    document = {"conn_id": "c", "slot": "s", "publications": [{"name": "p", "manage": False}]}
    bound = PeekBound(read_position(published.connection).flush_lsn, None, 0.02, 1000)
    with pytest.raises(PeekTimeout, match="longer than the statement timeout"):
        list(peek_slot(published.conninfo, Source.model_validate(document), bound))

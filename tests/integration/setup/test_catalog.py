"""What catalog.py reads from a real server."""

import pytest
from psycopg.errors import LockNotAvailable

from waldelta.errors import SourceError
from waldelta.postgres import TableId
from waldelta.postgres.publication_checks import warn_of_refused_writes
from waldelta.postgres.published_tables import (
    _MEMBERSHIPS,
    MEMBERS,
    read_published_relations,
    read_published_tables,
)
from waldelta.postgres.type_catalog import fetch


def published(conn, *publications):
    """Reads both ways: all that is known of the tables, and their oids alone."""
    tables = {str(t.id): t for t in read_published_tables(conn, publications)}
    short = [
        (r.id, r.oid, r.relkind, r.ancestors) for r in read_published_relations(conn, publications)
    ]
    assert sorted(short) == [(t.id, t.oid, t.relkind, t.ancestors) for t in tables.values()]
    return tables


def test_plain_table(database, conn):
    """Columns in attnum order, the column list honoured, key and filter as published."""
    database.execute(
        'create table "Odd.Name" (a int, id int primary key, gone int, v numeric(10,2)[], hidden'
        ' text);alter table "Odd.Name" drop column gone;create publication p for table "Odd.Name"'
        " (a, id, v) where (id > 5) with (publish = 'insert, update')"
    )
    (table,) = published(conn, "p").values()
    assert str(table.id) == 'public."Odd.Name"'
    assert TableId.parse(str(table.id)) == table.id
    assert [(c.name, c.attnum, c.not_null) for c in table.columns] == [
        ("a", 1, False),
        ("id", 2, True),
        ("v", 4, False),
    ]
    assert table.key_columns == table.primary_key == table.identity_columns == ("id",)
    assert table.row_filter == "(id > 5)"
    assert table.publishes == {"insert", "update"}
    assert [leaf.oid for leaf in table.leaves] == [table.oid] == list(table.relation_ids)
    array = table.columns[2].type
    assert (array.kind, array.name) == ("array", "numeric(10,2)[]")
    assert (array.element.name, array.element.oid) == ("numeric(10,2)", 1700)


# Declared types: their kinds, innermost bases and elements.
TYPES = {
    "int4": ("base", None, None),
    "int2vector": ("base", None, None),
    "point": ("base", None, None),
    "mood": ("enum", None, None),
    "mood[]": ("array", None, "public.mood"),
    "outer_domain": ("domain", "numeric(5,1)", None),
    "tags": ("domain", "text[]", None),
    "pair": ("composite", None, None),
    "int4range": ("range", None, None),
    "int4multirange": ("multirange", None, None),
    "varchar(3)[]": ("array", None, "character varying(3)"),
}


def test_types(database, conn):
    """Kinds, domains down to their innermost base, arrays with their element."""
    columns = ", ".join(f"v{n} {declared}" for n, declared in enumerate(TYPES))
    database.execute(
        "create type mood as enum ('sad', 'ok'); create type pair as (a int, b text);"
        "create domain inner_domain as numeric(5,1); create domain outer_domain as inner_domain;"
        "create domain tags as text[];"
        f"create table t (id int primary key, {columns}); create publication p for table t"
    )
    types = [column.type for column in published(conn, "p")["public.t"].columns[1:]]
    found = [(t.kind, t.base and t.base.name, t.element and t.element.name) for t in types]
    assert dict(zip(TYPES, found, strict=True)) == TYPES


PARTITIONED = (
    "create table r (id int, k int, primary key (id, k)) partition by range (k);"
    "create table r1 partition of r for values from (0) to (10);"
    "create table r2 partition of r for values from (10) to (20) partition by range (k);"
    "create table r2a partition of r2 for values from (10) to (20);"
)


def test_partition_root(database, conn):
    """Published via root: the root, fed by its own oid, with all leaves down the tree."""
    database.execute(
        PARTITIONED + "create publication p for table r with (publish_via_partition_root)"
    )
    (table,) = published(conn, "p").values()
    assert (str(table.id), table.relkind, table.key_columns) == ("public.r", "p", ("id", "k"))
    assert [str(leaf.id) for leaf in table.leaves] == ["public.r1", "public.r2a"]
    assert all(leaf.relfilenode for leaf in table.leaves)
    assert table.relation_ids == (table.oid,)


def test_partition_leaves(database, conn):
    """Not published via root: each leaf is a table of its own."""
    database.execute(PARTITIONED + "create publication p for table r")
    assert sorted(published(conn, "p")) == ["public.r1", "public.r2a"]


def test_leaf_in_another_publication_counts_as_part_of_its_published_root(database, conn):
    """As in pgoutput, which publishes as the topmost ancestor."""
    database.execute(
        PARTITIONED
        + "create publication p for table r where (id > 1) with (publish_via_partition_root);"
        "create publication q for table r1 where (id > 2)"
    )
    tables = published(conn, "p", "q")
    assert list(tables) == ["public.r"]
    assert tables["public.r"].row_filter == "(id > 1)"
    assert list(published(conn, "q")) == ["public.r1"]


def test_filters_are_ored_whatever_is_published(database, conn):
    """A publication without a filter makes the others redundant."""
    database.execute(
        "create table t (id int primary key);"
        "create publication p for table t where (id > 5) with (publish = 'delete');"
        "create publication q for table t where (id < 2) with (publish = 'insert');"
        "create publication r for all tables"
    )
    both = published(conn, "p", "q")["public.t"]
    assert both.row_filter == "((id < 2)) OR ((id > 5))"
    assert both.publishes == {"insert", "delete"}
    assert published(conn, "p", "q", "r")["public.t"].row_filter is None


IDENTITIES = {
    "default": (("id",), ("id",)),
    "using index {}_u": (("u",), ("u",)),
    "full": (("id",), ("id", "u", "v")),
    "nothing": (("id",), ()),
}


def test_keys(database, conn):
    """The identity index where one is set, since old tuples carry nothing else."""
    for n, identity in enumerate(IDENTITIES):
        database.execute(
            f"create table t{n} (id int primary key, u int not null, v int); create unique index"
            f" t{n}_u on t{n} (u); alter table t{n} replica identity {identity.format(f't{n}')}"
        )
    database.execute("create publication p for table t0, t1, t2, t3")
    found = published(conn, "p")
    tables = [found[f"public.t{n}"] for n in range(len(IDENTITIES))]
    keys = [(table.key_columns, table.identity_columns) for table in tables]
    assert dict(zip(IDENTITIES, keys, strict=True)) == IDENTITIES


def test_deferrable_primary_key_is_no_replica_identity(database, conn):
    """PostgreSQL refuses UPDATE and DELETE of such a table once they are published."""
    database.execute(
        "create table t (id int primary key deferrable); create publication p for table t"
    )
    table = published(conn, "p")["public.t"]
    assert (table.identity_columns, table.key_columns) == ((), ())


def test_key_outside_the_column_list_is_no_key(database, conn):
    database.execute(
        "create table t (id int primary key, v int); create publication p for table t (v) with"
        " (publish = 'insert')"
    )
    assert published(conn, "p")["public.t"].key_columns == ()


def test_generated_columns_are_published_only_where_the_server_sends_them(any_database, any_conn):
    """15's view lists them, but they are never sent before 18, and then only by choice."""
    any_database.execute(
        "create table t (id int primary key, g int generated always as (id * 2) stored);"
        "create publication p for table t"
    )
    assert [c.name for c in published(any_conn, "p")["public.t"].columns] == ["id"]
    if any_conn.info.server_version >= 180000:
        any_database.execute("alter publication p set (publish_generated_columns = stored)")
        assert [c.name for c in published(any_conn, "p")["public.t"].columns] == ["id", "g"]


def test_no_column_and_some_are_different_column_lists(any_database, any_conn):
    """pgoutput refuses to decode them, although one publication alone would send no column."""
    any_database.execute(
        "create table t (g int generated always as (1) stored); create publication p for table t;"
        " create publication q for table t"
    )
    assert published(any_conn, "p", "q") == {}
    if any_conn.info.server_version >= 180000:
        any_database.execute("alter publication q set (publish_generated_columns = stored)")
        with pytest.raises(SourceError, match="different column lists"):
            published(any_conn, "p", "q")


def test_column_lists_that_do_not_count_do_not_clash(database, conn):
    """A leaf published as part of its root by one publication is decoded by that one alone."""
    database.execute(
        "create table r (id int primary key, v int) partition by range (id); create table r1"
        " partition of r default;create publication p for table r (id) with"
        " (publish_via_partition_root = true);create publication q for table r1 (id); create"
        " publication s for table r1"
    )
    tables = published(conn, "p", "q", "s")
    assert {name: [c.name for c in table.columns] for name, table in tables.items()} == {
        "public.r": ["id"]
    }
    with pytest.raises(SourceError, match="different column lists"):
        published(conn, "q", "s")


def test_no_publication(conn):
    assert published(conn, "absent") == {}


PUBLICATIONS = [
    "for all tables",
    "for all tables with (publish_via_partition_root)",
    "for tables in schema public",
    "for tables in schema public with (publish_via_partition_root)",
    "for tables in schema public, apart",
    "for tables in schema public, apart with (publish_via_partition_root)",
    "for tables in schema apart, table r, only plain where (id > 3)",
    (
        "for tables in schema apart, table r where (k > 0), r1 where (k < 0) with"
        " (publish_via_partition_root)"
    ),
    "for table r, only plain (id, v) where (id > 0), child, mixed",
    "for table r, r1, deep, mixed, apart.m2 with (publish_via_partition_root)",
    "for table r1, deep1 where (k > 30) with (publish = 'insert')",
    "for table apart.m1, mixed with (publish_via_partition_root)",
]


def test_what_is_published_is_what_postgresql_says(database, conn):
    """The catalogs are read without the view, which would lock each table."""
    database.execute(
        PARTITIONED
        + "create table if not exists plain (id int primary key, gone int, v int, w int generated"
        " always as (v + 1) stored);alter table plain drop column gone; create table child ()"
        " inherits (plain); create unlogged table u (id int);create view seen as select 1 as id;"
        " create materialized view kept as select 1 as id; create sequence counted;create table"
        " deep partition of r for values from (30) to (50) partition by range (k);create table"
        " deep1 partition of deep for values from (30) to (40);create schema apart; create table"
        " apart.alone (id int);create table mixed (id int, k int, primary key (id, k)) partition"
        " by range (k);create table apart.m1 partition of mixed for values from (0) to"
        " (10);create table apart.m2 partition of mixed for values from (10) to (20) partition by"
        " range (k);create table m21 partition of apart.m2 for values from (10) to (15);"
    )
    for n, clause in enumerate(PUBLICATIONS):
        database.execute(f"create publication p{n} {clause}")
    if conn.info.server_version >= 180000:
        database.execute(
            "create publication generated for all tables with (publish_generated_columns = stored)"
        )
    names = [name for (name,) in conn.execute("select pubname from pg_publication").fetchall()]
    told = conn.execute(
        "select pubname, schemaname, tablename, (select array_agg(a order by a) from"
        " unnest(attnames) a), rowfilter from pg_publication_tables order by 1, 2, 3"
    ).fetchall()
    rows = fetch(conn, _MEMBERSHIPS, {"publications": names, "locked": [], "oids": None})
    read = [(r.publication, r.schema, r.name, sorted(r.column_names), r.row_filter) for r in rows]
    assert sorted(read, key=lambda row: row[:3]) == [
        (*row[:3], [str(a) for a in row[3]], row[4]) for row in told
    ]
    members = conn.execute(
        MEMBERS
        + " select p.pubname, m.relid from member m join pg_publication p on p.oid = m.publication",
        {"publications": names},
    ).fetchall()
    assert len(members) == len(set(members)) == len(told)


def test_a_locked_table_bars_only_its_own_filter(database, conn):
    """Nothing else that is read takes a lock on any table."""
    database.execute(
        PARTITIONED
        + "create table t (id int primary key); create publication p for table t where (id > 0), r"
        " with (publish_via_partition_root)"
    )
    with database.connect() as locker:
        locker.execute("lock table t, r in access exclusive mode")
        conn.execute("set lock_timeout = '100ms'")
        with pytest.raises(LockNotAvailable):
            read_published_tables(conn, ["p"], sizes=False)
        (oid,) = conn.execute("select 'public.t'::regclass::oid::bigint").fetchone()
        found = {
            t.id.name: t.unread
            for t in read_published_tables(conn, ["p"], sizes=False, locked=[oid])
        }
        assert found == {"r": False, "t": True}
        assert {r.id.name for r in read_published_relations(conn, ["p"])} == {"r", "t"}
        assert warn_of_refused_writes(conn, ["p"]) == []
        locker.rollback()

"""The material of workloads: the tables of a source, and the statements that write backlogs to
them.

Statements are templates of ``str.format``. ``rows`` is the number of rows in the table before,
``changes`` that of the backlog's changes. ``transactions`` is the number of transactions of 100
changes, less one. ``newest`` limits the rows that it may touch, if not all.

Mixed backlogs update and delete rows that existed before (``_DRAWN``), and don't update a row that
they delete.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Tables, and their rows before any change."""

    create: str
    fill: str
    tables: tuple[str, ...]
    via_root: bool = False

    def statements(self, rows: int) -> tuple[str, ...]:
        """Returns the statements that create and fill it."""
        return self.create, self.fill.format(rows=rows), "analyze"


_COLUMNS = (
    "id bigint primary key, customer_id int, status text, amount numeric(12,2), note text,"
    " updated_at timestamptz"
)
_VALUES = "g % 1000, 'new', (g % 10000) / 100.0, 'note ' || g, now()"

ORDERS = Source(
    f"create table orders({_COLUMNS})",
    f"insert into orders select g, {_VALUES} from generate_series(1, {{rows}}) g",
    ("public.orders",),
)
# Every update includes its complete old row, so that a filter in Spark may use any column.
FULL_ORDERS = Source(
    f"{ORDERS.create}; alter table orders replica identity full", ORDERS.fill, ORDERS.tables
)

UUID_ORDERS = Source(
    ORDERS.create.replace("id bigint", "id uuid"),
    f"insert into orders select md5(g::text)::uuid, {_VALUES} from generate_series(1, {{rows}}) g",
    ORDERS.tables,
)


def partitioned(leaves: int) -> Source:
    """Returns the same table in this many hash partitions, published as one."""
    create = f"""
        create table orders({_COLUMNS}) partition by hash (id);
        do $$ begin for n in 0..{leaves - 1} loop
            execute format('create table orders_%s partition of orders for values
              with (modulus {leaves}, remainder %s)', n, n);
        end loop; end $$"""
    return Source(create, ORDERS.fill, ORDERS.tables, via_root=True)


def many(tables: int, large: int = 0) -> Source:
    """Returns this many small tables, orders_1 and so on.

    With ``large``, that many first tables are large, and all others have 1,000 rows.
    """
    names = tuple(f"public.orders_{n}" for n in range(1, tables + 1))
    create = ";".join(f"create table {name}({_COLUMNS})" for name in names)
    fill = ";".join(
        f"insert into {name} select g, {_VALUES} from generate_series(1,"
        f" {1000 if large and n >= large else '{rows}'}) g"
        for n, name in enumerate(names)
    )
    return Source(create, fill, names)


_WIDE = [(f"c{n}", ("int", "text", "numeric(12,2)", "timestamptz")[n % 4]) for n in range(1, 100)]
_WIDE_VALUES = {
    "int": "g % 1000",
    "text": "'note ' || g",
    "numeric(12,2)": "(g % 10000) / 100.0",
    "timestamptz": "now()",
}
WIDE = Source(
    "create table orders(id bigint primary key,"
    f" {', '.join(f'{name} {kind}' for name, kind in _WIDE)})",
    f"insert into orders select g, {', '.join(_WIDE_VALUES[kind] for _, kind in _WIDE)} from"
    " generate_series(1, {rows}) g",
    ("public.orders",),
)
# A value of 1 MB, stored uncompressed: compression would hide its cost.
_BODY = "repeat(md5(g::text), 32768)"
DOCUMENTS = Source(
    "create table documents(id bigint primary key, title text, body text);"
    " alter table documents alter column body set storage external",
    f"insert into documents select g, 'title ' || g, {_BODY} from generate_series(1, {{rows}}) g",
    ("public.documents",),
)


# The rows that a backlog will touch: half as many as it has changes, or all if there are fewer, in
# random order. The first ones, a tenth of the changes, are deleted. The others are updated, in
# groups of 40, again from the first group on if these don't suffice. They are drawn from the table,
# not computed, so that no row is hit that an earlier backlog deleted. No slot sees a temporary
# table.
_DRAWN = """
    perform set_config('work_mem', '512MB', true);
    drop table if exists drawn;
    create temp table drawn as
        select row_number() over () as n, id
          from (select id from (select id from orders {{newest}}) as among
            order by {scattered} limit {{changes}} / 2) as chosen;
    alter table drawn add primary key (n);
    groups := ((select count(*) from drawn) - {{changes}} / 10) / 40;
    commit;
    analyze drawn;"""
_SCATTERED = "hashint8extended(id, base)"


def newest(changes: int) -> str:
    """Returns ``newest`` for a backlog of this many changes that touches only the newest rows.

    It touches as many rows as this.
    """
    return f"order by id desc limit {changes // 2}"


def _mixed(
    insert: str,
    update: str,
    commit: str,
    base: str = "max(id)",
    key: str = "base + {}",
    scattered: str = _SCATTERED,
) -> str:
    """Returns half inserts, 40% updates, 10% deletes, a hundred at a time.

    ``key`` is the key of the new row of a number. A server logs every 15 seconds which transactions
    are running, and a slot uses that to know where the next call must begin. This writes in seconds
    a backlog that takes minutes in practice, so it logs them as often within one backlog, twenty
    times.
    """
    return f"""
do $$
declare
    base bigint := (select {base} from orders);
    groups bigint;
begin{_DRAWN.format(scattered=scattered)}
    for i in 0..{{transactions}} loop
        insert into orders select {key.format("i * 50 + g")}, {insert} from generate_series(1,
          50) g;
        update orders set {update} where id in
            (select id from drawn where n between {{changes}} / 10 + i % groups * 40 + 1
              and {{changes}} / 10 + i % groups * 40 + 40);
        delete from orders where id in (select id from drawn where n between i * 10 + 1
          and i * 10 + 10);
        {commit}
        if i % ({{transactions}} / 20 + 1) = 0 then perform pg_log_standby_snapshot(); end if;
    end loop;
end $$"""


_PAID = "status = 'paid', amount = amount + 1"
MIXED = _mixed(_VALUES, _PAID, "commit;")
ONE_TRANSACTION = _mixed(_VALUES, _PAID, "")
WIDE_MIXED = _mixed(
    ", ".join(_WIDE_VALUES[kind] for _, kind in _WIDE), "c1 = 'paid', c4 = c4 + 1", "commit;"
)
# Keys without any order, old and new, where other workloads' keys are 1, 2, 3. Each backlog adds
# rows, so none comes twice.
UUID_MIXED = _mixed(
    _VALUES,
    _PAID,
    "commit;",
    "count(*)",
    "md5(base || ' ' || {})::uuid",
    "uuid_hash_extended(id, base)",
)
INSERTS = f"""
do $$
declare base bigint := (select max(id) from orders);
begin
    for i in 0..{{transactions}} loop
        insert into orders select base + i * 100 + g, {_VALUES} from generate_series(1, 100) g;
        commit;
    end loop;
end $$"""
# Updates a thousand keys repeatedly.
HOT_UPDATES = """
do $$
begin
    for i in 0..{transactions} loop
        update orders set amount = amount + 1, updated_at = now() where id between i % 10 * 100 + 1
          and i % 10 * 100 + 100;
        commit;
    end loop;
end $$"""
# Each change is a transaction of its own.
TINY = f"""
do $$
declare
    base bigint := (select max(id) from orders);
    groups bigint;
    updated bigint := 0;
begin{_DRAWN.format(scattered=_SCATTERED)}
    for g in 1..{{changes}} loop
        if g % 10 < 5 then insert into orders values (base + g, {_VALUES});
        elsif g % 10 < 9 then
            update orders set {_PAID} where id = (select id from drawn
              where n = {{changes}} / 10 + updated % (groups * 40) + 1);
            updated := updated + 1;
        else delete from orders where id = (select id from drawn where n = (g + 1) / 10);
        end if;
        commit;
    end loop;
end $$"""
# Half inserts of a long value, 40% updates that keep it (PostgreSQL doesn't send it then), 10% that
# change it. Both kinds of updates go through the rows that existed before, in turn.
LONG_VALUES = f"""
do $$
declare base bigint := (select max(id) from documents);
begin
    for i in 0..{{changes}} / 10 - 1 loop
        insert into documents select base + i * 5 + g, 'title ' || g, {_BODY}
          from generate_series(1, 5) g;
        update documents set title = 'read' where id in (select 1 + (i * 5 + g) % base
          from generate_series(0, 3) g);
        update documents set body = body || 'more' where id = 1 + (i * 5 + 4) % base;
        commit;
    end loop;
end $$"""


def each_of(source: Source, changes: int) -> str:
    """Returns this many changes in each of the tables, one transaction per table."""
    one = """
        do $$ declare base bigint := (select max(id) from {table}); begin
            insert into {table} select base + g, {values} from generate_series(1, {inserts}) g;
            update {table} set {paid} where id <= {updates};
        end $$"""
    half = changes // 2
    statements = (
        one.format(table=table, values=_VALUES, paid=_PAID, inserts=half, updates=changes - half)
        for table in source.tables
    )
    return ";".join(statements)


def busy(tables: int) -> str:
    """Returns mixed changes of this many tables, a hundred at a time of the next table each.

    So their transactions alternate.
    """
    return f"""
do $$
declare
    transactions bigint := {{transactions}} / {tables} + 1;
    base bigint[];
    groups bigint[];
    deleted bigint := transactions * 10;
    t int;
    first bigint;
begin
    drop table if exists drawn;
    create temp table drawn(number int, n bigint, id bigint, primary key (number, n));
    for t in 1..{tables} loop
        execute format('select max(id) from orders_%s', t) into first;
        base[t] := first;
        execute replace('insert into drawn select $1, row_number() over (), id from
            (select id from orders_@ order by hashint8extended(id, $2) limit $3)
              as chosen', '@', t::text)
            using t, base[t], transactions * 50;
        groups[t] := ((select count(*) from drawn where number = t) - deleted) / 40;
    end loop;
    commit;
    analyze drawn;
    for i in 0..{{transactions}} loop
        t := i % {tables} + 1;
        execute replace($sql$insert into orders_@ select $1 + g, {_VALUES} from generate_series(1,
          50) g$sql$, '@', t::text)
            using base[t] + i / {tables} * 50;
        -- Of the rows drawn.
        first := deleted + i / {tables} % groups[t] * 40;
        execute replace($sql$update orders_@ set {_PAID} where id in
            (select id from drawn where number = $1 and n between $2 + 1 and $2 + 40)$sql$, '@',
              t::text) using t, first;
        first := i / {tables} * 10;
        execute replace($sql$delete from orders_@ where id in
            (select id from drawn where number = $1 and n between $2 + 1 and $2 + 10)$sql$, '@',
              t::text) using t, first;
        commit;
    end loop;
end $$"""

"""What the workloads are made of: the tables of a source, and the statements that write backlogs to them.

Statements are templates of ``str.format``: ``rows`` are the table's rows before, ``changes`` those of the backlog,
``transactions`` how many of 100 changes that makes, less one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Tables and the rows they hold before any change."""

    create: str
    fill: str
    tables: tuple[str, ...]
    via_root: bool = False

    def statements(self, rows: int) -> tuple[str, ...]:
        """What makes and fills it."""
        return self.create, self.fill.format(rows=rows), "analyze"


_COLUMNS = (
    "id bigint primary key, customer_id int, status text, amount numeric(12,2), note text, updated_at timestamptz"
)
_VALUES = "g % 1000, 'new', (g % 10000) / 100.0, 'note ' || g, now()"

ORDERS = Source(
    f"create table orders({_COLUMNS})",
    f"insert into orders select g, {_VALUES} from generate_series(1, {{rows}}) g",
    ("public.orders",),
)
# Every update brings its whole old row, so that a filter in Spark may be on any column.
FULL_ORDERS = Source(f"{ORDERS.create}; alter table orders replica identity full", ORDERS.fill, ORDERS.tables)


def partitioned(leaves: int) -> Source:
    """The same table in so many hash partitions, published as one."""
    create = f"""
        create table orders({_COLUMNS}) partition by hash (id);
        do $$ begin for n in 0..{leaves - 1} loop
            execute format('create table orders_%s partition of orders for values with (modulus {leaves}, remainder %s)', n, n);
        end loop; end $$"""
    return Source(create, ORDERS.fill, ORDERS.tables, via_root=True)


def many(tables: int) -> Source:
    """So many small tables, orders_1 and so on."""
    names = tuple(f"public.orders_{n}" for n in range(1, tables + 1))
    create = ";".join(f"create table {name}({_COLUMNS})" for name in names)
    fill = ";".join(f"insert into {name} select g, {_VALUES} from generate_series(1, {{rows}}) g" for name in names)
    return Source(create, fill, names)


_WIDE = [(f"c{n}", ("int", "text", "numeric(12,2)", "timestamptz")[n % 4]) for n in range(1, 100)]
_WIDE_VALUES = {
    "int": "g % 1000",
    "text": "'note ' || g",
    "numeric(12,2)": "(g % 10000) / 100.0",
    "timestamptz": "now()",
}
WIDE = Source(
    f"create table orders(id bigint primary key, {', '.join(f'{name} {kind}' for name, kind in _WIDE)})",
    f"insert into orders select g, {', '.join(_WIDE_VALUES[kind] for _, kind in _WIDE)} from generate_series(1, {{rows}}) g",
    ("public.orders",),
)
# A value of 1 MB, stored as it is: compression would hide what it costs to carry.
_BODY = "repeat(md5(g::text), 32768)"
DOCUMENTS = Source(
    "create table documents(id bigint primary key, title text, body text);"
    " alter table documents alter column body set storage external",
    f"insert into documents select g, 'title ' || g, {_BODY} from generate_series(1, {{rows}}) g",
    ("public.documents",),
)


def _mixed(insert: str, update: str, commit: str, table: str = "orders") -> str:
    """Half inserts, 40% updates, 10% deletes, a hundred at a time."""
    return f"""
do $$
declare base bigint := (select max(id) from {table});
begin
    for i in 0..{{transactions}} loop
        insert into {table} select base + i * 50 + g, {insert} from generate_series(1, 50) g;
        update {table} set {update} where id in
            (select {{first}} + ((i * 40 + g) * 7919::bigint) % {{among}} from generate_series(1, 40) g);
        delete from {table} where id between base + i * 50 + 1 and base + i * 50 + 10;
        {commit}
    end loop;
end $$"""


_PAID = "status = 'paid', amount = amount + 1"
MIXED = _mixed(_VALUES, _PAID, "commit;")
ONE_TRANSACTION = _mixed(_VALUES, _PAID, "")
WIDE_MIXED = _mixed(", ".join(_WIDE_VALUES[kind] for _, kind in _WIDE), "c1 = 'paid', c4 = c4 + 1", "commit;")
INSERTS = f"""
do $$
declare base bigint := (select max(id) from orders);
begin
    for i in 0..{{transactions}} loop
        insert into orders select base + i * 100 + g, {_VALUES} from generate_series(1, 100) g;
        commit;
    end loop;
end $$"""
# A thousand keys, over and over again.
HOT_UPDATES = """
do $$
begin
    for i in 0..{transactions} loop
        update orders set amount = amount + 1, updated_at = now() where id between i % 10 * 100 + 1 and i % 10 * 100 + 100;
        commit;
    end loop;
end $$"""
# Each change a transaction of its own.
TINY = f"""
do $$
declare base bigint := (select max(id) from orders);
begin
    for g in base + 1 .. base + {{changes}} loop
        if g % 10 < 5 then insert into orders values (g, {_VALUES});
        elsif g % 10 < 9 then update orders set {_PAID} where id = 1 + (g * 7919::bigint) % {{rows}};
        else delete from orders where id = g - 5;
        end if;
        commit;
    end loop;
end $$"""
# Half inserts of a long value, 40% updates that leave it as it is (PostgreSQL doesn't send it then), 10% that change it.
LONG_VALUES = f"""
do $$
declare base bigint := (select max(id) from documents);
begin
    for i in 0..{{changes}} / 10 - 1 loop
        insert into documents select base + i * 5 + g, 'title ' || g, {_BODY} from generate_series(1, 5) g;
        update documents set title = 'read' where id between base + i * 5 + 1 and base + i * 5 + 4;
        update documents set body = body || 'more' where id = base + i * 5 + 5;
        commit;
    end loop;
end $$"""


def each_of(source: Source, changes: int) -> str:
    """So many changes in each of the tables, a transaction for each."""
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

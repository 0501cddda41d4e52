"""Random transactions of DML and DDL on a few tables; the same seed writes the same statements."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg

# More than 64 kB of changes, the least logical_decoding_work_mem, in keys of its own.
LARGE_ROWS, LARGE_FROM = 300, 20_000
BIG = "(select string_agg(md5(({0})::text || i), '') from generate_series(1, 200) i)"


# What alter() chooses from. A native subscriber can do the first ones too, with the same rows.
FOLLOWED = ("add", "add default", "drop", "rename", "retype", "rewrite", "vacuum full")
KINDS = (*FOLLOWED, "add volatile", "add volatile, drop the default")


@dataclass
class Table:
    """A table; ``columns`` are those besides key, filter column and large text."""

    name: str
    columns: list[str] = field(default_factory=lambda: ["a", "b"])
    added: int = 0
    # Partitions of a partitioned table that are truncated in its place.
    leaves: tuple[str, ...] = ()


def create_tables(connection: psycopg.Connection, names: list[str]) -> None:
    """The tables as they are before any ALTER."""
    for name in names:
        connection.execute(
            f"create table {name}(id int, part int not null, a int, b text, big text, primary key"
            " (id, part))".encode()
        )
        connection.execute(f"alter table {name} alter column big set storage external".encode())


class Workload:
    """Writes to tables with the key ``id``, a column ``part`` to filter by, and a large text."""

    def __init__(
        self,
        connection: psycopg.Connection,
        seed: int,
        tables: list[str],
        kinds: tuple[str, ...] = KINDS,
        create: Callable[[psycopg.Connection, list[str]], None] = create_tables,
    ) -> None:
        self.random = random.Random(seed)
        self.connection, self.kinds = connection, kinds
        self.truncates, self.truncate_share = True, 0.15
        # How many transactions are larger than logical_decoding_work_mem.
        self.large_share = 0.0
        # Whoever shall have the same columns: gets each ALTER too.
        self.followers: list[psycopg.Connection] = []
        self.tables = [Table(name) for name in tables]
        # Those that the next transactions and ALTERs are about.
        self.chosen = self.tables
        create(connection, tables)

    def transaction(self) -> None:
        """One transaction of some statements; parts of it, or all of it, may be rolled back."""
        if self.large_share and self.random.random() < self.large_share:
            self.large_transaction()
            return
        with self.connection.transaction(force_rollback=self.random.random() < 0.1):
            for _ in range(self.random.randint(1, 6)):
                with self.connection.transaction(force_rollback=self.random.random() < 0.15):
                    for _ in range(self.random.randint(1, 3)):
                        with (
                            suppress(psycopg.errors.UniqueViolation),
                            self.connection.transaction(),
                        ):
                            self._statement(self.random.choice(self.chosen))

    def large_transaction(self) -> None:
        """A load behind savepoints that are released or rolled back, often as a whole."""
        table = self.random.choice(self.chosen).name
        rows = f"generate_series({LARGE_FROM}, {LARGE_FROM + LARGE_ROWS - 1}) g"
        with self.connection.transaction(force_rollback=self.random.random() < 0.7):
            for number in range(self.random.randint(1, 4)):
                with self.connection.transaction(force_rollback=self.random.random() < 0.4):
                    few = f"values ({LARGE_FROM - 1 - number}, {number}, 'in a savepoint')"
                    self._execute(
                        f"insert into {table}(id, part, big) {few} on conflict do nothing"
                    )
            big = f"select g, 1, repeat('x', 300) from {rows}"
            self._execute(f"insert into {table}(id, part, big) {big} on conflict do nothing")
            # What is committed leaves few of its rows behind.
            with self.connection.transaction(force_rollback=self.random.random() < 0.2):
                self._execute(f"delete from {table} where id >= {LARGE_FROM} and id % 50 <> 0")

    def alter(self) -> list[str]:
        """ALTER TABLE, each statement in a transaction of its own; what was executed."""
        table, kind = self.random.choice(self.chosen), self.random.choice(self.kinds)
        column = self.random.choice(table.columns) if table.columns else None
        table.added += 1
        new = f"n{table.added}"
        name = table.name
        statements = [
            f"alter table {name} {clause}" for clause in self._clauses(kind, name, column, new)
        ]
        if kind == "vacuum full":
            statements = [f"vacuum full {name}"]
        for statement in statements:
            self._execute(statement)
            for follower in self.followers:
                follower.execute(statement.encode())
        if kind in ("drop", "rename") and column:
            table.columns.remove(column)
        if kind.startswith("add") or (kind == "rename" and column):
            table.columns.append(new)
        return statements

    def _clauses(self, kind: str, table: str, column: str | None, new: str) -> list[str]:
        """What follows ALTER TABLE; nothing where there is no column to alter."""
        added = f"add column {new} int default (random() * 1000)::int"
        clauses = {
            "add": [f"add column {new} int"],
            "add default": [f"add column {new} text not null default 'd{new}'"],
            "add volatile": [added],
            "add volatile, drop the default": [added, f"alter column {new} drop default"],
        }
        if column is not None:
            clauses |= {
                "drop": [f"drop column {column}"],
                "rename": [f"rename column {column} to {new}"],
                "retype": [
                    f"alter column {column} type varchar(400) using left({column}::text, 400)"
                ],
                "rewrite": [
                    f"alter column {column} type {self._same_type_other_values(table, column)}"
                ],
            }
        return clauses.get(kind, [])

    def _same_type_other_values(self, table: str, column: str) -> str:
        query = (
            "select format_type(atttypid, atttypmod) from pg_attribute where attrelid ="
            " %s::regclass and attname = %s"
        )
        ((of,),) = self.connection.execute(query, (table, column)).fetchall()
        return f"{of} using {f'{column} + 1' if of == 'integer' else f'reverse({column})'}"

    def _statement(self, table: Table) -> None:
        low = self.random.randint(1, 200)
        high, part = low + self.random.randint(0, 8), self.random.randint(0, 3)
        values = {column: f"'{self.random.randint(0, 99)}'" for column in table.columns}
        chosen = self.random.choice(
            ["insert"] * 4 + ["update"] * 4 + ["big", "part", "key", "delete", "delete", "truncate"]
        )
        if chosen == "insert":
            names = "".join(f", {column}" for column in values)
            given = "".join(f", {value}" for value in values.values())
            big = BIG.format("g") if self.random.random() < 0.5 else "'small'"
            self._execute(
                f"insert into {table.name}(id, part, big{names}) select g, {part}, {big}{given} "
                f"from generate_series({low}, {high}) g on conflict do nothing"
            )
        elif chosen == "update" and values:
            column = self.random.choice(list(values))
            self._execute(
                f"update {table.name} set {column} = {values[column]} where id between {low} and"
                f" {high}"
            )
        elif chosen == "big":
            self._execute(
                f"update {table.name} set big = {BIG.format('id + 1')} where id between {low} and"
                f" {high}"
            )
        elif chosen == "part":
            self._execute(
                f"update {table.name} set part = part + 4 where id between {low} and {high} and"
                " part < 4"
            )
        elif chosen == "key":
            self._execute(
                f"update {table.name} set id = id + 1000 where id between {low} and {high} and not"
                f" exists (select from {table.name} o where o.id between {low + 1000} and"
                f" {high + 1000})"
            )
        elif chosen == "delete":
            self._execute(f"delete from {table.name} where id between {low} and {high}")
        elif chosen == "truncate" and self.truncates and self.random.random() < self.truncate_share:
            self._execute(
                f"truncate {self.random.choice(table.leaves) if table.leaves else table.name}"
            )

    def _execute(self, statement: str) -> None:
        self.connection.execute(statement.encode())

"""Random transactions of DML and DDL on a few tables; the same seed writes the same statements."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg

BIG = "(select string_agg(md5(({0})::text || i), '') from generate_series(1, 200) i)"


@dataclass
class Table:
    """A table as the workload knows it; ``columns`` are those besides key, filter column and large text."""

    name: str
    columns: list[str] = field(default_factory=lambda: ["a", "b"])
    added: int = 0


class Workload:
    """Writes to tables with a primary key ``id``, a column ``part`` that a row filter may name, and a TOASTed text."""

    def __init__(self, connection: psycopg.Connection, seed: int, tables: list[str], *, ddl: bool = True) -> None:
        self.random = random.Random(seed)
        self.connection, self.ddl = connection, ddl
        self.tables = [Table(name) for name in tables]
        for table in self.tables:
            self.connection.execute(
                f"create table {table.name}(id int, part int not null, a int, b text, big text,"
                f" primary key (id, part))".encode()
            )
            self.connection.execute(f"alter table {table.name} alter column big set storage external".encode())

    def transaction(self) -> None:
        """One transaction of some statements; parts of it, or all of it, may be rolled back."""
        with self.connection.transaction(force_rollback=self.random.random() < 0.1):
            for _ in range(self.random.randint(1, 6)):
                with self.connection.transaction(force_rollback=self.random.random() < 0.15):
                    for _ in range(self.random.randint(1, 3)):
                        with suppress(psycopg.errors.UniqueViolation), self.connection.transaction():
                            self._statement(self.random.choice(self.tables))

    def alter(self) -> str | None:
        """One ALTER TABLE in a transaction of its own; what it was."""
        table = self.random.choice(self.tables)
        kind = self.random.choice(["add", "add default", "add volatile", "drop", "rename", "retype"])
        column = self.random.choice(table.columns) if table.columns else None
        table.added += 1
        new = f"n{table.added}"
        if kind == "add":
            statement = f"add column {new} int"
        elif kind == "add default":
            statement = f"add column {new} text not null default 'd{table.added}'"
        elif kind == "add volatile":
            statement = f"add column {new} int default (random() * 1000)::int"
        elif column is None:
            return None
        elif kind == "drop":
            statement = f"drop column {column}"
        elif kind == "rename":
            statement = f"rename column {column} to {new}"
        else:
            statement = f"alter column {column} type varchar(400) using left({column}::text, 400)"
        self._execute(f"alter table {table.name} {statement}")
        if kind in ("drop", "rename"):
            table.columns.remove(column)
        if kind.startswith("add") or kind == "rename":
            table.columns.append(new)
        return f"{table.name} {statement}"

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
            self._execute(f"update {table.name} set {column} = {values[column]} where id between {low} and {high}")
        elif chosen == "big":
            self._execute(f"update {table.name} set big = {BIG.format('id + 1')} where id between {low} and {high}")
        elif chosen == "part":
            self._execute(f"update {table.name} set part = part + 4 where id between {low} and {high} and part < 4")
        elif chosen == "key":
            self._execute(f"update {table.name} set id = id + 1000 where id between {low} and {high} and not exists"
                          f" (select from {table.name} o where o.id between {low + 1000} and {high + 1000})")  # fmt: skip
        elif chosen == "delete":
            self._execute(f"delete from {table.name} where id between {low} and {high}")
        elif chosen == "truncate" and self.random.random() < 0.15:
            self._execute(f"truncate {table.name}")

    def _execute(self, statement: str) -> None:
        self.connection.execute(statement.encode())

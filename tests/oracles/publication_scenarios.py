"""Random scenarios of publications: a schema each, with tables, publications, changes and ALTER
PUBLICATIONs of its own.

Many of them share one slot, one subscription and one run, which is what makes them cheap. A
scenario depends on its own seed alone, so one that fails can be repeated by itself.

Whatever PostgreSQL's subscriber can't take stays out: it stops at an INSERT of a key that it still
holds. Such rows are left where an operation isn't published or a filter is altered; those scenarios
have no key, or never use one again.
"""

import random
from collections.abc import Iterator, Sequence

from tests.oracles.scenario import Scenario

COLUMNS = ("id", "p", "v", "w")
ALL = ("insert", "update", "delete", "truncate")
LAYOUTS = ("plain", "plain", "leaves", "nested")
LEAVES = {"plain": ("t",), "leaves": ("t_1", "t_2"), "nested": ("t_11", "t_12", "t_2")}
_KEY_FILTERS = (
    "p < {n}", "p <> {n}", "p in (0, {n})", "id % 3 = {k}", "id % 2 = 0", "id between {m} and 90",
    "p + id % 2 > {k}", "case when p > 1 then id % 2 = 0 else p = {k} end",
    "not (p = {n} or id > 40)", "(p, id) <> (1, {m})", "p is distinct from {n}",
)  # fmt: skip
_ROW_FILTERS = (
    "v = 'v{k}'", "v like 'n%'", "v is null", "v is distinct from 'u'", "length(v) > {k}",
    "coalesce(v, 'n') <> 'n'", "nullif(w, 'x') is null", "v || w = 'v1w'",
    "w in ('w', 'x') or p = {n}", "p > {k} and not (v like '%u')", "v <> w",
)  # fmt: skip


class RandomScenario:
    """One scenario; if ``exact``, nothing is ever missing, so keys may come again."""

    def __init__(self, seed: int) -> None:
        self.seed, self.pick = seed, random.Random(seed)
        pick = self.pick
        self.schema, self.layout = f"s{seed}", pick.choice(LAYOUTS)
        self.exact = pick.random() < 0.6
        self.identity = pick.choice(
            ("key", "index", "full", "none") if self.exact else ("key", "none", "none")
        )
        self.truncates = pick.random() < 0.5
        # One target of the leaves, where the subscriber has each.
        self.gathers = self.layout != "plain" and pick.random() < 0.35
        self.publications = [
            self._publication(n) for n in range(1 if self.gathers else pick.choice((1, 1, 2, 3)))
        ]
        via_root = [publication["via_root"] for publication in self.publications]
        self.listed = (
            self.identity in ("key", "index")
            and (self.layout == "plain" or all(via_root))
            and not any(publication["schema"] for publication in self.publications)
            and pick.random() < 0.4
        )
        self.leaf_truncates = self.layout != "plain" and not any(via_root)
        # Spark has the filters of a publication that sends all: each table's.
        self.in_spark = (
            self.exact and len(self.publications) == 1 and self._by_table() and pick.random() < 0.5
        )

    # --- what there is ---

    def ddl(self) -> str:
        """Schema, tables, partitions, replica identities."""
        key = {
            "key": ", primary key (id, p)",
            "index": ", primary key (id, p)",
            "full": ", primary key (id, p)",
        }
        split = "" if self.layout == "plain" else " partition by list (p)"
        lines = [
            f"create schema {self.schema}",
            f"create sequence {self.schema}.fresh start 1000",
            (
                f"create table {self.schema}.t(id int not null, p int not null, v text, w"
                f" text{key.get(self.identity, '')}){split}"
            ),
        ]
        tables = ["t"]
        if self.layout == "leaves":
            lines.append(
                f"create table {self.schema}.t_1 partition of {self.schema}.t for values in (0, 1)"
            )
        if self.layout == "nested":
            one = (
                f"create table {self.schema}.t_1 partition of {self.schema}.t for values in (0, 1)"
                " partition by list (p)"
            )
            lines += [
                one,
                *(
                    f"create table {self.schema}.t_1{n + 1} partition of {self.schema}.t_1 for"
                    f" values in ({n})"
                    for n in (0, 1)
                ),
            ]
            tables += ["t_1", "t_11", "t_12"]
        if self.layout != "plain":
            lines.append(f"create table {self.schema}.t_2 partition of {self.schema}.t default")
            tables += ["t_1", "t_2"] if self.layout == "leaves" else ["t_2"]
        if self.identity == "index":
            lines.append(f"create unique index t_i on {self.schema}.t (p, id)")
        for table in tables:
            if self.identity == "index":
                name = "t_i" if table == "t" else f"{table}_p_id_idx"
                lines.append(
                    f"alter table {self.schema}.{table} replica identity using index {name}"
                )
            elif self.identity != "key":
                lines.append(f"alter table {self.schema}.{table} replica identity full")
        return ";\n".join(lines) + ";\n"

    def before(self) -> str:
        """Rows that the copies find."""
        return (
            f"insert into {self.schema}.t select g, g % 4, 'v' || g % 3, case when g % 5 > 0 then"
            " 'w' end from generate_series(1, 40) g;\n"
        )

    def created(self, who: str) -> str:
        """CREATE PUBLICATION of the native subscriber (``native``) or the pipeline (``ours``)."""
        return "".join(
            f"create publication {self._name(who, n)} for {self._members(who, publication)} with"
            f" (publish = '{', '.join(publication['publish'])}', publish_via_partition_root ="
            f" {publication['via_root']});\n"
            for n, publication in enumerate(self.publications)
        )

    def names(self, who: str) -> list[str]:
        """The publications' names."""
        return [self._name(who, n) for n in range(len(self.publications))]

    def wheres(self) -> dict[str, str]:
        """The targets' own filters."""
        if not self.in_spark:
            return {}
        if self.gathers:
            (where,) = set(self.publications[0]["tables"].values())
            return {f"{self.schema}.t": where} if where else {}
        return {
            f"{self.schema}.{table}": where
            for table, where in self.publications[0]["tables"].items()
            if where
        }

    # --- what happens ---

    def transactions(self, count: int) -> Iterator[str]:
        """One statement each: blocks, some rolled back, and ALTER PUBLICATIONs between them."""
        for _ in range(count):
            if not self.exact and self.pick.random() < 0.15:
                yield from self._altered()
            blocks = "".join(self._block() for _ in range(self.pick.randint(1, 4)))
            undone = "raise exception 'undone';" if self.pick.random() < 0.1 else ""
            yield (
                f"do $do$ begin {blocks} {undone} exception when raise_exception then null; end"
                " $do$"
            )

    def _block(self) -> str:
        statements = "; ".join(self._statement() for _ in range(self.pick.randint(1, 3)))
        undone = "; raise exception 'undone'" if self.pick.random() < 0.15 else ""
        return (
            f"begin {statements}{undone}; exception when raise_exception or unique_violation then"
            " null; end;"
        )

    def _statement(self) -> str:
        pick, table = self.pick, self._table()
        if self.truncates and pick.random() < 0.03:
            leaf = (
                pick.choice(LEAVES[self.layout])
                if self.leaf_truncates and pick.random() < 0.5
                else "t"
            )
            return f"truncate {self.schema}.{leaf}"
        low, p, k = pick.randint(1, 50), pick.randint(0, 3), pick.randint(0, 2)
        chosen = f"id between {low} and {low + pick.randint(0, 6)}"
        if pick.random() < 0.3:
            chosen = f"id % 7 = {pick.randint(0, 6)} and p = {p}"
        number = "g" if self.exact else f"nextval('{self.schema}.fresh')"
        root = f"{self.schema}.t"
        inserts = [
            (f"insert into {root} select {number}, (g + {p}) % 4, 'n{k}', 'w' from"
             f" generate_series({low}, {low + 4}) g"),
            (f"insert into {root} select {number}, {p}, null, 'x' from generate_series({low},"
             f" {low + 1}) g"),
        ]  # fmt: skip
        changes = [
            f"update {table} set v = coalesce(v, 'n') || 'u' where {chosen}",
            f"update {table} set w = nullif('x', w), v = 'v{k}' where {chosen}",
            f"update {table} set v = null where {chosen}",
            f"delete from {table} where {chosen}",
        ]
        if self.exact or self.identity == "none":
            changes += [
                f"update {root} set p = (p + {p}) % 4 where {chosen}",
                f"update {root} set p = {p}, v = 'p{k}' where {chosen}",
                f"update {root} set id = id + 60 where {chosen}",
                f"update {root} set id = 61 - id, v = 'v{k}' where {chosen}",
            ]
        return pick.choice([*inserts, *changes])

    def _altered(self) -> Iterator[str]:
        number = self.pick.randrange(len(self.publications))
        publication = self.publications[number]
        if publication["schema"] or self.pick.random() < 0.3:
            if publication["covered"]:
                publication["publish"] = self._operations()
            change = f"set (publish = '{', '.join(publication['publish'])}')"
            yield f"alter publication {self._name('native', number)} {change}"
            return
        self._filter(publication)
        yield (
            f"alter publication {self._name('native', number)} set"
            f" {self._members('native', publication)}"
        )

    # --- how it is chosen ---

    def _publication(self, number: int) -> dict:
        publication: dict = {
            "via_root": self.layout != "plain" and self.pick.random() < 0.5 and not self.gathers
        }
        publication["schema"] = self.pick.random() < 0.12
        publication["publish"] = self._operations()
        publication["covered"] = (
            bool({"update", "delete"} & {*publication["publish"]}) or self.pick.random() < 0.5
        )
        tables = {
            "plain": ["t"],
            "leaves": ["t", "t_1", "t_2"],
            "nested": ["t", "t_1", "t_11", "t_12", "t_2"],
        }[self.layout]
        chosen = [t for t in tables if self.pick.random() < 0.6] or [self.pick.choice(tables)]
        publication["tables"] = dict.fromkeys(
            ["t"] if self.layout == "plain" or (not number and self.pick.random() < 0.5) else chosen
        )
        if self.gathers:
            publication["tables"] = dict.fromkeys(LEAVES[self.layout])
        self._filter(publication)
        return publication

    def _filter(self, publication: dict) -> None:
        """Give each table a filter; leaves that are gathered must have the same."""
        for table in publication["tables"]:
            publication["tables"][table] = self._where(publication, table)
        if self.gathers:
            publication["tables"] = dict.fromkeys(
                publication["tables"], publication["tables"]["t_2"]
            )

    def _operations(self) -> list[str]:
        if self.exact:
            return list(ALL if self.truncates else ALL[:3])
        return [o for o in ALL if self.pick.random() < 0.7] or ["insert"]

    def _where(self, publication: dict, table: str) -> str | None:
        partitioned = (table == "t" and self.layout != "plain") or (
            table == "t_1" and self.layout == "nested"
        )
        if self.pick.random() < 0.2 or (partitioned and not publication["via_root"]):
            return None
        # Without a key at the subscriber a row may enter and leave; with one it may not.
        whole_row = self.identity in ("full", "none") or (
            not publication["covered"] and self.identity == "key"
        )
        parts = []
        for _ in range(self.pick.choice((1, 1, 2))):
            template = self.pick.choice(
                _ROW_FILTERS if whole_row and self.pick.random() < 0.6 else _KEY_FILTERS
            )
            parts.append(
                template.format(
                    n=self.pick.randint(1, 3), k=self.pick.randint(0, 2), m=self.pick.randint(5, 30)
                )
            )
        return self.pick.choice((" and ", " or ")).join(f"({part})" for part in parts)

    def _by_table(self) -> bool:
        publication = self.publications[0]
        partitioned = (
            {"t"} if self.layout == "leaves" else {"t", "t_1"} if self.layout == "nested" else set()
        )
        # Through the root its filter alone counts; otherwise each leaf's own.
        if publication["via_root"]:
            return not publication["schema"] and [*publication["tables"]] == ["t"]
        return not publication["schema"] and not partitioned & {*publication["tables"]}

    def _members(self, who: str, publication: dict) -> str:
        if publication["schema"]:
            return f"tables in schema {self.schema}"
        columns = " (id, p, v)" if self.listed else ""
        filtered = not (self.in_spark and who == "ours")
        return ", ".join(
            f"table {self.schema}.{table}{columns}"
            + (f" where ({where})" if where and filtered else "")
            for table, where in publication["tables"].items()
        )

    def _name(self, who: str, number: int) -> str:
        return f"{self.schema}_{number}_{who if self.in_spark else 'native'}"

    def _table(self) -> str:
        return f"{self.schema}.{self.pick.choice(('t', 't', *LEAVES[self.layout]))}"


def together(scenarios: Sequence[RandomScenario]) -> Scenario:
    """All of them over one slot and one subscription."""
    ours = "".join(s.created("ours") for s in scenarios if s.in_spark)
    return Scenario(
        tables="".join(s.ddl() for s in scenarios),
        before="".join(s.before() for s in scenarios),
        create_publications="".join(s.created("native") for s in scenarios) + ours,
        publications=tuple(name for s in scenarios for name in s.names("native")),
        pipeline_publications=tuple(name for s in scenarios for name in s.names("ours")),
        wheres={table: where for s in scenarios for table, where in s.wheres().items()},
        gathered=tuple(f"{s.schema}.t" for s in scenarios if s.gathers),
    )

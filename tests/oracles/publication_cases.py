"""Tables in every way in which they can be published: the cross product that native subscription
and pipeline must agree on.

Replica identity x filter (none, in the publisher, in Spark) x layout (plain, partitions as
themselves, through the root) x column list. All have the columns id, part, v, w; filters let part <
4 through.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tests.oracles.scenario import Scenario

FILTER = "part < 4"
IDENTITIES = ("default", "index", "full", "none")
FILTERS = ("all rows", "publisher", "spark")
LAYOUTS = ("plain", "leaves", "root")


@dataclass(frozen=True)
class Case:
    """One table; ``listed``: with a column list, which leaves w out."""

    identity: str
    filter: str
    layout: str
    listed: bool

    @property
    def name(self) -> str:
        """The table's name."""
        parts = (
            self.identity,
            self.filter.split()[0],
            self.layout,
            *(["listed"] if self.listed else []),
        )
        return "_".join(parts)

    @property
    def members(self) -> list[str]:
        """What is published, and becomes a target each."""
        return [f"{self.name}_1", f"{self.name}_2"] if self.layout == "leaves" else [self.name]

    @property
    def columns(self) -> tuple[str, ...]:
        """The published columns."""
        return ("id", "part", "v") if self.listed else ("id", "part", "v", "w")

    def ddl(self) -> str:
        """The table with its partitions, its key and its replica identity."""
        key = {
            "default": ", primary key (id, part)",
            "index": ", primary key (id)",
            "full": ", primary key (id)",
        }
        split = "" if self.layout == "plain" else " partition by range (id)"
        lines = [
            (
                f"create table {self.name}(id int not null, part int not null, v text, w"
                f" text{key.get(self.identity, '')}){split}"
            )
        ]
        leaves = [self.name]
        if split:
            lines += [
                (
                    f"create table {self.name}_1 partition of {self.name} for values from"
                    " (minvalue) to (100)"
                ),
                f"create table {self.name}_2 partition of {self.name} default",
            ]
            leaves += [f"{self.name}_1", f"{self.name}_2"]
        for table in leaves:
            if self.identity == "index":
                if table == self.name:
                    lines.append(f"create unique index {table}_i on {table}(id, part)")
                index = f"{table}_i" if table == self.name else f"{table}_id_part_idx"
                lines.append(f"alter table {table} replica identity using index {index}")
            elif self.identity in ("full", "none"):
                lines.append(f"alter table {table} replica identity full")
        return ";\n".join(lines) + ";\n"

    def published(self, *, filtered: bool) -> Iterator[str]:
        """Its entries of a publication."""
        for member in self.members:
            columns = f" ({', '.join(self.columns)})" if self.listed else ""
            yield f"table {member}{columns}" + (f" where ({FILTER})" if filtered else "")


def all_cases() -> list[Case]:
    """All combinations but a column list beside REPLICA IDENTITY FULL."""
    found = [Case(*parts) for parts in product(IDENTITIES, FILTERS, LAYOUTS, (False, True))]
    return [case for case in found if not (case.listed and case.identity in ("full", "none"))]


# Every two of the four properties meet as PostgreSQL allows, with the fewest targets.
_SOME = (
    "default_publisher_plain", "default_all_leaves_listed", "default_spark_root_listed",
    "index_publisher_plain_listed", "index_spark_leaves", "index_all_root_listed",
    "full_all_plain", "full_publisher_leaves", "full_spark_root",
    "none_spark_plain", "none_all_leaves", "none_publisher_root",
)  # fmt: skip


def some_cases() -> list[Case]:
    """A few of them, in which every two of the four properties meet in every way."""
    return [case for case in all_cases() if case.name in _SOME]


def scenario(cases: Sequence[Case], before: str = "") -> Scenario:
    """All these tables at once, each in a publication of each side."""
    publications: dict[str, list[str]] = {}
    for case in cases:
        kind = "root" if case.layout == "root" else "leaves"
        filtered = case.filter != "all rows"
        publications.setdefault(f"native_{kind}", []).extend(case.published(filtered=filtered))
        publications.setdefault(f"ours_{kind}", []).extend(
            case.published(filtered=case.filter == "publisher")
        )
    created = ";\n".join(
        f"create publication {name} for {', '.join(entries)} with (publish_via_partition_root ="
        f" {name.endswith('root')})"
        for name, entries in publications.items()
    )
    return Scenario(
        tables="".join(case.ddl() for case in cases),
        publications=tuple(name for name in publications if name.startswith("native")),
        pipeline_publications=tuple(name for name in publications if name.startswith("ours")),
        create_publications=created,
        targets={f"public.{member}": case.columns for case in cases for member in case.members},
        wheres={
            f"public.{member}": FILTER
            for case in cases
            if case.filter == "spark"
            for member in case.members
        },
        before=before,
    )

"""The workloads as data: what is in the source, what is written to it, and which contenders take
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from benchmarks import sources
from benchmarks.sources import Source

# The contenders, in the order in which the table shows them. The first one of a workload is its raw
# baseline.
RECVLOGICAL, PEEK, COPY = "pg_recvlogical", "COPY of a peek", "COPY binary"
NATIVE, NAIVE = "native subscriber", "naive"
# Ours: one process for all stages on the warm server; a job for each stage on it; all stages in a
# fresh JVM.
WARM, TASKS, FRESH = "warm", "tasks", "fresh"
OWN_SYNC, DECODER, PEER, IDLE = "warm sync", "decoder", "pypgoutput", "idle"
BASELINES = (RECVLOGICAL, COPY, PEEK, PEER, OWN_SYNC, NATIVE, NAIVE)

STREAM = (PEEK, RECVLOGICAL, NATIVE)
MILLION = 1_000_000


@dataclass(frozen=True)
class Backlog:
    """Changes that are written before each round.

    ``clustered``: updates and deletes touch only the newest rows.
    """

    changes: int
    statement: str = sources.MIXED
    name: str = ""
    clustered: bool = False


@dataclass(frozen=True)
class Variant:
    """One more pipeline on the same source: parts of its file, its own publication's filter, and
    whether its lake is in an S3 server whose requests take 30 ms longer.
    """

    name: str = ""
    options: dict = field(default_factory=dict)
    target: dict = field(default_factory=dict)
    document: dict = field(default_factory=dict)
    publication_filter: str | None = None
    on_s3: bool = False


@dataclass(frozen=True)
class Workload:
    """The fields of every workload; ``default``: ``make bench`` without arguments measures it."""

    name: str
    about: str
    default: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Changes(Workload):
    """A table of this many rows, then backlogs that every contender applies."""

    rows: int
    backlogs: tuple[Backlog, ...]
    contenders: tuple[str, ...] = (*STREAM, WARM)
    source: Source = sources.ORDERS
    variants: tuple[Variant, ...] = (Variant(),)
    # Rows and changes aren't scaled where their number is the point of the workload.
    scalable: bool = True


@dataclass(frozen=True)
class Tables(Workload):
    """This many tables with few changes each; scaling removes tables."""

    tables: int
    rows: int
    changes: int
    contenders: tuple[str, ...] = (*STREAM, TASKS)


@dataclass(frozen=True)
class Sync(Workload):
    """The initial copy of a table."""

    rows: int
    contenders: tuple[str, ...] = (COPY, NATIVE, NAIVE, WARM, FRESH)


@dataclass(frozen=True)
class Estimate(Workload):
    """What check estimates for the initial copy of its tables, and that copy."""

    rows: int
    source: Source = sources.ORDERS
    contenders: tuple[str, ...] = (FRESH,)


@dataclass(frozen=True)
class Idle(Workload):
    """A run that finds nothing to do."""


@dataclass(frozen=True)
class Decode(Workload):
    """Messages in memory, decoded and cast on one core."""

    messages: int


@dataclass(frozen=True)
class Drift(Workload):
    """Another filter of the publication, compared with a copy of the whole table.

    Few rows enter, and as many leave.
    """

    rows: int
    moving: int


def _backlog(
    millions: int, *, clustered: bool, contenders: tuple[str, ...], default: bool = False
) -> Changes:
    keys = "clustered" if clustered else "random"
    return Changes(
        f"backlog-{millions}m-{keys}",
        f"1,000,000 changes into a table of {millions},000,000 rows; rows updated and deleted"
        f" {'are the newest' if clustered else 'lie all over'}",
        millions * MILLION,
        (Backlog(MILLION, clustered=clustered),),
        contenders,
        default=default,
    )


FULL_FILTER = "amount >= 0 and status <> 'nothing' and customer_id between 0 and 1000000"
WORKLOADS: tuple[Workload, ...] = (
    _backlog(1, clustered=False, contenders=(*STREAM, NAIVE, WARM, FRESH), default=True),
    _backlog(1, clustered=True, contenders=(*STREAM, WARM)),
    _backlog(10, clustered=False, contenders=(*STREAM, WARM)),
    _backlog(10, clustered=True, contenders=(*STREAM, WARM)),
    _backlog(50, clustered=False, contenders=(PEEK, RECVLOGICAL, WARM)),
    _backlog(50, clustered=True, contenders=(PEEK, RECVLOGICAL, WARM)),
    Sync("sync", "initial sync of 2,000,000 rows", 2 * MILLION, default=True),
    Changes(
        "small",
        "10,000 changes into 2,000,000 rows, a job for each stage",
        2 * MILLION,
        (Backlog(10_000),),
        (*STREAM, NAIVE, TASKS, FRESH),
        default=True,
    ),
    Changes(
        "small-vectors",
        "the same with and without deletion vectors",
        2 * MILLION,
        (Backlog(10_000),),
        (PEEK, RECVLOGICAL, TASKS),
        variants=(Variant(), Variant("deletion vectors", target={"deletion_vectors": True})),
    ),
    Changes("inserts", "1,000,000 inserts", MILLION, (Backlog(MILLION, sources.INSERTS),)),
    Changes(
        "hot-keys",
        "1,000,000 updates of 1,000 rows",
        MILLION,
        (Backlog(MILLION, sources.HOT_UPDATES),),
    ),
    Changes(
        "wide",
        "200,000 changes of rows with 100 columns",
        200_000,
        (Backlog(200_000, sources.WIDE_MIXED),),
        source=sources.WIDE,
    ),
    Changes(
        "toast",
        "1,000 changes of rows with a value of 1 MB",
        200,
        (Backlog(1_000, sources.LONG_VALUES),),
        source=sources.DOCUMENTS,
    ),
    Changes(
        "one-transaction",
        "1,000,000 changes as one transaction, and in transactions of 100",
        MILLION,
        (
            Backlog(MILLION, name="small transactions"),
            Backlog(MILLION, sources.ONE_TRANSACTION, "one transaction"),
        ),
    ),
    Changes(
        "tiny-transactions",
        "500,000 changes, each a transaction, and in transactions of 100",
        MILLION,
        (
            Backlog(500_000, name="small transactions"),
            Backlog(500_000, sources.TINY, "tiny transactions"),
        ),
    ),
    Changes(
        "store",
        "1,000,000 changes into 1,000,000 rows; the lake in a folder, and on S3 with 30 ms for each"
        " request",
        MILLION,
        (Backlog(MILLION),),
        (PEEK, RECVLOGICAL, WARM),
        variants=(Variant(), Variant("S3", on_s3=True)),
    ),
    Tables("tables-20", "20 tables with 50 changes each", 20, 1_000, 50, default=True),
    Tables("tables-200", "200 tables with 50 changes each", 200, 1_000, 50),
    Changes(
        "partitions",
        "500,000 changes of a table with 100 partitions, published as one",
        MILLION,
        (Backlog(500_000),),
        source=sources.partitioned(100),
    ),
    Changes(
        "where",
        "500,000 changes, with a filter of the target, of the publication, and without",
        MILLION,
        (Backlog(500_000),),
        variants=(
            Variant(),
            Variant(
                "target's filter",
                target={"tables": {"public.orders": {"where": "id > 0 and id < 1000000000"}}},
            ),
            Variant("publication's filter", publication_filter="id > 0 and id < 1000000000"),
        ),
    ),
    Changes(
        "where-full",
        "500,000 changes under REPLICA IDENTITY FULL, with a filter of the target on three columns,"
        " and without",
        MILLION,
        (Backlog(500_000),),
        source=sources.FULL_ORDERS,
        variants=(
            Variant(),
            Variant(
                "target's filter", target={"tables": {"public.orders": {"where": FULL_FILTER}}}
            ),
        ),
    ),
    Changes(
        "acknowledge",
        "500,000 changes, by way of moving the slot",
        MILLION,
        (Backlog(500_000),),
        (PEEK, RECVLOGICAL, WARM),
        variants=tuple(
            Variant(way, options={"acknowledge": way}) for way in ("get", "peek", "advance")
        ),
    ),
    Changes(
        "growth",
        "cost per change: 5,000,000 against 500,000 changes",
        MILLION,
        (Backlog(500_000, name="500,000"), Backlog(5 * MILLION, name="5,000,000")),
    ),
    Changes(
        "uuid-keys",
        "1,000,000 changes all over 1,000,000 rows whose key is a uuid without any order",
        MILLION,
        (Backlog(MILLION, sources.UUID_MIXED),),
        source=sources.UUID_ORDERS,
    ),
    Changes(
        "tables-busy",
        "1,000,000 changes of 200 tables in turn, ten of 200,000 rows, the others of 1,000",
        200_000,
        (Backlog(MILLION, sources.busy(200)),),
        source=sources.many(200, large=10),
    ),
    Estimate("estimate", "what check estimates for a sync, against that sync", 10 * MILLION),
    Estimate(
        "estimate-tables",
        "the same of 15 tables, three of 1,000,000 rows, the others of 1,000",
        MILLION,
        sources.many(15, large=3),
    ),
    Idle("idle", "a run that finds nothing to do", default=True),
    Decode("decode", "decoding and casting in memory, one core", MILLION),
    Drift("drift", "another filter of the publication, beside a new copy", 4 * MILLION, 10_000),
)


def chosen(only: Sequence[str], *, everything: bool = False) -> list[Workload]:
    """Returns the workloads whose names match one of these patterns.

    Without patterns, these are the default ones, or all. Raises ValueError with the name of a
    pattern that has no match.
    """
    if not only:
        return [workload for workload in WORKLOADS if everything or workload.default]
    names = [workload.name for workload in WORKLOADS]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f'no workload matches "{pattern}"; there are: {", ".join(names)}')
    return [
        workload
        for workload in WORKLOADS
        if any(fnmatchcase(workload.name, pattern) for pattern in only)
    ]


def scaled(number: int, scale: float, step: int = 100) -> int:
    """Returns a number of rows or changes at this scale, in whole steps and at least one."""
    return max(round(number * scale / step), 1) * step

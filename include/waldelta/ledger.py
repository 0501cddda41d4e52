"""The pipeline's memory: small append-only Delta tables under ``<root>/_waldelta``, written without a JVM.

``slot_moves`` says what was done to the slot, ``tables`` the state of each target's sync, ``batches`` the
consistent cuts, ``runs`` what each run did, ``gaps`` which changes the slot lost, ``bites`` what the server manages. Rows are
never changed; the latest one counts, and maintenance drops old ones that nothing depends on (``ledger_upkeep``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.lake import bookkeeping_uri
from waldelta.ledger_table import LedgerTable, Newest

_UTC = pa.timestamp("us", tz="UTC")


def now() -> datetime:
    """The present moment, as all ledger rows record it."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Something done to the slot, or about to be done (``intent``); ``lsn`` is where it moves to.

    ``promoted``: its server went on in another timeline, as a standby that became the primary; ``lsn`` is where the timeline
    left the one on which the slot had been read until then, so moves beyond that say nothing of the new one.

    ``incarnation`` names the slot's life: its position when that life began, numbered when an earlier life began at
    the same place. A slot dropped and recreated under the same name has another one.
    """

    at: datetime
    run_id: str
    event: str  # creating, created, adopted, intent, promoted, dropped
    slot: str
    system_identifier: str
    timeline: int
    incarnation: str
    lsn: int
    batch: int | None = None

    table: ClassVar[str] = "slot_moves"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", _UTC), ("run_id", pa.string()), ("event", pa.string()), ("slot", pa.string()),
            ("system_identifier", pa.string()), ("timeline", pa.int64()), ("incarnation", pa.string()),
            ("lsn", pa.int64()), ("batch", pa.int64()),
        ]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ColumnState:
    """A column of a target as it was when its sync began."""

    name: str
    type_oid: int
    typmod: int
    type_name: str
    spark_type: str
    not_null: bool
    # Names change, attribute numbers don't.
    attnum: int = 0


_COLUMN = pa.struct(
    [
        ("name", pa.string()), ("type_oid", pa.int64()), ("typmod", pa.int64()), ("type_name", pa.string()),
        ("spark_type", pa.string()), ("not_null", pa.bool_()), ("attnum", pa.int64()),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileState:
    """A leaf's file (pg_class.relfilenode): another one after anything that wrote the leaf anew, or emptied it.

    ``inherits`` tells one time that it was attached from another (see waldelta.present); None where that wasn't recorded.
    """

    oid: int
    relfilenode: int
    inherits: str | None = None


@dataclass(frozen=True, slots=True)
class AttributeState:
    """A column's row of pg_attribute, by what tells one version of it from another (see waldelta.rewrite)."""

    attnum: int
    xmin: int
    has_missing: bool = False
    default_oid: int | None = None


@dataclass(frozen=True, slots=True)
class LabelState:
    """What a column's values print that stands in the catalogs: an enum's label by its oid (see waldelta.present).

    Of a composite type, the type's oid and the numbers of its attributes.
    """

    attnum: int
    oid: int
    label: str


@dataclass(frozen=True, slots=True)
class StorageState:
    """How the source stored a table when its rows were last known to be what the stream told.

    ``as_of``: no transaction below this one (xid8) was running then; 0 where that wasn't recorded.
    """

    files: list[FileState] = field(default_factory=list)
    attributes: list[AttributeState] = field(default_factory=list)
    labels: list[LabelState] = field(default_factory=list)
    as_of: int = field(default=0, compare=False)


_STORAGE = pa.struct(
    [
        ("files", pa.list_(pa.struct([("oid", pa.int64()), ("relfilenode", pa.int64()), ("inherits", pa.string())]))),
        ("attributes", pa.list_(pa.struct([
            ("attnum", pa.int64()), ("xmin", pa.int64()), ("has_missing", pa.bool_()), ("default_oid", pa.int64()),
        ]))),
        ("labels", pa.list_(pa.struct([("attnum", pa.int64()), ("oid", pa.int64()), ("label", pa.string())]))),
        ("as_of", pa.int64()),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForeignCommit:
    """A commit of somebody else's that changed a target's data; ``by`` is the writer as far as the commit says."""

    version: int
    operation: str
    by: str
    at: datetime | None = None


_FOREIGN = pa.struct([("version", pa.int64()), ("operation", pa.string()), ("by", pa.string()), ("at", _UTC)])


@dataclass(frozen=True, slots=True)
class TableState:
    """A target's sync: which snapshot its copy was taken from, and what its columns were.

    ``status`` is copying, synced, failed, needs_sync or removed: no longer published, so that a copy
    would have to begin anew. What a table is due by it: waldelta.standing.
    ``incarnation`` is that of the slot whose changes come on top; it and ``storage`` are None in rows of versions that
    didn't record them.
    """

    at: datetime
    run_id: str
    table_name: str
    generation: int
    status: str
    snapshot: str = ""
    snapshot_lsn: int = 0
    relation_ids: list[int] = field(default_factory=list)
    key_columns: list[str] = field(default_factory=list)
    columns: list[ColumnState] = field(default_factory=list)
    row_filter: str | None = None
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    reason: str | None = None
    incarnation: str | None = None
    storage: StorageState | None = None
    # The target's own filter, as waldelta.target_filter writes it.
    target_filter: str | None = None
    # Filters that its publications have had since the copy; "true" lets everything through. The same twice: something else
    # held in between.
    later_filters: list[str] = field(default_factory=list)
    # The operations that its publications, taken together, published when it was copied.
    publishes: list[str] = field(default_factory=list)
    # Numbers of the columns that the table had when it was copied, or at a look since, and that weren't published.
    unpublished: list[int] = field(default_factory=list)
    # The table that feeds it, when that isn't the one of its name.
    fed_by: str | None = None
    # Of a target that gathers the leaves of a partitioned table: that table's oid; relation_ids are the leaves'.
    root_id: int | None = None
    # Leaves that came or went since the copy, which was told and left as it is.
    unmended_leaves: list[int] = field(default_factory=list)
    # What in its publications published it when that was last looked at (see waldelta.catalog.PublishedTable).
    entries: list[str] = field(default_factory=list)
    # The target's Delta version that the copy committed, or up to which its log was looked through when it was repaired.
    version: int | None = None
    # What others wrote to the target since the copy: the first such commit and the latest (see waldelta.foreign).
    foreign_commits: list[ForeignCommit] = field(default_factory=list)

    table: ClassVar[str] = "tables"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", _UTC), ("run_id", pa.string()), ("table_name", pa.string()), ("generation", pa.int64()),
            ("status", pa.string()), ("snapshot", pa.string()), ("snapshot_lsn", pa.int64()),
            ("relation_ids", pa.list_(pa.int64())), ("key_columns", pa.list_(pa.string())),
            ("columns", pa.list_(_COLUMN)), ("row_filter", pa.string()), ("rows", pa.int64()),
            ("bytes", pa.int64()), ("seconds", pa.float64()), ("reason", pa.string()),
            ("incarnation", pa.string()), ("storage", _STORAGE), ("target_filter", pa.string()),
            ("later_filters", pa.list_(pa.string())), ("publishes", pa.list_(pa.string())),
            ("unpublished", pa.list_(pa.int64())), ("fed_by", pa.string()), ("root_id", pa.int64()),
            ("unmended_leaves", pa.list_(pa.int64())), ("entries", pa.list_(pa.string())), ("version", pa.int64()),
            ("foreign_commits", pa.list_(_FOREIGN)),
        ]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TargetCut:
    """One target in a cut: the Delta version that holds exactly the batch, and what the batch did to it."""

    table_name: str
    generation: int
    version: int
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    skipped: int = 0
    truncated: bool = False
    # Rows that came without all of their values: completed from the source, or not in the target (see quarantine).
    reread: int = 0
    quarantined: int = 0
    # Rows written with a value that its column's type can't hold (in _wd_raw).
    verbatim: int = 0


_CUT = pa.struct(
    [
        ("table_name", pa.string()), ("generation", pa.int64()), ("version", pa.int64()),
        ("inserted", pa.int64()), ("updated", pa.int64()), ("deleted", pa.int64()), ("skipped", pa.int64()),
        ("truncated", pa.bool_()), ("reread", pa.int64()), ("quarantined", pa.int64()),
        ("verbatim", pa.int64()),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchCut:
    """A consistent cut: every target as of the end of one batch.

    ``expired``: it is older than versions of targets are kept, so that it mayn't be readable any more.
    """

    at: datetime
    run_id: str
    batch: int
    end_lsn: int
    commit_ts: datetime | None
    targets: list[TargetCut] = field(default_factory=list)
    expired: bool = False

    table: ClassVar[str] = "batches"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", _UTC), ("run_id", pa.string()), ("batch", pa.int64()), ("end_lsn", pa.int64()),
            ("commit_ts", _UTC), ("targets", pa.list_(_CUT)), ("expired", pa.bool_()),
        ]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One event in a run's life; ``result`` is the run's JSON result so far."""

    at: datetime
    run_id: str
    verb: str
    status: str  # running, succeeded, failed
    run_type: str = "manual"
    interval_start: datetime | None = None
    interval_end: datetime | None = None
    start_lsn: int | None = None
    end_lsn: int | None = None
    changes: int = 0
    seconds: float = 0.0
    result: str = "{}"
    # What pages show of thousands of runs without reading their results; None where a run, or its version, didn't record it.
    # All that the source had committed at ``as_of`` is part of what the run landed.
    as_of: datetime | None = None
    lag_before_bytes: int | None = None
    lag_bytes: int | None = None
    retained_bytes: int | None = None
    wal_status: str | None = None
    # Whether every target held all of it afterwards, whatever the run's checks found.
    applied: bool | None = None

    table: ClassVar[str] = "runs"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", _UTC), ("run_id", pa.string()), ("verb", pa.string()), ("status", pa.string()),
            ("run_type", pa.string()), ("interval_start", _UTC), ("interval_end", _UTC),
            ("start_lsn", pa.int64()), ("end_lsn", pa.int64()), ("changes", pa.int64()),
            ("seconds", pa.float64()), ("result", pa.string()), ("as_of", _UTC), ("lag_before_bytes", pa.int64()),
            ("lag_bytes", pa.int64()), ("retained_bytes", pa.int64()), ("wal_status", pa.string()),
            ("applied", pa.bool_()),
        ]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of the stream that the lake lacks and that this life of the slot no longer gives.

    ``from_lsn`` is the landed end, ``to_lsn`` where slot or server stood when it was found; None where the server's positions
    don't go on from ours. Closed, ``to_lsn`` is where the slot's next life began.
    """

    at: datetime
    run_id: str
    status: str  # open, closed
    slot: str
    system_identifier: str
    timeline: int
    incarnation: str
    from_lsn: int
    to_lsn: int | None
    cause: str  # the error's class
    detail: str
    remedy: str

    table: ClassVar[str] = "gaps"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", _UTC), ("run_id", pa.string()), ("status", pa.string()), ("slot", pa.string()),
            ("system_identifier", pa.string()), ("timeline", pa.int64()), ("incarnation", pa.string()),
            ("from_lsn", pa.int64()), ("to_lsn", pa.int64()), ("cause", pa.string()), ("detail", pa.string()),
            ("remedy", pa.string()),
        ]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeptBite:
    """A bite that isn't the pipeline file's, since the server didn't manage that; ``window_bytes`` None: it is again."""

    at: datetime
    run_id: str
    window_bytes: int | None
    timeout_s: int

    table: ClassVar[str] = "bites"
    schema: ClassVar[pa.Schema] = pa.schema(
        [("at", _UTC), ("run_id", pa.string()), ("window_bytes", pa.int64()), ("timeout_s", pa.int64())]
    )


Row = SlotMove | TableState | BatchCut | Run | Gap | KeptBite
R = TypeVar("R", SlotMove, TableState, BatchCut, Run, Gap, KeptBite)


class Ledger:
    """Reads and appends the bookkeeping tables of one lake; every append is durable when it returns.

    Rows of one table come in the order in which they were appended, not in that of anybody's clock.
    """

    def __init__(self, root: str, storage_options: dict[str, str] | None = None) -> None:
        self.root = root
        self._options = storage_options

    @property
    def storage_options(self) -> dict[str, str] | None:
        """Credentials of the object store, for other tables of the same lake."""
        return self._options

    def append(self, row: Row) -> None:
        """Add one row to its table, creating the table with the first."""
        self._table(type(row)).append(asdict(row))

    def append_state(self, row: TableState, after: TableState | None) -> TableState:
        """Add a target's row behind the one that it replaces (None: it is the target's first); returns it as it was written.

        Raises LateWriter, and adds nothing, when another run has written a row of this target meanwhile.
        """
        newest = Newest(after.at if after is not None else None, pc.field("table_name") == row.table_name)
        written = self._table(TableState).append(asdict(row), newest)
        return replace(row, at=written["at"])

    def append_cut(self, row: BatchCut, after: BatchCut | None) -> None:
        """Add a cut behind the one that was the newest (None: it is the first); raises LateWriter when that isn't so any more."""
        self._table(BatchCut).append(asdict(row), Newest(after.at if after is not None else None))

    def append_gap(self, row: Gap, after: Gap | None) -> None:
        """Add a gap's row behind the newest one of that life of the slot (None: it is the first).

        Raises LateWriter, and adds nothing, when another run has written one meanwhile.
        """
        life = (pc.field("slot") == row.slot) & (pc.field("incarnation") == row.incarnation)
        self._table(Gap).append(asdict(row), Newest(after.at if after is not None else None, life))

    def gaps(self, slot: str) -> list[Gap]:
        """All rows on gaps of a slot, oldest first."""
        return self._read(Gap, pc.field("slot") == slot)

    def slot_moves(self) -> list[SlotMove]:
        """All moves, oldest first."""
        return self._read(SlotMove)

    def last_move(self) -> SlotMove | None:
        """The newest row of any move."""
        return self._newest(SlotMove)

    def slot_lives(self) -> list[SlotMove]:
        """What was done to slots as a whole, oldest first: all events but ``intent``."""
        return self._read(SlotMove, pc.field("event") != "intent")

    def furthest_lsn(self, slot: str, incarnation: str) -> int:
        """The furthest position that this life of the slot was ever meant to move to; 0 when it has no row.

        Of moves on a timeline that the server has left since, only what the present one has in common with it counts.
        """
        life = (pc.field("slot") == slot) & (pc.field("incarnation") == incarnation)
        moves = self._read(SlotMove, life)
        left = [move for move in moves if move.event == "promoted"]
        return max(
            (
                min([move.lsn, *(m.lsn for m in left if m.timeline > move.timeline)])
                for move in moves
                if move.event != "promoted"
            ),
            default=0,
        )

    def last_bite(self) -> KeptBite | None:
        """The newest row on bites; None when the server always managed those of the pipeline file."""
        return self._newest(KeptBite)

    def table_states(self) -> dict[str, TableState]:
        """The latest state of each target, by table name."""
        return {state.table_name: state for state in self.table_rows()}

    def table_rows(self, table_name: str | None = None) -> list[TableState]:
        """All states of all targets, or of one, oldest first."""
        return self._read(TableState, None if table_name is None else pc.field("table_name") == table_name)

    def batches(self) -> list[BatchCut]:
        """All cuts, oldest first."""
        return self._read(BatchCut)

    def last_cut(self) -> BatchCut | None:
        """The newest cut."""
        return self._newest(BatchCut)

    def expire_cuts(self, before: datetime) -> int:
        """Mark the cuts from before a moment as expired, but for the newest one, which may be all there is; returns how many weren't yet."""
        return self._table(BatchCut).mark("expired", lambda at: pc.and_(pc.less(at, before), pc.less(at, pc.max(at))))

    def runs(self) -> list[Run]:
        """All events of runs, oldest first."""
        return self._read(Run)

    def last_run(self) -> Run | None:
        """The newest event of any run."""
        return self._newest(Run)

    def run_result(self, run_id: str, verb: str = "consume") -> Run | None:
        """The latest event of a run."""
        found = self._read(Run, (pc.field("run_id") == run_id) & (pc.field("verb") == verb))
        return found[-1] if found else None

    def prune(self, kind: type[R], keep: Callable[[Sequence[R]], Sequence[bool]]) -> int:
        """Drop the rows of one table that ``keep`` says no to; returns how many."""
        return self._table(kind).prune(lambda rows: keep([_build(kind, row) for row in rows]))

    def _read(self, kind: type[R], chosen: pc.Expression | None = None) -> list[R]:
        return [_build(kind, row) for row in self._table(kind).read(chosen)]

    def _newest(self, kind: type[R]) -> R | None:
        row = self._table(kind).newest()
        return _build(kind, row) if row is not None else None

    def _table(self, kind: type[Row]) -> LedgerTable:
        return LedgerTable(bookkeeping_uri(self.root, kind.table), kind.schema, self._options)


def _build(kind: type[R], row: dict[str, Any]) -> R:
    nested: dict[str, type[Any]] = {"columns": ColumnState, "targets": TargetCut, "foreign_commits": ForeignCommit}
    # A table written by an earlier version may lack a column that has a default.
    values = {f.name: row[f.name] for f in fields(kind) if f.name in row}
    for name, of in nested.items():
        if name in values:
            # So may a struct inside of one, whose field is null then.
            items = [{k: v for k, v in item.items() if v is not None} for item in values[name] or []]
            values[name] = [of(**item) for item in items]
    for name in ("later_filters", "publishes", "unpublished", "unmended_leaves", "entries"):
        if name in values:
            values[name] = values[name] or []
    if "expired" in values:
        values["expired"] = bool(values["expired"])
    if (storage := values.get("storage")) is not None:
        values["storage"] = StorageState(
            [FileState(**item) for item in storage["files"]],
            [AttributeState(**item) for item in storage["attributes"]],
            [LabelState(**item) for item in storage.get("labels") or ()],
            storage.get("as_of") or 0,
        )
    return kind(**values)

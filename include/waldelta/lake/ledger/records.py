"""The rows of the ledger's tables: a class for each kind, its fields are the table's columns.

Each table's Arrow schema, and the conversion of its stored values to rows, follow from the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

import pyarrow as pa

from waldelta.arrow import UTC_TIME
from waldelta.target_modes.modes import named_mode
from waldelta.target_modes.target_mode import TargetMode
from waldelta.types import TargetType, stored_type

# Values of a state's ``status``.
COPYING, SYNCED, FAILED, NEEDS_SYNC, REMOVED = (
    "copying",
    "synced",
    "failed",
    "needs_sync",
    "removed",
)
_ARROW_TYPES: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    bytes: pa.binary(),
    datetime: UTC_TIME,
    float: pa.float64(),
    int: pa.int64(),
    str: pa.string(),
}


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A row of the ledger table ``table``; ``at`` is when the run ``run_id`` wrote it."""

    at: datetime
    run_id: str

    table: ClassVar[str]
    # A run's row may have megabytes of JSON. With small row groups it is found in a file of
    # thousands without reading the others.
    rows_per_group: ClassVar[int] = 500
    # A table with more files is compacted: a read opens every file that may have matching rows, at
    # about a millisecond each.
    most_files: ClassVar[int] = 8


# The lake's tables and the meaning of their columns. A change of which an earlier lake would be
# read wrongly counts it up.
FORMAT = 4

R = TypeVar("R", bound=LedgerRow)
T = TypeVar("T")


@cache
def schema_of(kind: type[LedgerRow]) -> pa.Schema:
    """Returns the schema of a kind's table: a nullable column for each field, in their order."""
    return pa.schema([(name, _arrow_type(of)) for name, of in _types_of(kind).items()])


def row_of(kind: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Returns a row from a table's values; a null, or a column that is left out, is the default.

    The columns of a later version's table, and fields of its structs, are ignored. Raises TypeError
    when a column without a default is left out.
    """
    names, required, nested = _structure_of(kind)
    arguments = {
        name: value
        for name, value in values.items()
        if name in names and (value is not None or name in required)
    }
    for name, of in nested.items():
        if (value := arguments.get(name)) is not None:
            arguments[name] = (
                [row_of(of, item) for item in value]
                if isinstance(value, list)
                else row_of(of, value)
            )
    return kind(**arguments)


def rows_of(kind: Callable[..., T], rows: pa.Table) -> list[T]:
    """Returns the rows of an Arrow table, as row_of() does."""
    return [row_of(kind, values) for values in rows.to_pylist()]


def values_of(row: Any) -> dict[str, Any]:
    """Returns a row's values, as row_of() takes them.

    dataclasses.asdict() also copies each value, which takes most of its time.
    """
    return {name: _plain_value(getattr(row, name)) for name in row.__dataclass_fields__}


def _plain_value(value: Any) -> Any:
    if value is None or type(value) in _ARROW_TYPES:  # Most values of a long result are.
        return value
    if is_dataclass(value):
        return values_of(value)
    if isinstance(value, list | tuple):
        return list(map(_plain_value, value))
    if isinstance(value, dict):
        return {key: _plain_value(of) for key, of in value.items()}
    return value


@cache
def _structure_of(kind: Any) -> tuple[frozenset[str], frozenset[str], dict[str, Any]]:
    """Returns a class's fields, those of them without a default, and the classes of its structs."""
    types = _types_of(kind)
    required = (f.name for f in fields(kind) if f.default is f.default_factory is MISSING)
    structs = {name: _item_of(of) or of for name, of in types.items()}
    nested = {name: of for name, of in structs.items() if is_dataclass(of)}
    return frozenset(types), frozenset(required), nested


def _types_of(kind: Any) -> dict[str, Any]:
    """Returns each field's type, without None: every column may have nulls."""
    hints = get_type_hints(kind)
    types = {field.name: hints[field.name] for field in fields(kind)}
    return {n: get_args(of)[0] if isinstance(of, UnionType) else of for n, of in types.items()}


def _item_of(of: Any) -> Any:
    """Returns the type of a list's items; None for other types."""
    return get_args(of)[0] if get_origin(of) is list else None


def _arrow_type(of: Any) -> pa.DataType:
    if (item := _item_of(of)) is not None:
        return pa.list_(_arrow_type(item))
    if is_dataclass(of):
        return pa.struct([(name, _arrow_type(inner)) for name, inner in _types_of(of).items()])
    return _ARROW_TYPES[of]


def now() -> datetime:
    """Returns the current time, as all ledger rows record it."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class SlotMove(LedgerRow):
    """An event of the slot, done or about to be done (``intent``); ``lsn`` is where the slot moves
    to.

    ``promoted``: the slot's server continued on another timeline, as a standby that became the
    primary. ``lsn`` is where that timeline branched off, so moves beyond it don't apply to the new
    one.

    ``incarnation`` identifies the slot between its creation and its end: its position at the
    beginning, with a number when an earlier incarnation began at the same position. A slot that is
    dropped and recreated under the same name has another incarnation.

    ``compared_after``: the slot is moved before its changes were compared with what landed. The row
    ``compared`` records that comparison later.

    ``messages``: how many messages ``batch`` had in the change log when the slot was moved over it;
    None in rows of earlier versions. A change log with another number has lost some of them since.
    ``changes``: how many of them were changes of rows; None where that wasn't counted.

    ``format``: the FORMAT of the lake that the row was written to.
    """

    event: str  # creating, created, adopted, intent, compared, promoted, dropped
    slot: str
    system_identifier: str
    timeline: int
    incarnation: str
    lsn: int
    batch: int | None = None
    compared_after: bool = False
    messages: int | None = None
    changes: int | None = None
    format: int = FORMAT

    table: ClassVar[str] = "slot_moves"

    @property
    def is_begin(self) -> bool:
        """Returns whether an incarnation of the slot begins with this event."""
        return self.event in ("created", "adopted")


@dataclass(frozen=True, slots=True)
class ConsumedBatch:
    """The slot moves past one batch: the position that they moved to, and the batch's number of
    messages.
    """

    lsn: int
    messages: int | None


@dataclass(frozen=True, slots=True)
class RunLanding:
    """What all attempts at a run have landed: the WAL range, and the changes of each batch (None:
    not counted).
    """

    start_lsn: int
    end_lsn: int
    changes: dict[int, int | None]


@dataclass(frozen=True, slots=True)
class ColumnState:
    """A column of a target as it was when its sync began."""

    name: str
    type_oid: int
    typmod: int
    type_name: str
    # What the lake stores, as its TargetType.ledger_name.
    stored_type: str
    not_null: bool
    # Names change, but attribute numbers don't.
    attnum: int = 0
    # Whether it stays with its last values, because an operator refused a change of it.
    stopped: bool = False
    # The column's name on the source, where it has another one in the lake.
    source_name: str | None = None

    @property
    def name_on_source(self) -> str:
        """The column's name on the source."""
        return self.source_name or self.name

    @property
    def stored_as(self) -> TargetType:
        """The type of its stored values; what the source sends is read by column_types()."""
        return stored_type(self.stored_type)

    @property
    def spark_type(self) -> str:
        """The type of its stored values as Spark's DDL names it."""
        return self.stored_as.spark


@dataclass(frozen=True, slots=True)
class FileState:
    """A leaf's file (pg_class.relfilenode), which changes when the leaf is rewritten or truncated.

    ``inherits`` distinguishes one attachment of the leaf from another (see
    waldelta.pipeline.drift.catalog_state); None where that wasn't recorded.
    """

    oid: int
    relfilenode: int
    inherits: str | None = None


@dataclass(frozen=True, slots=True)
class AttributeState:
    """The parts of a column's pg_attribute row that distinguish one version of it from another.

    See waldelta.pipeline.drift.unsent_changes.
    """

    attnum: int
    xmin: int
    has_missing: bool = False
    default_oid: int | None = None
    # For pages, as they were when the rest was recorded; a change of them alone is none.
    name: str = field(default="", compare=False)
    comment: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LabelState:
    """Catalog texts that a column's values print: an enum's label, by its oid.

    For a composite type, the type's oid and its attributes' numbers. For regclass and its kind, the
    name of each object that a value may name, or, with many objects, a digest of all in a schema.
    See waldelta.pipeline.drift.catalog_state.
    """

    attnum: int
    oid: int
    label: str


@dataclass(frozen=True, slots=True)
class StorageState:
    """How the source stored a table when its rows last agreed with the stream.

    ``as_of``: no transaction below this one (xid8) was running then; 0 where that wasn't recorded.
    """

    files: list[FileState] = field(default_factory=list)
    attributes: list[AttributeState] = field(default_factory=list)
    labels: list[LabelState] = field(default_factory=list)
    as_of: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ExternalCommit:
    """A commit by an external writer that changed a target's data.

    ``by`` is the writer, as far as the commit names it.
    """

    version: int
    operation: str
    by: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class TableState(LedgerRow):
    """The state of a target's sync: the snapshot of its copy, and its columns.

    ``status`` is copying, synced, failed, needs_sync or removed. A removed table is no longer
    published, and would need a new copy. waldelta.pipeline.targets.lifecycle decides which action
    the status requires. ``incarnation`` is that of the slot whose changes are applied. It is None
    in rows of versions that didn't record it. Without a copy, ``storage`` has no files.
    """

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
    storage: StorageState = field(default_factory=StorageState)
    # The target's own filter, as waldelta.pipeline.targets.target_sources writes it.
    target_filter: str | None = None
    # Filters that its publications have had since the copy; "true" admits every row. The same one
    # twice means that another was in force in between.
    later_filters: list[str] = field(default_factory=list)
    # The operations that all its publications together published when it was copied.
    publishes: list[str] = field(default_factory=list)
    # Numbers of the columns that the table had, but weren't published, at the copy or at a later
    # check.
    unpublished: list[int] = field(default_factory=list)
    # The name of its source table, when that isn't the target's own name.
    source_table: str | None = None
    # For a target that merges partitions: the oid of the partitioned table. relation_ids are the
    # leaves'.
    root_id: int | None = None
    # Leaves that came or went since the copy, where the run only reported it.
    unrepaired_leaves: list[int] = field(default_factory=list)
    # What published the table, in its publications, at the last check (see
    # waldelta.postgres.catalog.PublishedTable).
    entries: list[str] = field(default_factory=list)
    # The target's Delta version that the copy committed, or up to which its log had been checked
    # when it was repaired.
    version: int | None = None
    # External commits since the copy: the first and the latest ones (see
    # waldelta.pipeline.targets.external_commits).
    external_commits: list[ExternalCommit] = field(default_factory=list)
    # The target's mode (see waldelta.target_modes), when it isn't a mirror.
    mode: str | None = None
    # Whether the target lacks rows on purpose (see waldelta.stages.sync.skipped_copy); None: no.
    copy_skipped: bool | None = None
    # The target's name in the lake, when that isn't its own name.
    stored_name: str | None = None

    table: ClassVar[str] = "tables"

    @property
    def target_mode(self) -> TargetMode:
        """The target's mode."""
        return named_mode(self.mode)


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows by what was done with them; ``truncated`` counts what truncated the target.

    For one cut or run, ``truncated`` is whether it did.
    """

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    skipped: int = 0
    truncated: int = 0
    # Rows that arrived without all of their values: completed from the source, or not in the target
    # (see quarantine).
    completed: int = 0
    quarantined: int = 0
    # Rows written with a value that its column's type can't hold (in _wd_raw).
    raw_rows: int = 0

    @property
    def written(self) -> int:
        """The number of rows written or removed."""
        return self.inserted + self.updated + self.deleted

    @property
    def changed(self) -> bool:
        """Whether any row of the target changed."""
        return bool(self.written or self.truncated)

    @property
    def touched(self) -> bool:
        """Whether any count isn't zero, even if no row of the target changed."""
        return any(getattr(self, count.name) for count in fields(RowCounts))

    def plus(self, other: RowCounts) -> Self:
        """Returns a copy of this object with the sums of its counts and ``other``'s."""
        sums = {}
        for count in fields(RowCounts):
            ours, theirs = getattr(self, count.name), getattr(other, count.name)
            # Whether a cut truncated the target stays a boolean, as its column in the ledger is.
            sums[count.name] = ours or theirs if isinstance(ours, bool) else ours + theirs
        return replace(self, **sums)


@dataclass(frozen=True)
class _NamedVersion:
    """A Delta version of one copy of a target."""

    table_name: str
    generation: int
    version: int


# The base classes are in this order because the columns of the last one come first.
@dataclass(frozen=True)
class TargetCut(RowCounts, _NamedVersion):
    """One target in a cut: the Delta version with exactly the batch's state, and the batch's
    changes.
    """

    truncated: bool = False
    # In a run's row: when the last of these changes was committed on the source; None where not
    # known.
    commit_ts: datetime | None = None

    def __add__(self, other: TargetCut) -> TargetCut:
        """Returns both effects on one target, at the later version."""
        times = (at for at in (self.commit_ts, other.commit_ts) if at is not None)
        return replace(
            self.plus(other),
            generation=max(self.generation, other.generation),
            version=max(self.version, other.version),
            commit_ts=max(times, default=None),
        )


@dataclass(frozen=True, slots=True)
class BatchCut(LedgerRow):
    """A consistent cut: every target as of the end of one batch.

    ``expired``: it is older than the retention of the targets' versions, so it may not be readable.
    """

    batch: int
    end_lsn: int
    commit_ts: datetime | None
    targets: list[TargetCut] = field(default_factory=list)
    expired: bool = False

    table: ClassVar[str] = "batches"

    def of(self, state: TableState) -> TargetCut | None:
        """Returns this copy of a target in the cut; None when it has none, or another copy's."""
        return next(
            (
                target
                for target in self.targets
                if target.table_name == state.table_name and target.generation == state.generation
            ),
            None,
        )


@dataclass(frozen=True, slots=True)
class Run(LedgerRow):
    """An event of a run; ``result`` is the run's JSON result so far."""

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
    # Pages show these columns of thousands of runs without reading the results. None where a run,
    # or its version, didn't record them. Everything that the source had committed at ``as_of`` is
    # part of what the run landed.
    as_of: datetime | None = None
    lag_before_bytes: int | None = None
    lag_bytes: int | None = None
    retained_bytes: int | None = None
    wal_status: str | None = None
    # Whether every target contained everything that had landed, whatever the run's checks found.
    applied: bool | None = None
    # When the attempt that wrote this row began, by Ledger.begin_run(); None in rows of earlier
    # versions.
    started_at: datetime | None = None
    # What this attempt did to targets, without what earlier attempts at the run recorded. So the
    # sum over all rows counts each change once. None in rows of earlier versions.
    targets: list[TargetCut] | None = None
    # How long the stages of a CDC run took; None for one that didn't run.
    land_seconds: float | None = None
    apply_seconds: float | None = None
    check_seconds: float | None = None

    table: ClassVar[str] = "runs"


@dataclass(frozen=True, slots=True)
class Gap(LedgerRow):
    """A range of changes that the lake lacks and that this slot incarnation can't return any more.

    ``from_lsn`` is the landed end. ``to_lsn`` is the position of the slot or server when the gap
    was found, and None where the server's positions don't continue ours. For a closed gap,
    ``to_lsn`` is where the next slot incarnation began.
    """

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


@dataclass(frozen=True, slots=True)
class ReadWindowSetting(LedgerRow):
    """A read window other than the pipeline file's, because the server couldn't manage that one.

    ``window_bytes`` None: the pipeline file's window works again.
    """

    window_bytes: int | None
    timeout_s: int

    table: ClassVar[str] = "read_windows"


@dataclass(frozen=True, slots=True)
class SlotReading:
    """The slot as a run saw it, for readers without access to the source; ``at`` is an ISO
    timestamp.

    ``lag_bytes`` is the WAL between the slot's confirmed position and the server's.
    ``safe_wal_size`` is how much WAL may still be written before the slot is in danger; None where
    the server sets no limit.
    """

    at: str
    wal_status: str | None
    lag_bytes: int
    retained_bytes: int
    safe_wal_size: int | None = None

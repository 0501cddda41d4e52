"""What the ledger's tables hold, a class for each kind of row, with its table and schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar, cast

import pyarrow as pa

from waldelta.arrow import UTC_TIME
from waldelta.config import TargetMode
from waldelta.config.target_mode import MIRROR

# A state's ``status`` in the ledger.
COPYING, SYNCED, FAILED, NEEDS_SYNC, REMOVED = (
    "copying",
    "synced",
    "failed",
    "needs_sync",
    "removed",
)


def now() -> datetime:
    """The present moment, as all ledger rows record it."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Something done to the slot, or about to be done (``intent``); ``lsn`` is where it moves to.

    ``promoted``: its server went on in another timeline, as a standby that became the primary;
    ``lsn`` is where the timeline left the one on which the slot had been read until then, so moves
    beyond that say nothing of the new one.

    ``incarnation`` names the slot's life: its position when that life began, numbered when an
    earlier life began at the same place. A slot dropped and recreated under the same name has
    another one.

    ``compared_after``: the slot forgets what this intent is about before it was compared with what
    has landed, which the row ``compared`` tells then.

    ``messages``: how many messages ``batch`` had in the change log when the slot was moved over it;
    None in rows of earlier versions. A change log that holds another number has lost some of them
    since.
    """

    at: datetime
    run_id: str
    event: str  # creating, created, adopted, intent, compared, promoted, dropped
    slot: str
    system_identifier: str
    timeline: int
    incarnation: str
    lsn: int
    batch: int | None = None
    compared_after: bool = False
    messages: int | None = None

    table: ClassVar[str] = "slot_moves"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", UTC_TIME),
            ("run_id", pa.string()),
            ("event", pa.string()),
            ("slot", pa.string()),
            ("system_identifier", pa.string()),
            ("timeline", pa.int64()),
            ("incarnation", pa.string()),
            ("lsn", pa.int64()),
            ("batch", pa.int64()),
            ("compared_after", pa.bool_()),
            ("messages", pa.int64()),
        ]
    )


@dataclass(frozen=True, slots=True)
class ConsumedBatch:
    """What slot moves say of one batch: where the slot was moved to over it, and how many messages
    it had.
    """

    lsn: int
    messages: int | None


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
        ("name", pa.string()),
        ("type_oid", pa.int64()),
        ("typmod", pa.int64()),
        ("type_name", pa.string()),
        ("spark_type", pa.string()),
        ("not_null", pa.bool_()),
        ("attnum", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class FileState:
    """A leaf's file (pg_class.relfilenode): another one after anything that wrote the leaf anew, or
    emptied it.

    ``inherits`` tells one time that it was attached from another (see
    waldelta.pipeline.drift.catalog_state); None where that wasn't recorded.
    """

    oid: int
    relfilenode: int
    inherits: str | None = None


@dataclass(frozen=True, slots=True)
class AttributeState:
    """A column's row of pg_attribute, by what tells one version of it from another (see
    waldelta.pipeline.drift.rewrites).
    """

    attnum: int
    xmin: int
    has_missing: bool = False
    default_oid: int | None = None


@dataclass(frozen=True, slots=True)
class LabelState:
    """What a column's values print that stands in the catalogs: an enum's label by its oid (see
    waldelta.pipeline.drift.catalog_state).

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
        (
            "files",
            pa.list_(
                pa.struct(
                    [("oid", pa.int64()), ("relfilenode", pa.int64()), ("inherits", pa.string())]
                )
            ),
        ),
        (
            "attributes",
            pa.list_(
                pa.struct(
                    [
                        ("attnum", pa.int64()),
                        ("xmin", pa.int64()),
                        ("has_missing", pa.bool_()),
                        ("default_oid", pa.int64()),
                    ]
                )
            ),
        ),
        (
            "labels",
            pa.list_(
                pa.struct([("attnum", pa.int64()), ("oid", pa.int64()), ("label", pa.string())])
            ),
        ),
        ("as_of", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class ExternalCommit:
    """A commit of somebody else's that changed a target's data; ``by`` is the writer as far as the
    commit says.
    """

    version: int
    operation: str
    by: str
    at: datetime | None = None


_EXTERNAL_COMMIT = pa.struct(
    [
        ("version", pa.int64()),
        ("operation", pa.string()),
        ("by", pa.string()),
        ("at", UTC_TIME),
    ]
)


@dataclass(frozen=True, slots=True)
class TableState:
    """A target's sync: which snapshot its copy was taken from, and what its columns were.

    ``status`` is copying, synced, failed, needs_sync or removed: no longer published, so that a
    copy would have to begin anew. What a table is due by it: waldelta.pipeline.targets.lifecycle.
    ``incarnation`` is that of the slot whose changes come on top; it and ``storage`` are None in
    rows of versions that didn't record them.
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
    # The target's own filter, as waldelta.pipeline.targets.target_filter writes it.
    target_filter: str | None = None
    # Filters that its publications have had since the copy; "true" lets everything through. The
    # same twice: something else held in between.
    later_filters: list[str] = field(default_factory=list)
    # The operations that its publications, taken together, published when it was copied.
    publishes: list[str] = field(default_factory=list)
    # Numbers of the columns that the table had when it was copied, or at a look since, and that
    # weren't published.
    unpublished: list[int] = field(default_factory=list)
    # The table that feeds it, when that isn't the one of its name.
    fed_by: str | None = None
    # Of a target that gathers the leaves of a partitioned table: that table's oid; relation_ids are
    # the leaves'.
    root_id: int | None = None
    # Leaves that came or went since the copy, which was told and left as it is.
    unmended_leaves: list[int] = field(default_factory=list)
    # What in its publications published it when that was last looked at (see
    # waldelta.postgres.catalog.PublishedTable).
    entries: list[str] = field(default_factory=list)
    # The target's Delta version that the copy committed, or up to which its log was looked through
    # when it was repaired.
    version: int | None = None
    # What others wrote to the target since the copy: the first such commit and the latest (see
    # waldelta.pipeline.targets.external_commits).
    foreign_commits: list[ExternalCommit] = field(default_factory=list)
    # What the target keeps (see waldelta.config.target_mode), when it isn't a mirror.
    mode: str | None = None
    # Whether the target lacks rows on purpose (see waldelta.stages.sync.skipped_copy); None: it
    # doesn't.
    copy_skipped: bool | None = None

    table: ClassVar[str] = "tables"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", UTC_TIME),
            ("run_id", pa.string()),
            ("table_name", pa.string()),
            ("generation", pa.int64()),
            ("status", pa.string()),
            ("snapshot", pa.string()),
            ("snapshot_lsn", pa.int64()),
            ("relation_ids", pa.list_(pa.int64())),
            ("key_columns", pa.list_(pa.string())),
            ("columns", pa.list_(_COLUMN)),
            ("row_filter", pa.string()),
            ("rows", pa.int64()),
            ("bytes", pa.int64()),
            ("seconds", pa.float64()),
            ("reason", pa.string()),
            ("incarnation", pa.string()),
            ("storage", _STORAGE),
            ("target_filter", pa.string()),
            ("later_filters", pa.list_(pa.string())),
            ("publishes", pa.list_(pa.string())),
            ("unpublished", pa.list_(pa.int64())),
            ("fed_by", pa.string()),
            ("root_id", pa.int64()),
            ("unmended_leaves", pa.list_(pa.int64())),
            ("entries", pa.list_(pa.string())),
            ("version", pa.int64()),
            ("foreign_commits", pa.list_(_EXTERNAL_COMMIT)),
            ("mode", pa.string()),
            ("copy_skipped", pa.bool_()),
        ]
    )

    @property
    def kept_as(self) -> TargetMode:
        """The target's mode."""
        return cast("TargetMode", self.mode or MIRROR)


@dataclass(frozen=True, slots=True)
class TargetCut:
    """One target in a cut: the Delta version that holds exactly the batch, and what the batch did
    to it.
    """

    table_name: str
    generation: int
    version: int
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    skipped: int = 0
    truncated: bool = False
    # Rows that came without all of their values: completed from the source, or not in the target
    # (see quarantine).
    reread: int = 0
    quarantined: int = 0
    # Rows written with a value that its column's type can't hold (in _wd_raw).
    verbatim: int = 0
    # In a run's row: when the last of these changes was committed on the source, None where that
    # isn't known.
    commit_ts: datetime | None = None

    @property
    def changed(self) -> bool:
        """Whether the batch changed any row of it."""
        return bool(self.inserted or self.updated or self.deleted or self.truncated)

    @property
    def touched(self) -> bool:
        """Whether the batch had anything for it, also where that changed no row."""
        return bool(
            self.changed or self.skipped or self.reread or self.quarantined or self.verbatim
        )

    def __add__(self, other: TargetCut) -> TargetCut:
        """Both effects on one target, at the later version."""
        return TargetCut(
            self.table_name,
            max(self.generation, other.generation),
            max(self.version, other.version),
            self.inserted + other.inserted,
            self.updated + other.updated,
            self.deleted + other.deleted,
            self.skipped + other.skipped,
            self.truncated or other.truncated,
            self.reread + other.reread,
            self.quarantined + other.quarantined,
            self.verbatim + other.verbatim,
            max((at for at in (self.commit_ts, other.commit_ts) if at is not None), default=None),
        )


_CUT = pa.struct(
    [
        ("table_name", pa.string()),
        ("generation", pa.int64()),
        ("version", pa.int64()),
        ("inserted", pa.int64()),
        ("updated", pa.int64()),
        ("deleted", pa.int64()),
        ("skipped", pa.int64()),
        ("truncated", pa.bool_()),
        ("reread", pa.int64()),
        ("quarantined", pa.int64()),
        ("verbatim", pa.int64()),
        ("commit_ts", UTC_TIME),
    ]
)


@dataclass(frozen=True, slots=True)
class BatchCut:
    """A consistent cut: every target as of the end of one batch.

    ``expired``: it is older than versions of targets are kept, so that it mayn't be readable any
    more.
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
            ("at", UTC_TIME), ("run_id", pa.string()), ("batch", pa.int64()),
            ("end_lsn", pa.int64()), ("commit_ts", UTC_TIME), ("targets", pa.list_(_CUT)),
            ("expired", pa.bool_()),
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
    # What pages show of thousands of runs without reading their results; None where a run, or its
    # version, didn't record it. All that the source had committed at ``as_of`` is part of what the
    # run landed.
    as_of: datetime | None = None
    lag_before_bytes: int | None = None
    lag_bytes: int | None = None
    retained_bytes: int | None = None
    wal_status: str | None = None
    # Whether every target held all of it afterwards, whatever the run's checks found.
    applied: bool | None = None
    # When the attempt began that tells this, by Ledger.begin_run(); None in rows of versions that
    # didn't record it.
    begun: datetime | None = None
    # What this attempt did to targets, without what earlier attempts at the run have recorded: the
    # sum over all rows counts each change once. None in rows of versions that didn't record it.
    targets: list[TargetCut] | None = None

    table: ClassVar[str] = "runs"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", UTC_TIME),
            ("run_id", pa.string()),
            ("verb", pa.string()),
            ("status", pa.string()),
            ("run_type", pa.string()),
            ("interval_start", UTC_TIME),
            ("interval_end", UTC_TIME),
            ("start_lsn", pa.int64()),
            ("end_lsn", pa.int64()),
            ("changes", pa.int64()),
            ("seconds", pa.float64()),
            ("result", pa.string()),
            ("as_of", UTC_TIME),
            ("lag_before_bytes", pa.int64()),
            ("lag_bytes", pa.int64()),
            ("retained_bytes", pa.int64()),
            ("wal_status", pa.string()),
            ("applied", pa.bool_()),
            ("begun", UTC_TIME),
            ("targets", pa.list_(_CUT)),
        ]
    )


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of the stream that the lake lacks and that this life of the slot no longer gives.

    ``from_lsn`` is the landed end, ``to_lsn`` where slot or server stood when it was found; None
    where the server's positions don't go on from ours. Closed, ``to_lsn`` is where the slot's next
    life began.
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
            ("at", UTC_TIME),
            ("run_id", pa.string()),
            ("status", pa.string()),
            ("slot", pa.string()),
            ("system_identifier", pa.string()),
            ("timeline", pa.int64()),
            ("incarnation", pa.string()),
            ("from_lsn", pa.int64()),
            ("to_lsn", pa.int64()),
            ("cause", pa.string()),
            ("detail", pa.string()),
            ("remedy", pa.string()),
        ]
    )


@dataclass(frozen=True, slots=True)
class KeptWindow:
    """A bite that isn't the pipeline file's, since the server didn't manage that; ``window_bytes``
    None: it is again.
    """

    at: datetime
    run_id: str
    window_bytes: int | None
    timeout_s: int

    table: ClassVar[str] = "bites"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", UTC_TIME),
            ("run_id", pa.string()),
            ("window_bytes", pa.int64()),
            ("timeout_s", pa.int64()),
        ]
    )


@dataclass(frozen=True, slots=True)
class Release:
    """Changes that somebody lets pass a table's stop gates: all whose commits lie before
    ``upto_lsn``.
    """

    at: datetime
    run_id: str
    table_name: str
    generation: int
    incarnation: str
    timeline: int
    upto_lsn: int
    by: str
    reason: str | None = None

    table: ClassVar[str] = "releases"
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("at", UTC_TIME),
            ("run_id", pa.string()),
            ("table_name", pa.string()),
            ("generation", pa.int64()),
            ("incarnation", pa.string()),
            ("timeline", pa.int64()),
            ("upto_lsn", pa.int64()),
            ("by", pa.string()),
            ("reason", pa.string()),
        ]
    )


Row = SlotMove | TableState | BatchCut | Run | Gap | KeptWindow | Release


@dataclass(frozen=True, slots=True)
class SlotReading:
    """The slot as a run saw it, for whoever can't ask the source; ``at`` is an ISO timestamp.

    ``lag_bytes`` is the WAL between what the slot gave away and the server's position,
    ``safe_wal_size`` what may still be written before the slot is in danger; None where the server
    sets no limit.
    """

    at: str
    wal_status: str | None
    lag_bytes: int
    retained_bytes: int
    safe_wal_size: int | None = None

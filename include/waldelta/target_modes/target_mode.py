"""The base class of target modes: everything in which one mode may differ from another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from waldelta.errors import ModeRefused
from waldelta.metadata_columns import COMMIT_TS, LSN
from waldelta.spark_sql import quote_in_template

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa
    from pyspark.sql import DataFrame

    from waldelta.arrow import Bools
    from waldelta.changes.merge.mode_target import ModeTarget

    Column: TypeAlias = pa.ChunkedArray[Any]
    # Of rows with the target's key columns: which have a wanted key.
    KeyTest: TypeAlias = Callable[[pa.Table], Bools]

# Columns of staged states: until when one was valid; null while it is.
TO_LSN, TO_TS = "to_lsn", "to_ts"
# Columns of staged changes: the transaction, and whether it moved the row to another key (the old
# key is in ``o<k>``).
STATE_XID, MOVED = "xid", "moved"


class Fold(Enum):
    """What the changes of a range become, in commit order."""

    # At most one change for each row.
    NET_CHANGES = "net changes"
    # Each state of a row at the end of a transaction, with its own end.
    STATES = "states"
    # The last state of each key.
    LAST_STATES = "last states"
    # Each change, and each TRUNCATE.
    CHANGES = "changes"

    @property
    def has_states(self) -> bool:
        """Whether rows of the target are states of a key."""
        return self in (Fold.STATES, Fold.LAST_STATES)

    @property
    def has_changes(self) -> bool:
        """Whether rows of the target are changes, each with its place and its transaction."""
        return self is Fold.CHANGES


class Feature(Enum):
    """What a mode may not support."""

    # Changes can be judged before they are merged, by expectations with ``gate`` stop or
    # quarantine.
    GATES = "gates"
    # A target's rows are compared with the source's, and brought to its present state.
    MEND = "mend"
    # Options of the pipeline file.
    PARTITION_ROOT = "partition_root: true"
    WITHOUT_COPY = "copy: false"
    WITHOUT_METADATA = "metadata_columns: false"


# What these do is right only for a target that has the source's rows and no others.
_OF_SOURCE_ROWS = frozenset({Feature.GATES, Feature.MEND})


@dataclass(frozen=True, slots=True)
class Invariant:
    """What holds for all rows of a target, whether the source has them now or not.

    ``broken`` is an expression of both Spark and DataFusion, true for rows that break it. It may
    have windows, and ``{key}`` in it is replaced by the key's columns. ``label`` distinguishes the
    invariants of a mode. ``title`` describes it in results.
    """

    label: str
    meaning: str
    title: str
    broken: str
    severity: Literal["critical", "warning"] = "critical"


@dataclass(frozen=True, kw_only=True)
class TargetMode:
    """One target mode.

    ``name`` is what the pipeline file and the ledger call it, ``summary`` what a target keeps.
    """

    name: str
    summary: str
    fold: Fold
    # Whether values that weren't sent are read from the source, or their row is quarantined. If
    # not, the row says which values it lacks.
    completes_rows: bool = True
    # What a target in this mode can be used with.
    features: frozenset[Feature] = frozenset()
    # The columns that the mode adds to a mirror's, with Spark types.
    own_columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    # The condition of rows that the source has now, in SQL of both Spark and DataFusion.
    live: str = "true"
    # The column with the time at which a current row's state began.
    began_at: str = COMMIT_TS
    # Columns that, with the key, identify one of the target's rows.
    identity: tuple[str, ...] = ()
    # Columns with positions of changes.
    positions: tuple[str, ...] = (LSN,)
    # What the check stage verifies for all rows.
    invariants: tuple[Invariant, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a mode whose features would overwrite rows that it keeps."""
        if self.keeps_rows and (wrong := self.features & _OF_SOURCE_ROWS):
            named = ", ".join(sorted(feature.value for feature in wrong))
            raise ValueError(f"mode {self} keeps rows that the source lacks: no {named} for it")

    def __str__(self) -> str:
        """Returns the mode's name, as messages show it."""
        return self.name

    @property
    def keeps_rows(self) -> bool:
        """Whether a target keeps rows that the source doesn't have now."""
        return self.fold is not Fold.NET_CHANGES

    def supports(self, feature: Feature) -> bool:
        """Whether a target in this mode can be used with a feature."""
        return feature in self.features

    def columns(self, key: Mapping[str, str]) -> dict[str, str]:  # noqa: ARG002 - of a changelog
        """Returns the columns that the mode adds to a mirror's, with Spark types.

        ``key`` are the target's key columns, with Spark types.
        """
        return dict(self.own_columns)

    def first_values(self, lsn: int, at: datetime) -> dict[str, object]:  # noqa: ARG002
        """Returns the mode's columns that aren't null in the rows of a first copy.

        ``lsn`` and ``at`` are its snapshot's position and time.
        """
        return {}

    def evolved_columns(self, key: Mapping[str, tuple[str, str]]) -> list[str]:  # noqa: ARG002
        """Returns the mode's columns after an evolution of the target, as Spark SQL.

        ``key`` are the key columns by new name, with the name before and the new Spark type.
        """
        return list(self.own_columns)

    def new_values(self, rows: pa.Table, target: ModeTarget) -> dict[str, Column]:
        """Returns the metadata columns of new rows, by name, from complete row versions."""
        raise NotImplementedError

    def ended_values(self, current: pa.Table, lsn: Column, at: Column) -> dict[str, Column]:
        """Returns the columns that change, by name, in rows of the target whose states end.

        ``lsn`` and ``at`` are the position and the time at which each of them ends.
        """
        raise NotImplementedError

    def end_clauses(self, lsn: int, at_us: int) -> list[str]:
        """Returns what ended_values() and was_seen() say as clauses of a MERGE: conditions on open
        rows ``t`` that no change names, with actions.
        """
        raise NotImplementedError

    def was_seen(self, current: pa.Table, lsn: Column) -> Column:  # noqa: ARG002
        """Returns which of the rows that end there stay."""
        return lsn.is_valid()

    def may_be_current(self, rows: pa.Table, has_key: KeyTest) -> Bools:
        """Returns which rows of the target choose_current() needs to find the current rows of some
        keys.

        ``has_key`` returns which rows have one of these keys.
        """
        raise NotImplementedError

    def choose_current(self, rows: pa.Table, target: ModeTarget) -> pa.Table:  # noqa: ARG002
        """Returns the current rows among the rows that may_be_current() selects."""
        return rows

    def live_query(self, columns: Sequence[str], key: Sequence[str]) -> str:  # noqa: ARG002
        """Returns the query of the rows that the source has now, with these columns.

        It is a template in SQL of both Spark and DataFusion, whose ``{rows}`` are the target.
        """
        return f"select {_list_columns(columns)} from {{rows}} where {self.live}"

    def live_rows(self, frame: DataFrame, key: Sequence[str]) -> DataFrame:
        """Returns the rows of a target that the source has now, without the mode's columns."""
        columns = self.source_columns(frame.columns, key)
        return frame.sparkSession.sql(self.live_query(columns, key), rows=frame)

    def source_columns(self, columns: Iterable[str], key: Sequence[str]) -> list[str]:
        """Returns the columns of a target that the mode doesn't add."""
        added = self.columns(dict.fromkeys(key, ""))
        return [name for name in columns if name not in added]

    def check_stored_key(self, table: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Raise ModeRefused for a target that has rows of other key columns."""

    def rules(self, key: Sequence[str]) -> list[Invariant]:
        """Returns the invariants of a target with this key, which may be empty."""
        return [rule for rule in self.invariants if key or "{key}" not in rule.broken]

    def judged_query(self, columns: Sequence[str], key: Sequence[str]) -> str:  # noqa: ARG002
        """Returns the query of the rows that the mode's invariants judge, as live_query() does."""
        return f"select {_list_columns(columns)} from {{rows}}"

    def check_key(self, table: str, key: Sequence[str]) -> None:
        """Raise ModeRefused when the mode needs a key that the table lacks."""
        if self.fold.has_states and not key:
            raise ModeRefused(
                f"{table} has no key, so versions of its rows can't be told apart: mode {self}"
                " needs a primary key or a replica identity; without one write mode: changelog or"
                " mirror"
            )

    def check_change(self, table: str, wanted: TargetMode) -> None:
        """Raise ModeRefused when another mode would lose what a target of this mode keeps."""
        if self.keeps_rows and self != wanted:
            raise ModeRefused(
                f"{table} has mode {self} in the lake, and the pipeline file says {wanted}, which"
                f" would lose what it keeps: write mode: {self} again, or add a target of another"
                f" name (from: {table}), or move its folder away and sync it"
            )


def _list_columns(columns: Iterable[str]) -> str:
    return ", ".join(map(quote_in_template, columns))

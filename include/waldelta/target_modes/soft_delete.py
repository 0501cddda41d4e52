"""Mode ``soft_delete``: the last state of each key, marked when the source deleted the row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from waldelta.metadata_columns import COMMIT_TS, LSN
from waldelta.target_modes.target_mode import TO_LSN, TO_TS, Fold, Invariant, TargetMode

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa

    from waldelta.arrow import Bools
    from waldelta.changes.merge.mode_target import ModeTarget
    from waldelta.target_modes.target_mode import Column, KeyTest

# Whether and when the source deleted the row.
DELETED, DELETED_AT = "_wd_deleted", "_wd_deleted_at"
_MEANING = (
    "each key has one row, and a row is marked as deleted exactly when it has a deletion time"
)


class SoftDelete(TargetMode):
    """Overwrites a key's state with its next one."""

    def first_values(self, lsn: int, at: datetime) -> dict[str, object]:  # noqa: ARG002
        """Returns that no row is deleted."""
        return {DELETED: False}

    def new_values(self, rows: pa.Table, target: ModeTarget) -> dict[str, Column]:  # noqa: ARG002
        """Returns the position and time of a state, or of its end when the row is gone again."""
        import pyarrow.compute as pc

        return {
            LSN: pc.coalesce(rows[TO_LSN], rows["lsn"]),
            COMMIT_TS: pc.coalesce(rows[TO_TS], rows["commit_ts"]),
            DELETED: rows[TO_LSN].is_valid(),
            DELETED_AT: rows[TO_TS],
        }

    def ended_values(self, current: pa.Table, lsn: Column, at: Column) -> dict[str, Column]:
        """Returns the marks of a row that is gone, which is never before its last change."""
        import pyarrow.compute as pc

        from waldelta.arrow import later

        at = later(current[COMMIT_TS], at)
        lsn = pc.max_element_wise(current[LSN], lsn)
        return {LSN: lsn, COMMIT_TS: at, DELETED: lsn.is_valid(), DELETED_AT: at}

    def end_clauses(self, lsn: int, at_us: int) -> list[str]:
        """Returns the marks of rows that aren't marked as deleted."""
        at = f"greatest(t.{COMMIT_TS}, timestamp_micros({at_us:d}))"
        marks = f"t.{DELETED} = true, t.{DELETED_AT} = {at}"
        last = f"t.{LSN} = greatest(t.{LSN}, {lsn:d}), t.{COMMIT_TS} = {at}"
        return [f"not t.{DELETED} then update set {last}, {marks}"]

    def may_be_current(self, rows: pa.Table, has_key: KeyTest) -> Bools:
        """Returns which rows of these keys aren't marked as deleted."""
        import pyarrow.compute as pc

        is_live: Bools = pc.equal(rows[DELETED], False).fill_null(False).to_numpy()
        return is_live & has_key(rows)


SOFT_DELETE = SoftDelete(
    name="soft_delete",
    summary="also deleted rows",
    fold=Fold.LAST_STATES,
    own_columns={DELETED: "boolean", DELETED_AT: "timestamp"},
    live=f"not {DELETED}",
    invariants=(
        Invariant(
            "soft_delete",
            _MEANING,
            f"soft_delete: {_MEANING}",
            f"{DELETED} is null or {DELETED} <> ({DELETED_AT} is not null)"
            " or count(*) over (partition by {key}) > 1",
        ),
    ),
)

"""Mode ``history``: each state of a row at the end of a transaction, with the range in which it was
valid.

This is a slowly changing dimension of type 2.
"""

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

# From when and until when the row was valid, by commit time and by commit position; open rows have
# no end.
VALID_FROM, VALID_TO = "_wd_valid_from", "_wd_valid_to"
VALID_FROM_LSN, VALID_TO_LSN = "_wd_valid_from_lsn", "_wd_valid_to_lsn"
_MEANING = (
    "row versions of a key don't overlap, end after they begin, and only the last one is open"
)


class History(TargetMode):
    """Ends a key's state and adds its next one."""

    def first_values(self, lsn: int, at: datetime) -> dict[str, object]:
        """Returns the begin of the first state."""
        return {VALID_FROM: at, VALID_FROM_LSN: lsn}

    def new_values(self, rows: pa.Table, target: ModeTarget) -> dict[str, Column]:  # noqa: ARG002
        """Returns a state's position and time, and the range in which it is valid."""
        began = {VALID_FROM: rows["commit_ts"], VALID_FROM_LSN: rows["lsn"]}
        ended = {VALID_TO: rows[TO_TS], VALID_TO_LSN: rows[TO_LSN]}
        return {LSN: rows["lsn"], COMMIT_TS: rows["commit_ts"]} | began | ended

    def ended_values(self, current: pa.Table, lsn: Column, at: Column) -> dict[str, Column]:
        """Returns the end of a state, which is never before its begin."""
        from waldelta.arrow import later

        return {VALID_TO: later(current[VALID_FROM], at), VALID_TO_LSN: lsn}

    def end_clauses(self, lsn: int, at_us: int) -> list[str]:
        """Returns the end of open states that began before, and the removal of others."""
        is_open = f"t.{VALID_TO_LSN} is null"
        until = f"greatest(t.{VALID_FROM}, timestamp_micros({at_us:d}))"
        return [
            f"{is_open} and t.{VALID_FROM_LSN} >= {lsn:d} then delete",
            f"{is_open} then update set t.{VALID_TO} = {until}, t.{VALID_TO_LSN} = {lsn:d}",
        ]

    def was_seen(self, current: pa.Table, lsn: Column) -> Column:
        """Returns which states began before they end: others were never visible."""
        import pyarrow.compute as pc

        return pc.less(current[VALID_FROM_LSN], lsn).fill_null(True)

    def may_be_current(self, rows: pa.Table, has_key: KeyTest) -> Bools:
        """Returns which rows are open states of these keys."""
        is_open: Bools = rows[VALID_TO_LSN].is_null().to_numpy()
        return is_open & has_key(rows)


HISTORY = History(
    name="history",
    summary="every version of a row",
    fold=Fold.STATES,
    own_columns={
        VALID_FROM: "timestamp",
        VALID_TO: "timestamp",
        VALID_FROM_LSN: "bigint",
        VALID_TO_LSN: "bigint",
    },
    live=f"{VALID_TO_LSN} is null",
    began_at=VALID_FROM,
    identity=(VALID_FROM_LSN,),
    positions=(VALID_FROM_LSN, VALID_TO_LSN),
    invariants=(
        Invariant(
            "history",
            _MEANING,
            f"history: {_MEANING}",
            f"{VALID_FROM_LSN} is null or {VALID_TO_LSN} <= {VALID_FROM_LSN} or {VALID_TO} <"
            f" {VALID_FROM} or ({VALID_TO} is null) <> ({VALID_TO_LSN} is null) or"
            f" coalesce({VALID_TO_LSN}, {(1 << 63) - 1}) > lead({VALID_FROM_LSN})"
            f" over (partition by {{key}} order by {VALID_FROM_LSN})",
        ),
    ),
)

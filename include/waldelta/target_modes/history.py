"""Mode ``history``: each state of a row at the end of a transaction, with the range in which it was
valid.

This is a slowly changing dimension of type 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from waldelta.spark_sql import insert_clause, quote
from waldelta.target_modes.target_mode import TO_LSN, TO_TS, Fold, Invariant, TargetMode

if TYPE_CHECKING:
    from waldelta.changes.decode.row_states import Truncation
    from waldelta.changes.merge.statements import Kept

# From when and until when the row was valid, by commit time and by commit position; open rows have
# no end.
VALID_FROM, VALID_TO = "_wd_valid_from", "_wd_valid_to"
VALID_FROM_LSN, VALID_TO_LSN = "_wd_valid_from_lsn", "_wd_valid_to_lsn"
_MEANING = (
    "row versions of a key don't overlap, end after they begin, and only the last one is open"
)


class History(TargetMode):
    """Ends a key's state and adds its next one."""

    def statement(
        self, target: str, kept: Kept, source: str, truncates: Sequence[Truncation] = ()
    ) -> str:
        """Returns the MERGE that ends current states and adds new ones.

        A state that began where it ends was never visible, and is deleted.
        """
        on = " and ".join(f"t.{quote(kept.names[i])} = s.b{k}" for k, i in enumerate(kept.key))
        inserts = [
            *kept.values,
            (VALID_FROM, "s.commit_ts"),
            (VALID_FROM_LSN, "s.lsn"),
            (VALID_TO, f"s.{TO_TS}"),
            (VALID_TO_LSN, f"s.{TO_LSN}"),
        ]
        statement = (
            f"merge into {target} as t\nusing {source} as s\non {on} and t.{VALID_TO_LSN} is"
            f" null and {kept.ended}\nwhen matched and t.{VALID_FROM_LSN} >= s.{TO_LSN} then"
            f" delete\nwhen matched then update set t.{VALID_TO} = greatest(t.{VALID_FROM},"
            f" s.{TO_TS}), t.{VALID_TO_LSN} = s.{TO_LSN}\nwhen not matched and {kept.begun} then\n "
            f" {insert_clause(inserts)}"
        )
        if truncates:
            lsn, at = truncates[0].lsn, f"timestamp_micros({truncates[0].at_us:d})"
            is_open = f"when not matched by source and t.{VALID_TO_LSN} is null"
            statement += (
                f"\n{is_open} and t.{VALID_FROM_LSN} >= {lsn:d} then delete"
                f"\n{is_open} then update set t.{VALID_TO} = greatest(t.{VALID_FROM}, {at}), "
                f"t.{VALID_TO_LSN} = greatest(t.{VALID_FROM_LSN}, {lsn:d})"
            )
        return statement


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
    first_values={VALID_FROM: "{time}", VALID_FROM_LSN: "{lsn}"},
    live=f"{VALID_TO_LSN} is null",
    began_at=VALID_FROM,
    positions=(VALID_FROM_LSN, VALID_TO_LSN),
    invariants=(
        Invariant(
            "history",
            _MEANING,
            f"history: {_MEANING}",
            f"{VALID_FROM_LSN} is null or {VALID_TO_LSN} <= {VALID_FROM_LSN} or {VALID_TO} <"
            f" {VALID_FROM} or ({VALID_TO} is null) <> ({VALID_TO_LSN} is null) or"
            f" coalesce({VALID_TO_LSN}, {(1 << 63) - 1}L) > lead({VALID_FROM_LSN})"
            f" over (partition by {{key}} order by {VALID_FROM_LSN})",
        ),
    ),
)

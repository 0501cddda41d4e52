"""Mode ``soft_delete``: the last state of each key, marked when the source deleted the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from waldelta.metadata_columns import COMMIT_TS, LSN
from waldelta.spark_sql import insert_clause, quote
from waldelta.target_modes.target_mode import TO_LSN, TO_TS, Fold, Invariant, TargetMode

if TYPE_CHECKING:
    from waldelta.changes.decode.row_states import Truncation
    from waldelta.changes.merge.statements import Kept

# Whether and when the source deleted the row.
DELETED, DELETED_AT = "_wd_deleted", "_wd_deleted_at"
_MEANING = (
    "each key has one row, and a row is marked as deleted exactly when it has a deletion time"
)


class SoftDelete(TargetMode):
    """Overwrites a key's state with its next one."""

    def statement(
        self, target: str, kept: Kept, source: str, truncates: Sequence[Truncation] = ()
    ) -> str:
        """Returns the MERGE that keeps each key's last state, marked when the row is gone."""
        on = " and ".join(
            f"t.{quote(kept.names[i])} = case when {kept.ended} then s.b{k} else s.c{i} end"
            for k, i in enumerate(kept.key)
        )
        values = [(name, value) for name, value in kept.values if name not in (LSN, COMMIT_TS)]
        values += [
            (LSN, f"coalesce(s.{TO_LSN}, s.lsn)"),
            (COMMIT_TS, f"coalesce(s.{TO_TS}, s.commit_ts)"),
            (DELETED, f"s.{TO_LSN} is not null"), (DELETED_AT, f"s.{TO_TS}"),
        ]  # fmt: skip
        sets = ", ".join(f"t.{name} = {value}" for name, value in values)
        marks = (
            f"update set t.{DELETED} = true, t.{DELETED_AT} = greatest(t.{COMMIT_TS}, {{at}}), "
            f"t.{COMMIT_TS} = greatest(t.{COMMIT_TS}, {{at}}), t.{LSN} = greatest(t.{LSN}, {{lsn}})"
        )
        statement = (
            f"merge into {target} as t\nusing (select * from {source} as s where {kept.ended} or"
            f" {kept.begun}) as s\non {on}\nwhen matched and {kept.ended} and not t.{DELETED} then"
            f" {marks.format(at=f's.{TO_TS}', lsn=f's.{TO_LSN}')}\nwhen matched and not"
            f" ({kept.ended}) then update set {sets}\nwhen not matched and not ({kept.ended}) then"
            f"\n  {insert_clause(values)}"
        )
        if truncates:
            at = f"timestamp_micros({truncates[0].at_us:d})"
            statement += (
                f"\nwhen not matched by source and not t.{DELETED} then"
                f" {marks.format(at=at, lsn=f'{truncates[0].lsn:d}L')}"
            )
        return statement


SOFT_DELETE = SoftDelete(
    name="soft_delete",
    summary="also deleted rows",
    fold=Fold.LAST_STATES,
    own_columns={DELETED: "boolean", DELETED_AT: "timestamp"},
    first_values={DELETED: "false"},
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

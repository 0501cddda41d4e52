"""Mode ``changelog``: each change is a row, in the order of commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from waldelta.errors import ModeRefused
from waldelta.metadata_columns import LSN
from waldelta.spark_sql import quote, string
from waldelta.target_modes.target_mode import MOVED, STATE_XID, Fold, Invariant, TargetMode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from waldelta.changes.decode.row_states import Truncation
    from waldelta.changes.merge.statements import Kept

# The operation, its place in the stream, its transaction, the key before it, and the columns whose
# values are unknown.
OP, SEQ, XID, BEFORE, UNCHANGED = "_wd_op", "_wd_seq", "_wd_xid", "_wd_before", "_wd_unchanged"
_MEANING = "each change has a known operation and its own position in the stream"
_COMPLETE = f"no change lacks a value that wasn't sent ({UNCHANGED} is null)"
_MOVED = f"each key in {BEFORE} is the key of a row that an earlier change left"
# The operation of the row that a change of the key ends; it is no row of the target.
_GONE = "gone"


class Changelog(TargetMode):
    """Appends changes; which rows are current follows from the last change of each key."""

    def columns(self, key: Mapping[str, str]) -> dict[str, str]:
        """Returns what describes a change; with a key also the key before it."""
        fields = ", ".join(f"{quote(name)}: {kind}" for name, kind in key.items())
        return dict(self.own_columns) | ({BEFORE: f"struct<{fields}>"} if key else {})

    def statement(
        self,
        target: str,
        kept: Kept,
        source: str,
        truncates: Sequence[Truncation] = (),  # noqa: ARG002 - they are rows of the source
    ) -> str:
        """Returns the INSERT of every change."""
        unknown = ", ".join(
            f"case when s.u{i} then {string(kept.names[i])} end" for i in kept.toastable
        )
        lacking = f"array_compact(array({unknown}))" if unknown else "array()"
        columns = [
            *kept.values, (OP, "s.action"), (SEQ, "s.place"), (XID, f"s.{STATE_XID}"),
            (UNCHANGED, f"nullif({lacking}, cast(array() as array<string>))"),
        ]  # fmt: skip
        if kept.key:
            old = {name: f"s.o{k}" for k, name in enumerate(kept.key_names)}
            # In the target's order: an INSERT assigns a struct's fields by position.
            fields = ", ".join(f"{string(name)}, {old[name]}" for name in kept.stored_key)
            columns.append((BEFORE, f"case when s.{MOVED} then named_struct({fields}) end"))
        names, values = zip(*columns, strict=True)
        return (
            f"insert into {target} ({', '.join(names)})\nselect {', '.join(values)}\nfrom"
            f" {source} as s"
        )

    def stored_key(self, table: str, frame: DataFrame, key: Sequence[str]) -> tuple[str, ...]:
        """Returns the fields of the struct that has the key before a change, in its order.

        Raises ModeRefused where they aren't the columns of the present key.
        """
        kinds = {field.name: field.dataType for field in frame.schema.fields}
        fields = kinds[BEFORE].fieldNames() if BEFORE in kinds else []  # type: ignore[attr-defined]
        if {*fields} != {*key}:
            raise ModeRefused(
                f"the key of {table} has changed from {', '.join(fields) or 'none'} to"
                f" {', '.join(key) or 'none'}, and its target (mode {self}) keeps rows by their"
                " key: move its folder away and sync it again"
            )
        return tuple(fields)

    def evolved_columns(self, key: Mapping[str, tuple[str, str]]) -> list[str]:
        """Returns the same columns, with the names and types that the key has afterwards."""
        columns = list(self.own_columns)
        if key:
            fields = ", ".join(
                f"{string(name)}, cast({BEFORE}.{quote(old)} as {kind})"
                for name, (old, kind) in key.items()
            )
            columns.append(
                f"case when {BEFORE} is not null then named_struct({fields}) end as {BEFORE}"
            )
        return columns

    def current_rows(self, frame: DataFrame, key: Sequence[str]) -> DataFrame:
        """Returns the last change of each key, where that left a row.

        A change that moved a row ends its old key, too. Without a key, it returns all rows: the
        changelog doesn't show which of two equal rows was deleted.
        """
        if not key:
            return frame
        truncated = f"max(struct({LSN}, {SEQ})) as _wd_emptied"
        emptied = frame.where(f"{OP} = 'truncate'").selectExpr(truncated)
        # Of one change, the row that it left comes after the one that it ended.
        rank = (
            f"row_number() over (partition by {', '.join(map(quote, key))} order by {LSN} desc,"
            f" {SEQ} desc, {OP} = '{_GONE}') as _wd_rank"
        )
        return (
            self.judged_rows(frame, key)
            .where(f"{OP} <> 'truncate'")
            .crossJoin(emptied.hint("broadcast"))
            .where(f"_wd_emptied is null or struct({LSN}, {SEQ}) > _wd_emptied")
            .selectExpr("*", rank)
            .where(f"_wd_rank = 1 and {OP} not in ('delete', '{_GONE}')")
            .drop("_wd_rank", "_wd_emptied")
        )

    def judged_rows(self, frame: DataFrame, key: Sequence[str]) -> DataFrame:
        """Returns all changes, and for each one that moved a row the end of its old key."""
        if not key:
            return frame
        ended = {name: f"{BEFORE}.{quote(name)}" for name in key} | {OP: f"'{_GONE}'"}
        columns = [f"{ended.get(name, quote(name))} as {quote(name)}" for name in frame.columns]
        return frame.unionByName(frame.where(f"{BEFORE} is not null").selectExpr(*columns))


CHANGELOG = Changelog(
    name="changelog",
    summary="every change",
    fold=Fold.CHANGES,
    completes_rows=False,
    own_columns={OP: "string", SEQ: "bigint", XID: "bigint", UNCHANGED: "array<string>"},
    first_values={OP: "'snapshot'", SEQ: "-1"},
    invariants=(
        Invariant(
            "changelog",
            _MEANING,
            f"changelog: {_MEANING}",
            f"coalesce({OP} not in ('insert', 'update', 'delete', 'truncate', 'snapshot',"
            f" '{_GONE}'), true) or ({OP} not in ('snapshot', '{_GONE}') and ({SEQ} is null"
            f" or count_if({OP} <> '{_GONE}') over (partition by {LSN}, {SEQ}) > 1))",
        ),
        Invariant(
            UNCHANGED,
            _COMPLETE,
            _COMPLETE,
            f"{UNCHANGED} is not null and {OP} <> '{_GONE}'",
            "warning",
        ),
        # A warning, because a publication may leave out the INSERT of a row.
        Invariant(
            BEFORE,
            _MOVED,
            _MOVED,
            f"{OP} = '{_GONE}' and coalesce(lag({OP}) over (partition by {{key}} order by {LSN},"
            f" {SEQ}, {OP} <> '{_GONE}') in ('delete', '{_GONE}'), true)",
            "warning",
        ),
    ),
)

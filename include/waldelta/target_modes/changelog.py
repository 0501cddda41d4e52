"""Mode ``changelog``: each change is a row, in the order of commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from waldelta.errors import ModeRefused
from waldelta.metadata_columns import COMMIT_TS, LSN
from waldelta.spark_sql import quote, quote_in_template, string
from waldelta.target_modes.target_mode import STATE_XID, Fold, Invariant, TargetMode

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa

    from waldelta.arrow import Bools
    from waldelta.changes.merge.mode_target import ModeTarget
    from waldelta.target_modes.target_mode import Column, KeyTest

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
        """Returns the columns that describe a change; with a key, also the column of old keys."""
        fields = ", ".join(f"{quote(name)}: {kind}" for name, kind in key.items())
        return dict(self.own_columns) | ({BEFORE: f"struct<{fields}>"} if key else {})

    def first_values(self, lsn: int, at: datetime) -> dict[str, object]:  # noqa: ARG002
        """Returns that each row is of a snapshot, before all changes."""
        return {OP: "snapshot", SEQ: -1}

    def new_values(self, rows: pa.Table, target: ModeTarget) -> dict[str, Column]:
        """Returns what describes each change."""
        values = {LSN: rows["lsn"], COMMIT_TS: rows["commit_ts"], OP: rows["action"]}
        values |= {SEQ: rows["place"], XID: rows[STATE_XID], UNCHANGED: target.lacking_names(rows)}
        return values | ({BEFORE: target.old_keys(rows, BEFORE)} if target.key else {})

    def check_stored_key(self, table: str, schema: pa.Schema, key: Sequence[str]) -> None:
        """Raise ModeRefused when the column of old keys has other fields than the key."""
        at = schema.get_field_index(BEFORE)
        fields = [] if at < 0 else [field.name for field in schema.field(at).type]
        if {*fields} != {*key}:
            raise ModeRefused(
                f"the key of {table} has changed from {', '.join(fields) or 'none'} to"
                f" {', '.join(key) or 'none'}, and its target (mode {self}) keeps rows by their"
                " key: move its folder away and sync it again"
            )

    def may_be_current(self, rows: pa.Table, has_key: KeyTest) -> Bools:
        """Returns which changes wrote or moved rows of these keys, or truncated the table."""
        import pyarrow.compute as pc

        truncates: Bools = pc.equal(rows[OP], "truncate").fill_null(False).to_numpy()
        return truncates | has_key(rows) | has_key(_old_keys(rows))

    def choose_current(self, rows: pa.Table, target: ModeTarget) -> pa.Table:
        """Returns the last change of each key, where that left a row."""
        import numpy as np
        import pyarrow as pa

        keys, moved = target.key_names, rows.filter(rows[BEFORE].is_valid())
        codes = target.key_codes(
            pa.concat_tables([rows.select(keys), _old_keys(moved).select(keys)])
        )
        places = np.append(np.arange(len(rows)), np.flatnonzero(rows[BEFORE].is_valid().to_numpy()))
        leaves = np.arange(len(codes)) < len(rows)
        lsn, seq = (rows[name].to_numpy()[places] for name in (LSN, SEQ))
        op = rows[OP].to_numpy()[places]
        truncates = op == "truncate"
        # Of one change, the row that it left comes after the one that it ended.
        order = np.lexsort((leaves, seq, lsn, codes))
        is_last = np.append(codes[order][1:] != codes[order][:-1], True)[: len(order)]
        last = order[is_last]
        emptied = max(zip(lsn[truncates], seq[truncates], strict=True), default=(-1, -1))
        later = (lsn > emptied[0]) | ((lsn == emptied[0]) & (seq > emptied[1]))
        stays = leaves & later & ~truncates & (op != "delete")
        return rows.take(pa.array(places[last[stays[last]]]))

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

    def live_query(self, columns: Sequence[str], key: Sequence[str]) -> str:
        """Returns the query of the last change of each key, where that left a row.

        A change that moved a row ends its old key, too. Without a key, it returns all rows: the
        changelog doesn't show which of two equal rows was deleted.
        """
        quoted = ", ".join(map(quote_in_template, columns))
        if not key:
            return f"select {quoted} from {{rows}}"
        keys = ", ".join(map(quote_in_template, key))
        changes = self.judged_query([*dict.fromkeys([*columns, *key, LSN, SEQ, OP])], key)
        # Of one change, the row that it left comes after the one that it ended.
        order = f"{LSN} desc, {SEQ} desc, {OP} = '{_GONE}'"
        return (
            f"with changes as ({changes}),\n"
            f"emptied as (select {LSN} as lsn, {SEQ} as seq from {{rows}} where {OP} = 'truncate'),"
            "\n"
            f"later as (select c.*, row_number() over (partition by {keys} order by {order})"
            f" as _wd_rank from changes as c where {OP} <> 'truncate' and not exists (select 1 from"
            f" emptied as e where e.lsn > c.{LSN} or (e.lsn = c.{LSN} and e.seq > c.{SEQ})))\n"
            f"select {quoted} from later where _wd_rank = 1 and {OP} not in ('delete', '{_GONE}')"
        )

    def judged_query(self, columns: Sequence[str], key: Sequence[str]) -> str:
        """Returns the query of all changes, and of the end of the old key for each that moved a
        row.
        """
        changes = super().judged_query(columns, key)
        if not key:
            return changes
        ended = {name: f"{BEFORE}.{quote_in_template(name)}" for name in key} | {OP: f"'{_GONE}'"}
        quoted = [(name, quote_in_template(name)) for name in columns]
        values = ", ".join(f"{ended.get(name, text)} as {text}" for name, text in quoted)
        return f"{changes} union all select {values} from {{rows}} where {BEFORE} is not null"


def _old_keys(rows: pa.Table) -> pa.Table:
    """Returns the keys before the changes, by column; null where none changed."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = [field.name for field in rows.schema.field(BEFORE).type]
    return pa.table({name: pc.struct_field(rows[BEFORE], name) for name in names})


CHANGELOG = Changelog(
    name="changelog",
    summary="every change",
    fold=Fold.CHANGES,
    completes_rows=False,
    own_columns={OP: "string", SEQ: "bigint", XID: "bigint", UNCHANGED: "array<string>"},
    invariants=(
        Invariant(
            "changelog",
            _MEANING,
            f"changelog: {_MEANING}",
            f"coalesce({OP} not in ('insert', 'update', 'delete', 'truncate', 'snapshot',"
            f" '{_GONE}'), true) or ({OP} not in ('snapshot', '{_GONE}') and ({SEQ} is null or"
            f" sum(case when {OP} <> '{_GONE}' then 1 else 0 end) over (partition by {LSN}, {SEQ})"
            " > 1))",
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

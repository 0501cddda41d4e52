"""Set aside: takes rows that a gate excludes out of the net changes to merge.

The target then agrees with what is certain about the source. A new row isn't written, and a row
with its key is deleted, because the source replaced it. An update isn't applied, and the target
keeps the earlier row (it is *outdated*). If the update moved the key, the old row is deleted,
because the source no longer has it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools, one_array
from waldelta.changes.decode.collapse import (
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
    QUARANTINED_ROWS,
    RAW_ROWS,
    codes_of_both,
)
from waldelta.changes.decode.net_rows import WRITTEN, keys_of, move_keys, purges, sent, unsent
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.stage.stage import Staged
from waldelta.lake import write_parquet
from waldelta.spark import Runner
from waldelta.spark_sql import parquet


@dataclass(frozen=True, slots=True)
class AsideRow:
    """A row that was set aside, for the quarantine table; ``reason`` names the failed
    expectations.
    """

    key: str
    columns: list[str]
    sent: str
    lsn: int | None
    commit_ts: object
    reason: str
    outdated: bool


@dataclass(frozen=True, slots=True)
class JudgedChanges:
    """The changes to merge after the gate, and the rows that were set aside."""

    staged: Staged
    aside: tuple[AsideRow, ...] = ()


def set_aside(
    runner: Runner, plan: TargetPlan, staged: Staged, rows: pa.Table, reasons: list[str]
) -> JudgedChanges:
    """Take these rows out of ``staged``; they are net changes that would write a row.

    ``reasons`` has one entry per row.
    """
    moved = move_keys(rows, plan)
    of_action = np.array(rows["action"].to_pylist(), dtype=object)
    gone = purges(rows.filter(pa.array((of_action == ACTION_UPSERT) | moved)), plan)
    counts = Counter(staged.counts)
    counts.subtract(Counter(of_action.tolist()))
    counts[ACTION_PURGE] += len(gone)
    counts[QUARANTINED_ROWS] += len(rows)
    counts[RAW_ROWS] -= int(one_array(rows["raw"]).is_valid().sum().as_py() or 0)
    left = {name: count for name, count in counts.items() if count}
    absent = unsent(rows, plan)
    told = zip(
        keys_of(rows, plan, "c"),
        absent,
        sent(rows, plan, absent),
        rows["lsn"].to_pylist(),
        rows["commit_ts"].to_pylist(),
        reasons,
        ((of_action == ACTION_UPDATE) & ~moved).tolist(),
        strict=True,
    )
    rest = _in_driver if staged.net is not None else _by_spark
    return JudgedChanges(
        replace(rest(runner, plan, staged, rows, gone), counts=left),
        tuple(AsideRow(*row) for row in told),
    )


def _in_driver(
    _: Runner, plan: TargetPlan, staged: Staged, rows: pa.Table, gone: pa.Table
) -> Staged:
    net = staged.net
    assert net is not None  # noqa: S101 - the caller selects this function only with net
    rest = pa.concat_tables([net.filter(pa.array(~_same(net, rows, plan))), gone])
    folder = f"{staged.folder}-let"
    write_parquet(folder, rest)
    return replace(staged, folder=folder, source=parquet(folder), net=rest)


def _same(net: pa.Table, rows: pa.Table, plan: TargetPlan) -> Bools:
    """Returns which net changes would write one of these rows."""
    key = [f"c{i}" for i in plan.decode.shape.key]
    of_net, of_rows = codes_of_both([net[name] for name in key], [rows[name] for name in key])
    written: Bools = np.asarray(pc.is_in(net["action"], value_set=pa.array(WRITTEN)))
    return np.isin(of_net, of_rows) & written


def _by_spark(
    runner: Runner, plan: TargetPlan, staged: Staged, rows: pa.Table, gone: pa.Table
) -> Staged:
    key, names = plan.decode.shape.key, ", ".join(plan.decode.net_schema.names)
    folder = f"{staged.folder}-let"
    write_parquet(f"{folder}-aside", rows.select([f"c{i}" for i in key]))
    write_parquet(f"{folder}-gone", gone)
    same = " and ".join(f"s.c{i} <=> a.c{i}" for i in key)
    written = ", ".join(f"'{action}'" for action in WRITTEN)
    listed = ", ".join(f"s.{name}" for name in plan.decode.net_schema.names)
    # The SQL contains only numbered columns and waldelta's own folders, no names from the source.
    rest = runner.spark().sql(
        f"select {listed} from {staged.source} as s"  # noqa: S608
        f" left anti join {parquet(f'{folder}-aside')} as a"
        f" on s.action in ({written}) and {same}"
        f" union all select {names} from {parquet(f'{folder}-gone')}"
    )
    rest.write.mode("overwrite").parquet(folder)
    return replace(staged, folder=folder, source=parquet(folder), net=None)

"""A repair's net changes: only those that would change the target, which of them a gate judges, and
which stay in quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools
from waldelta.changes.decode.collapse import ACTION_UPSERT
from waldelta.changes.decode.row_keys import first_of_each, key_codes, typed_columns
from waldelta.changes.merge.by_file import differing
from waldelta.changes.stage.net_files import NetFiles
from waldelta.errors import NeedsSync
from waldelta.lake import Lake, write_parquet
from waldelta.pipeline import Job
from waldelta.spark import Runner
from waldelta.stages.repair._repair_rows import RepairRows, quarantined_keys
from waldelta.stages.repair.mend.mend import TWICE, ExpectedRows, differences

# Each task that compares has the keys of all net changes in memory. Beyond this, Spark compares.
MOST_COMPARED = 2_000_000


@dataclass(frozen=True, slots=True)
class NetRows:
    """Staged net changes: their files, and the reason, action and key (``b<k>``) of each."""

    files: NetFiles
    keys: pa.Table

    @classmethod
    def of(cls, folder: str, lake: Lake, rows: RepairRows) -> NetRows:
        """Returns the net changes that are staged in a folder."""
        files = NetFiles.of(folder, lake)
        return cls(files, files.read(["why", "action", *rows.shape.bases]))

    @property
    def counts(self) -> dict[str, int]:
        """Returns how many there are by reason and by action."""
        found: Counter[str] = Counter()
        for name in ("why", "action"):
            for of in pc.value_counts(self.keys[name]).to_pylist():
                found[of["values"]] += of["counts"]
        return dict(found)

    @property
    def bases(self) -> list[pa.ChunkedArray]:
        """Returns the columns of their keys."""
        return [self.keys[name] for name in self.keys.column_names if name.startswith("b")]

    def write(self, chosen: Bools, folder: str, further: pa.Table | None = None) -> None:
        """Write the chosen ones into another folder, with further columns if given."""
        places, number, done = np.flatnonzero(chosen), 0, 0
        for of_file, here in enumerate(np.split(chosen, np.cumsum(self.files.rows)[:-1])):
            for part in self.files.parts_of(of_file, here):
                columns = dict(zip(part.column_names, part.columns, strict=True))
                if further is not None:
                    own = further.take(pa.array(places[done : done + len(part)]))
                    columns |= dict(zip(own.column_names, own.columns, strict=True))
                write_parquet(folder, pa.table(columns), number)
                number, done = number + 1, done + len(part)

    def kept(self, chosen: Bools, folder: str, rows: RepairRows) -> NetRows:
        """Returns the chosen ones, which are written into ``folder`` unless all are chosen."""
        if chosen.all():
            return self
        if not chosen.any():
            return NetRows(NetFiles(folder, self.files.lake, [], []), self.keys.slice(0, 0))
        self.write(chosen, folder)
        return NetRows.of(folder, self.files.lake, rows)


def differing_rows(runner: Runner, job: Job, rows: RepairRows, staged: str, folder: str) -> NetRows:
    """Returns those of the net changes in folder ``staged`` that would change the target.

    Raises NeedsSync when Spark finds that the target has a key twice.
    """
    net, table_name = NetRows.of(staged, job.lake, rows), rows.drifted.state.table_name
    target = job.lake.target(table_name)
    if not len(net.keys):
        return net
    # A key may have two printed forms, and was then read twice.
    once = np.zeros(len(net.keys), np.bool_)
    once[first_of_each(*key_codes(rows.key_types, net.bases))] = True
    if len(net.keys) <= MOST_COMPARED:
        kinds = dict(rows.copy.columns)
        changing = differing(runner, target.open(), rows.written, net.files, kinds)
        if changing is not None:
            return net.kept(changing & once, f"{folder}/differing", rows)
    net.write(once, f"{folder}/once")
    frame = runner.spark().read.parquet(f"{folder}/once")
    has_raw = rows.written.metadata
    expected = ExpectedRows(frame, rows.copy.columns, rows.shape, has_raw, is_whole=False)
    found = differences(expected, target.frame(runner.spark()))
    found.write.mode("overwrite").parquet(f"{folder}/differing")
    net = NetRows.of(f"{folder}/differing", job.lake, rows)
    if TWICE in net.counts:
        raise NeedsSync("its target has rows with the same key")
    return net


def stage_to_judge(
    rows: RepairRows,
    net: NetRows,
    folder: str,
    brought: Sequence[pa.Table],
    judged: Collection[str],
    accepted: Collection[str],
) -> bool:
    """Write the rows that a gate judges; returns whether there are any.

    These are rows of the quarantined keys ``judged``, and rows that changes of the keys
    ``brought`` write. Accepted rows aren't judged. ``t<k>`` is the key in the quarantine's form,
    null for rows that aren't in quarantine.
    """
    named, let = (quarantined_keys(rows, keys) for keys in (judged, accepted))
    of_net, of_let, of_named, *of_brought = key_codes(
        rows.key_types, net.bases, *map(typed_columns, (let, named, *brought))
    )
    chosen = np.isin(of_net, np.concatenate([of_named, *of_brought])) & ~np.isin(of_net, of_let)
    chosen &= np.asarray(pc.equal(net.keys["action"], ACTION_UPSERT))
    order = np.argsort(of_named, kind="stable")
    at = np.searchsorted(of_named, of_net, sorter=order).clip(max=max(len(order) - 1, 0))
    place = order[at] if len(order) else at
    is_named = np.isin(of_net, of_named)
    texts = named.select([f"t{k}" for k in range(len(rows.key))]).take(
        pa.array(place, mask=~is_named)
    )
    net.write(chosen, folder, texts)
    return bool(chosen.any())


def hold_back(rows: RepairRows, net: NetRows, folder: str, keys: Collection[str]) -> NetRows:
    """Returns the net changes without the rows that stay in quarantine."""
    still = typed_columns(quarantined_keys(rows, keys))
    of_net, of_still = key_codes(rows.key_types, net.bases, still)
    return net.kept(~np.isin(of_net, of_still), f"{folder}/let", rows)


def untouched(rows: RepairRows, keys: Collection[str], touched: pa.Table | None) -> set[str]:
    """Returns those of these quarantined keys that aren't among the keys ``touched``."""
    if not keys or touched is None:
        return set(keys)
    named = quarantined_keys(rows, keys)
    of_named, of_touched = key_codes(rows.key_types, *map(typed_columns, (named, touched)))
    names, left = sorted(keys), ~np.isin(of_named, of_touched)
    return {name for name, is_left in zip(names, left.tolist(), strict=True) if is_left}


def untouched_keys(rows: RepairRows, touched: pa.Table, keys: Collection[str]) -> pa.Table:
    """Returns the keys ``touched`` without these quarantined keys."""
    named = quarantined_keys(rows, keys)
    of_touched, of_named = key_codes(rows.key_types, *map(typed_columns, (touched, named)))
    return touched.filter(pa.array(~np.isin(of_touched, of_named)))

"""A repair's net changes: only those that would change the target, which of them a gate judges, and
which stay in quarantine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.changes.decode.collapse import ACTION_DELETE
from waldelta.changes.decode.net_rows import key_codes, typed_columns
from waldelta.stages.repair._repair_rows import RepairRows, quarantined_keys
from waldelta.stages.repair.mend.mend import NetRows, write_rows


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
    chosen &= np.asarray(pc.not_equal(net.keys["action"], ACTION_DELETE))
    order = np.argsort(of_named, kind="stable")
    at = np.searchsorted(of_named, of_net, sorter=order).clip(max=max(len(order) - 1, 0))
    place = order[at] if len(order) else at
    is_named = np.isin(of_net, of_named)
    texts = named.select([f"t{k}" for k in range(len(rows.key))]).take(
        pa.array(place, mask=~is_named)
    )
    write_rows(net.files, chosen, folder, texts)
    return bool(chosen.any())


def hold_back(rows: RepairRows, net: NetRows, folder: str, keys: Collection[str]) -> NetRows:
    """Returns the net changes without the rows that stay in quarantine."""
    still = typed_columns(quarantined_keys(rows, keys))
    of_net, of_still = key_codes(rows.key_types, net.bases, still)
    return net.kept(~np.isin(of_net, of_still), f"{folder}/let")


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

"""Sent messages: finds the change log's messages that a few rows came from, for the quarantine.

The quarantine stores them because maintenance drops batches from the change log. The keys of the
range are decoded again, and each row's chain of changes is followed back by collapse's rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.changes.decode.collapse import DELETE, INSERT, Chains, identity_codes, in_order_of
from waldelta.changes.decode.decode import CHANGE_COLUMNS, DecodePlan, decode, with_typed_keys
from waldelta.changes.decode.row_keys import first_values, row_keys
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.lake.changelog import ChangeLog, place_columns
from waldelta.lake.ledger import SentMessage

# A row's newest message is stored whatever its size; the bytes of earlier ones up to this total.
MOST_EARLIER_BYTES = 1 << 20


def sent_messages(
    change_log: ChangeLog, plan: TargetPlan, wanted: Collection[str]
) -> dict[str, list[SentMessage]]:
    """Returns the messages behind the rows that a range of batches writes, in commit order.

    ``wanted`` are the rows' keys (as row_keys()). A chain goes back to the row's INSERT, or to the
    first UPDATE in the range. The target's own filter is ignored, so changes of the row that the
    filter excluded are included.
    """
    if not wanted:
        return {}
    decode_plan = replace(plan.decode, routing=None)
    found = _chains(_keys_of_events(change_log, plan, decode_plan), decode_plan, wanted)
    messages = _read(change_log, plan, {place for places in found.values() for place in places})
    return {key: keep_bytes([messages[place] for place in places]) for key, places in found.items()}


def keep_bytes(messages: list[SentMessage]) -> list[SentMessage]:
    """Returns the messages to store: for a row changed very often, earlier ones without their
    bytes.
    """
    kept, taken = messages[-1:], 0
    for message in reversed(messages[:-1]):
        taken += len(message.raw or b"")
        kept.append(message if taken <= MOST_EARLIER_BYTES else replace(message, raw=None))
    return kept[::-1]


def _keys_of_events(change_log: ChangeLog, plan: TargetPlan, decode_plan: DecodePlan) -> pa.Table:
    """Returns place, operation, and old and new key of each event of the range, in commit order."""
    names = ["ord", "op", *decode_plan.shape.old_keys, *_new_keys(decode_plan)]
    schema = decode_plan.event_schema
    parts = [pa.schema([schema.field(name) for name in names]).empty_table()]
    for changes in _changes(change_log, plan, list(CHANGE_COLUMNS)):
        parts += [events.select(names) for events in decode(changes, decode_plan)]
    events = with_typed_keys(pa.concat_tables(parts), decode_plan)
    return events.take(pa.array(in_order_of(events)))


def _chains(events: pa.Table, plan: DecodePlan, wanted: Collection[str]) -> dict[str, list[int]]:
    """Returns by key the places of the events that led to its row, in commit order."""
    op = events["op"].to_numpy().astype(np.int64)
    old, new = identity_codes(events, plan.shape)
    chains = Chains(op, np.where(op == INSERT, -1, old), np.where(op == DELETE, -1, new), False)
    last, places = chains.live(), events["ord"].to_numpy()
    columns = _new_keys(plan)
    near = pc.is_in(
        events[columns[0]],
        value_set=first_values(wanted, plan, events.schema.field(columns[0]).type),
    )
    last = last[np.asarray(near)[last]]
    return {
        key: [int(places[event]) for event in _back(chains, event)]
        for key, event in zip(
            row_keys(events.take(pa.array(last)), plan, columns), last.tolist(), strict=True
        )
        if key in wanted
    }


def _back(chains: Chains, event: int) -> list[int]:
    """Returns the events of a chain up to this one."""
    found = [event]
    while (parent := int(chains.parent[found[-1]])) >= 0:
        found.append(parent)
    return found[::-1]


def _read(
    change_log: ChangeLog, plan: TargetPlan, places: Collection[int]
) -> dict[int, SentMessage]:
    """Returns the messages at these places in commit order."""
    wanted = np.array(sorted(places), np.int64)
    found: dict[int, SentMessage] = {}
    for part in _changes(change_log, plan, ["batch", "seq", "streamed_xid", "lsn", "xid8", "data"]):
        at = plan.decode.segments.places(*place_columns(part))
        chosen = np.isin(at, wanted)
        for place, row in zip(
            at[chosen].tolist(), part.filter(pa.array(chosen)).to_pylist(), strict=True
        ):
            found[place] = SentMessage(
                row["batch"], row["seq"], row["lsn"], row["xid8"], row["data"]
            )
    return found


def _changes(
    change_log: ChangeLog, plan: TargetPlan, columns: list[str]
) -> Iterable[pa.RecordBatch]:
    return change_log.rows_of(
        plan.decode.segments, plan.state.relation_ids, plan.decode.snapshot, columns
    )


def _new_keys(plan: DecodePlan) -> list[str]:
    return [f"c{i}" for i in plan.shape.key]

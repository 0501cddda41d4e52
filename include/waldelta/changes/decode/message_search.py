"""Finds the message of a landed range that can't be decoded, after decoding has failed.

Decoding reads many messages at once, in tasks or in the driver, and its error may not name the
message. So the range is read again in ever smaller parts until a single message is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.changes.decode.decode import CHANGE_COLUMNS, DecodePlan, decode
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.errors import DecodeError, WaldeltaError
from waldelta.lake.changelog import BatchNumbers, ChangeLog, place_columns
from waldelta.lake.changelog.row_messages import of_batches
from waldelta.lake.changelog.transaction_counts import XID_MASK
from waldelta.lake.ledger import TableState
from waldelta.pgoutput import Segments, UnreadMessage, read_relation, read_truncate
from waldelta.pgoutput.messages import CONTROL_KINDS, decode_logical_messages, read_control

_Decode = Callable[[pa.RecordBatch], object]


def find_unreadable(
    change_log: ChangeLog, state: TableState, batches: BatchNumbers, plan: TargetPlan | None
) -> UnreadMessage | None:
    """Return the first message that prevents applying a batch range to a target; None when all
    decode.

    ``plan`` is None when planning itself failed. Then the message describes rows, or decides which
    of them count.
    """
    # A transaction prepared in an earlier batch may count in the range.
    rows = itertools.chain(
        change_log.timeline(*batches).to_pylist(), change_log.controls(batches.after).to_pylist()
    )
    place = next(((row["batch"], row["seq"]) for row in rows if not _is_read(row, state)), None)
    if place is None and plan is not None:
        parts = change_log.rows_of(
            plan.decode.segments, state.relation_ids, plan.decode.snapshot, list(CHANGE_COLUMNS)
        )
        place = _first(parts, lambda part: _read_rows(part, plan.decode))
    return None if place is None else _read_message(change_log, place)


def find_unreadable_logical(change_log: ChangeLog, segments: Segments) -> UnreadMessage | None:
    """Return the first logical message of a range that can't be decoded."""
    chosen = of_batches(segments.after, segments.upto) & (pc.field("kind") == "M")
    place = _first(
        change_log.scan(chosen, ["batch", "seq", "streamed_xid", "data"]),
        lambda part: _read_logical(part, segments),
    )
    return None if place is None else _read_message(change_log, place)


def _is_read(row: dict[str, Any], state: TableState) -> bool:
    """Return whether a timeline message can be decoded, or isn't about the target."""
    kind, streamed = row["kind"], row["streamed_xid"] is not None
    try:
        if kind in CONTROL_KINDS:
            read_control(row["data"])
        elif kind == "T":
            read_truncate(row["data"], streamed=streamed)
        elif kind == "R" and row["relation_id"] in state.relation_ids:
            read_relation(row["data"], streamed=streamed)
    except DecodeError:
        return False
    return True


def _read_rows(part: pa.RecordBatch, plan: DecodePlan) -> None:
    """Decode all that a run reads of these row messages, including values in the target's types."""
    for events in decode(part, plan):
        for i, kind in enumerate(plan.types):
            kind.from_text(events[f"c{i}"].combine_chunks())
        for k, i in enumerate(plan.shape.key):
            plan.types[i].from_text(events[f"o{k}"].combine_chunks())


def _read_logical(part: pa.RecordBatch, segments: Segments) -> None:
    """Decode those of these logical messages that count."""
    counting = part.filter(pa.array(segments.places(*place_columns(part)) >= 0))
    decode_logical_messages(counting["data"], place_columns(counting)[2] >= 0)


def _first(parts: Iterable[pa.RecordBatch], read: _Decode) -> tuple[int, int] | None:
    """Return the position of the first message that can't be decoded."""
    return next(_failing(parts, read), None)


def _failing(parts: Iterable[pa.RecordBatch], read: _Decode) -> Iterator[tuple[int, int]]:
    for part in parts:
        failing = part
        if _is_readable(failing, read):
            continue
        while len(failing) > 1:
            half = failing.slice(0, len(failing) // 2)
            failing = failing.slice(len(half)) if _is_readable(half, read) else half
        yield failing["batch"][0].as_py(), failing["seq"][0].as_py()


def _is_readable(part: pa.RecordBatch, read: _Decode) -> bool:
    try:
        read(part)
    except DecodeError:
        return False
    except WaldeltaError:  # A refused value isn't a problem of its message.
        return True
    return True


def _read_message(change_log: ChangeLog, place: tuple[int, int]) -> UnreadMessage:
    batch, seq = place
    chosen = (pc.field("batch") == batch) & (pc.field("seq") == seq)
    parts = change_log.scan(chosen, ["lsn", "xid8", "streamed_xid", "data"])
    (row,) = [row for part in parts for row in part.to_pylist()]
    message = UnreadMessage.of(
        row["lsn"], (row["xid8"] or 0) & XID_MASK, row["data"], row["streamed_xid"] is not None
    )
    return message.landed(batch, seq)

"""Messages of transactions, and the change log that they make."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake

from tests.support import pgoutput_encoder as enc
from waldelta.changes.decode.collapse import ColumnNumbering
from waldelta.changes.decode.decode import CHANGE_COLUMNS, DecodePlan, decode
from waldelta.changes.decode.relation_versions import read_versions
from waldelta.lake import Lake
from waldelta.lake.changelog import ChangeLog, Snapshot, Stream
from waldelta.lake.changelog.change_log import landmarks
from waldelta.pgoutput.envelope import Envelope
from waldelta.pgoutput.message_kinds import ROW_KINDS, TIMELINE_KINDS
from waldelta.pgoutput.transactions import resolve
from waldelta.postgres import PgType
from waldelta.types.type_map import target_type

T, TS = 16400, 1_700_000_000_000_000
NARROW = [("id", 23, -1, True), ("v", 25, -1, False)]
WIDE = [*NARROW, ("n", 23, -1, False)]
BOTH_WAYS = [("v", 25, -1, False), ("id", 23, -1, True)]


def row(key, xid=None, value="x"):
    return enc.insert(T, [str(key), value], xid=xid)


def described(columns=NARROW, xid=None):
    return enc.relation(T, "public", "t", columns, xid=xid)


def plain(xid, *messages, lsn=100):
    return [(xid, m) for m in (enc.begin(lsn, TS, xid), *messages, enc.commit(lsn, lsn + 1, TS))]


def chunk(xid, *messages):
    return [(xid, m) for m in (enc.stream_start(xid), *messages, enc.stream_stop())]


def commit(xid, lsn=500):
    return [(xid, enc.stream_commit(xid, lsn, lsn + 1, TS + 1))]


def aborted(xid, subxid):
    return [(subxid, enc.stream_abort(xid, subxid))]


def prepared(xid, *messages, gid="g"):
    messages = (
        enc.begin_prepare(140, 150, TS, xid, gid),
        *messages,
        enc.prepare(140, 150, TS, xid, gid),
    )
    return [(xid, m) for m in messages]


def decided(xid, gid="g", lsn=700):
    return [(xid, enc.commit_prepared(lsn, lsn + 1, TS + 2, xid, gid))]


def change_log(*batches):
    """The batches, each one call's messages, as the change log holds them."""
    parts = []
    for number, messages in enumerate(batches, 1):
        xids, data = zip(*messages, strict=True)
        enveloped = Envelope(1000, 4).add(np.arange(len(data)), np.array(xids), enc.messages(*data))
        parts.append(
            pa.table(enveloped.columns, schema=enveloped.schema).append_column(
                "batch", pa.array([number] * len(data))
            )
        )
    return pa.concat_tables(parts)


def stream_of(log, after=0):
    last = max(log["batch"].to_pylist())
    timeline = log.filter(pc.is_in(log["kind"], pa.array(TIMELINE_KINDS)))
    return Stream(timeline, resolve(landmarks(timeline), after, last))


def plan_of(log, after=0, names=("id", "v")):
    """How the rows behind a batch are decoded."""
    stream = stream_of(log, after)
    types = [target_type(PgType(23, -1, "integer")), target_type(PgType(25, -1, "text"))]
    versions = tuple(read_versions(stream, [T]))
    # As planned for a column that is found by its name alone.
    positions = tuple(
        tuple(
            (
                [c.name for c in v.relation.columns].index(name)
                if name in [c.name for c in v.relation.columns]
                else None
            )
            for name in names
        )
        for v in versions
    )
    return DecodePlan(
        ColumnNumbering(2, (0,)), names, tuple(types), versions, positions, (None, None),
        Snapshot(0, 0), stream.segments, wire_names=("", ""),
    )  # fmt: skip


def decoded(log, plan):
    """The events of all row messages, in commit order."""
    rows = (
        log.filter(pc.is_in(log["kind"], pa.array(ROW_KINDS)))
        .select(CHANGE_COLUMNS)
        .combine_chunks()
    )
    found = [
        event
        for part in rows.to_batches()
        for table in decode(part, plan)
        for event in table.to_pylist()
    ]
    return sorted(found, key=lambda event: event["ord"])


def events(log, after=0, names=("id", "v")):
    """Decoded events in commit order: key, value, commit position."""
    return [
        (int(event["c0"]), event["c1"].decode(), event["lsn"])
        for event in decoded(log, plan_of(log, after, names))
    ]


def written(folder, *batches):
    """A log of these in a lake."""
    log, landed = ChangeLog(Lake(folder.as_uri()), "slot"), change_log(*batches)
    is_timeline = pc.is_in(landed["kind"], pa.array(TIMELINE_KINDS))
    landed = landed.append_column("timeline", is_timeline).append_column(
        "moves", pa.repeat(False, len(landed))
    )
    write_deltalake(log.uri, landed, partition_by=["batch"])
    return log

"""Measures how many row messages one core decodes, casts included, next to pypgoutput on the same
bytes.

The table is ``orders(id bigint primary key, customer_id int, status text, amount numeric(12,2),
note text, updated_at timestamptz)``; half of the messages are inserts, 40% updates, 10% deletes.
"""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa

from benchmarks.results import Measurement, Round
from benchmarks.workloads import DECODER, PEER, Decode
from waldelta.lake.changelog.batch_range import split_by_relation
from waldelta.pgoutput.rows import decode_rows
from waldelta.postgres import PgType
from waldelta.types.type_map import target_type

BATCH = 50_000
RELATION, RELATIONS = 16400, 200
# A peer, not a dependency: its decoder is downloaded when the benchmark runs, and needs only the
# standard library.
PEER_PIN, PEER_PART = "pypgoutput==0.0.3", 10
ORDERS = [
    PgType(20, -1, "bigint"),
    PgType(23, -1, "integer"),
    PgType(25, -1, "text"),
    PgType(1700, ((12 << 16) | 2) + 4, "numeric(12,2)"),
    PgType(25, -1, "text"),
    PgType(1184, -1, "timestamp with time zone"),
]


def value(text: str | None) -> bytes:
    """Returns one value of a tuple."""
    return b"n" if text is None else b"t" + struct.pack("!I", len(text)) + text.encode()


def message(n: int, relation_id: int = RELATION) -> bytes:
    """Returns the n-th change."""
    key = value(str(n))
    relation = struct.pack("!I", relation_id)
    if n % 10 == 9:
        return b"D" + relation + b"K" + struct.pack("!H", 6) + key + b"n" * 5
    new = [
        key,
        value(str(n * 7919 % 100_000)),
        value(("new", "paid", "shipped")[n % 3]),
        value(f"{n % 99_999}.{n % 100:02}"),
        value(None if n % 7 == 0 else f"note {n} of an order"),
        value(f"2026-01-{n % 28 + 1:02} {n % 24:02}:{n % 60:02}:17.{n % 1_000_000:06}+00"),
    ]
    kind = b"I" if n % 10 < 5 else b"U"
    return kind + relation + b"N" + struct.pack("!H", 6) + b"".join(new)


def decode(batch: pa.Array) -> int:
    """Decode one batch with every column; returns the number of typed values."""
    rows = decode_rows(batch, len(ORDERS))
    typed = [target_type(kind).from_text(rows.new[k])[0] for k, kind in enumerate(ORDERS)]
    old = target_type(ORDERS[0]).from_text(rows.old[0])[0]
    return sum(map(len, typed)) + len(old)


def decode_workload(workload: Decode, messages: int, rounds: int) -> list[Measurement]:
    """Decode this many messages of one relation, of many relations in turn, and a part of them by
    the peer.

    The peer's seconds are extrapolated to all messages, without casts.
    """
    data = pa.array([message(n) for n in range(messages)], pa.binary())
    batches = [data.slice(first, BATCH) for first in range(0, messages, BATCH)]
    few = [message(n) for n in range(max(messages // PEER_PART, 1))]
    decoders = _peer()
    kinds = {ord("I"): decoders.Insert, ord("U"): decoders.Update, ord("D"): decoders.Delete}
    ways: list[tuple[str, Callable[[], object], float, bool]] = [
        (PEER, lambda: [kinds[one[0]](one) for one in few], messages / len(few), True),
        (DECODER, lambda: [decode(batch) for batch in batches], 1, False),
        (f"{DECODER}, {RELATIONS} relations", _many_relations(messages), 1, False),
    ]
    return [
        Measurement(workload.name, "", name, messages, _rounds(action, factor, rounds), baseline)
        for name, action, factor, baseline in ways
    ]


def _rounds(action: Callable[[], object], factor: float, rounds: int) -> list[Round]:
    action()  # Warms up.
    found = []
    for _ in range(rounds):
        began = time.process_time()
        action()
        seconds = (time.process_time() - began) * factor
        found.append(Round(seconds, {"client": seconds}))
    return found


def _many_relations(messages: int) -> Callable[[], object]:
    """Returns an action that decodes as many messages of many relations, mixed as in a batch."""
    ids = [RELATION + n * 7919 % RELATIONS for n in range(messages)]
    data = [message(n, relation_id) for n, relation_id in enumerate(ids)]
    rows = pa.table({"relation_id": pa.array(ids, pa.int64()), "data": pa.array(data, pa.binary())})
    return lambda: [
        decode(part["data"].combine_chunks()) for part in split_by_relation(rows).values()
    ]


def _peer() -> ModuleType:
    folder = Path(__file__).resolve().parent.parent / ".cache" / "pypgoutput"
    module = folder / "pypgoutput" / "decoders.py"
    if not module.exists():
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
            PEER_PIN,
        ]
        subprocess.run(pip, check=True)
    spec = importlib.util.spec_from_file_location("pypgoutput_decoders", module)
    decoders = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = decoders
    spec.loader.exec_module(decoders)
    return decoders

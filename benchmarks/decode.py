"""Row messages per second that one core decodes, casts included: ``python benchmarks/decode.py [rows] [batch]``.

The table is ``orders(id bigint primary key, customer_id int, status text, amount numeric(12,2), note text,
updated_at timestamptz)``; half of the messages are inserts, 40% updates, 10% deletes.
"""

from __future__ import annotations

import struct
import sys
import time

import pyarrow as pa

from waldelta.catalog import PgType
from waldelta.pgoutput.rows import decode_rows
from waldelta.type_map import target_type

ROWS, BATCH = 1_000_000, 50_000
ROUNDS = 3
ORDERS = [
    PgType(20, -1, "bigint"),
    PgType(23, -1, "integer"),
    PgType(25, -1, "text"),
    PgType(1700, ((12 << 16) | 2) + 4, "numeric(12,2)"),
    PgType(25, -1, "text"),
    PgType(1184, -1, "timestamp with time zone"),
]


def value(text: str | None) -> bytes:
    """One value of a tuple."""
    return b"n" if text is None else b"t" + struct.pack("!I", len(text)) + text.encode()


def message(n: int) -> bytes:
    """The n-th change."""
    key = value(str(n))
    if n % 10 == 9:
        return b"D" + struct.pack("!I", 16400) + b"K" + struct.pack("!H", 6) + key + b"n" * 5
    new = [
        key,
        value(str(n * 7919 % 100_000)),
        value(("new", "paid", "shipped")[n % 3]),
        value(f"{n % 99_999}.{n % 100:02}"),
        value(None if n % 7 == 0 else f"note {n} of an order"),
        value(f"2026-01-{n % 28 + 1:02} {n % 24:02}:{n % 60:02}:17.{n % 1_000_000:06}+00"),
    ]
    kind = b"I" if n % 10 < 5 else b"U"
    return kind + struct.pack("!I", 16400) + b"N" + struct.pack("!H", 6) + b"".join(new)


def decode(batch: pa.Array) -> int:
    """Decode one batch, every column of it; gives the number of typed values."""
    rows = decode_rows(batch, len(ORDERS))
    typed = [target_type(kind).from_text(rows.new[k])[0] for k, kind in enumerate(ORDERS)]
    old = target_type(ORDERS[0]).from_text(rows.old[0])[0]
    return sum(map(len, typed)) + len(old)


def main(row_count: int = ROWS, batch_rows: int = BATCH) -> None:
    """Print the best of some rounds."""
    data = pa.array([message(n) for n in range(row_count)], pa.binary())
    batches = [data.slice(first, batch_rows) for first in range(0, row_count, batch_rows)]
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        for batch in batches:
            decode(batch)
        best = min(best, time.process_time() - begin)
    print(f"{row_count / best:,.0f} row messages/s on one core ({row_count:,} in {best:.2f} s, {batch_rows:,} a batch)")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

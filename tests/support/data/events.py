"""Events of rows, and what they become one by one."""

import random

import pyarrow as pa

from waldelta.changes.decode.collapse import ColumnNumbering, event_schema

NUMBERING = ColumnNumbering(column_count=3, key=(0,), toastable=(2,))
TYPES = [pa.int64(), pa.string(), pa.string()]


def events_table(events) -> pa.Table:
    rows = [
        {
            "ord": place,
            "op": ord(op),
            "o0": old,
            "c0": new,
            "c1": value,
            "c2": None if toast == "~" else toast,
            "u2": toast == "~",
            "lsn": place,
            "commit_ts": None,
        }
        for place, (op, old, new, value, toast) in enumerate(events)
    ]
    return pa.Table.from_pylist(rows, schema=event_schema(NUMBERING, TYPES))


def apply_one_by_one(target: dict, events) -> dict:
    """What PostgreSQL's subscriber does: every event on its own, missing rows skipped."""
    rows = dict(target)
    for op, old, new, value, toast in events:
        if op == "I":
            rows[new] = (value, toast)
        elif old in rows:
            _, kept = rows.pop(old)
            if op == "U":
                rows[new] = (value, kept if toast == "~" else toast)
    return rows


def random_events(rng: random.Random, target: dict, count: int) -> list:
    """A consistent stream: inserts of free keys, moves onto them, updates and deletes."""
    live, events = set(target), []
    for number in range(count):
        free = [key for key in range(12) if key not in live]
        op = rng.choice("IUUMD")
        if op == "I" and free:
            key = rng.choice(free)
            live.add(key)
            events.append(("I", None, key, f"i{number}", f"t{number}"))
        elif live and (op != "M" or free):
            key = rng.choice(sorted(live))
            toast = rng.choice(["~", f"t{number}"])
            if op == "D":
                live.remove(key)
                events.append(("D", key, None, None, None))
            else:
                new = rng.choice(free) if op == "M" else key
                live.remove(key)
                live.add(new)
                events.append(("U", key, new, f"u{number}", toast))
    return events

"""What targets that keep more than a mirror promise of their rows; the key is ``id``, ``part``.

A row of the source is a tuple of the columns ``names``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Rows = Sequence[Row]


def check_mode(
    mode: str,
    rows: Rows,
    names: Sequence[str],
    now: list[tuple],
    then: Mapping[int, list[tuple]],
) -> None:
    """Check the rows of a target by what its source has ``now``, and had ``then``, by position."""
    match mode:
        case "history":
            check_intervals(rows)
            says = _sorted((row for row in rows if row["_wd_valid_to_lsn"] is None), names)
        case "changelog":
            changes = [row for row in rows if row["_wd_op"] != "snapshot"]
            places = {(row["_wd_lsn"], row["_wd_seq"]) for row in changes}
            assert len(places) == len(changes)
            says = replayed(rows, names)
        case _:
            assert len({_key(row) for row in rows}) == len(rows)
            assert all((row["_wd_deleted_at"] is not None) == row["_wd_deleted"] for row in rows)
            says = _sorted((row for row in rows if not row["_wd_deleted"]), names)
    assert says == now
    at = {"history": as_of, "changelog": replayed}.get(mode)
    for lsn, expected in then.items() if at is not None else ():
        assert (lsn, at(rows, names, lsn)) == (lsn, expected)


def as_of(rows: Rows, names: Sequence[str], lsn: int) -> list[tuple]:
    """What a history says of a position: after every commit before it."""
    states = (
        row
        for row in rows
        if row["_wd_valid_from_lsn"] < lsn
        and (row["_wd_valid_to_lsn"] is None or row["_wd_valid_to_lsn"] >= lsn)
    )
    return _sorted(states, names)


def replayed(rows: Rows, names: Sequence[str], lsn: int | None = None) -> list[tuple]:
    """What a changelog says when its rows are done one by one, in order."""
    now: dict[tuple, Row] = {}
    for row in sorted(rows, key=lambda r: (r["_wd_lsn"], r["_wd_seq"])):
        if lsn is not None and row["_wd_lsn"] >= lsn:
            break
        assert not row["_wd_unchanged"], row
        if row["_wd_op"] == "truncate":
            now.clear()
        elif row["_wd_op"] == "delete":
            del now[_key(row)]
        else:
            if row["_wd_before"] is not None:
                del now[tuple(row["_wd_before"].values())]
            assert row["_wd_op"] != "insert" or _key(row) not in now
            now[_key(row)] = row
    return _sorted(now.values(), names)


def check_intervals(rows: Rows) -> None:
    """Of each key states follow each other, and the last one alone may be open."""
    by_key: dict[tuple, list[Row]] = {}
    for row in rows:
        by_key.setdefault(_key(row), []).append(row)
    for states in by_key.values():
        states.sort(key=lambda r: r["_wd_valid_from_lsn"])
        for state, following in zip(states, [*states[1:], None], strict=True):
            until = state["_wd_valid_to_lsn"]
            assert until is None or until > state["_wd_valid_from_lsn"]
            assert state["_wd_valid_to"] is None or state["_wd_valid_to"] >= state["_wd_valid_from"]
            assert following is None or (
                until is not None and until <= following["_wd_valid_from_lsn"]
            ), states


def _key(row: Row) -> tuple:
    return row["id"], row["part"]


def _sorted(rows: Iterable[Row], names: Sequence[str]) -> list[tuple]:
    return sorted((tuple(row[name] for name in names) for row in rows), key=repr)

"""Row versions as net changes of targets that keep more than a mirror, by the rows they have."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from waldelta.arrow import UTC_TIME
from waldelta.changes.decode.row_states import Truncation
from waldelta.changes.merge.mode_target import ModeTarget
from waldelta.lake import Lake, query
from waldelta.target_modes.modes import MODES
from waldelta.types.hstore import Hstore
from waldelta.types.numeric import Number, NumericAsText
from waldelta.types.text import Text

RAW = Hstore().arrow
TYPES = {"id": Number("bigint", pa.int64(), "int8"), "part": Text(), "big": Text()}
OWN = {
    "history": {
        "_wd_valid_from": UTC_TIME, "_wd_valid_to": UTC_TIME,
        "_wd_valid_from_lsn": pa.int64(), "_wd_valid_to_lsn": pa.int64(),
    },
    "soft_delete": {"_wd_deleted": pa.bool_(), "_wd_deleted_at": UTC_TIME},
    "changelog": {
        "_wd_op": pa.string(), "_wd_seq": pa.int64(), "_wd_xid": pa.int64(),
        "_wd_unchanged": pa.list_(pa.string()),
        # The key's columns, in the order in which the first copy had them.
        "_wd_before": pa.struct([("part", pa.string()), ("id", pa.int64())]),
    },
}  # fmt: skip
STATES = {"to_lsn": pa.int64(), "to_ts": UTC_TIME}
CHANGES = {"place": pa.int64(), "xid": pa.int64(), "moved": pa.bool_()}
CHANGES |= {"o0": pa.int64(), "o1": pa.string()}


def at(lsn: int) -> datetime:
    """The time of a position."""
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=lsn)


def target_of(mode: str, truncates=()) -> ModeTarget:
    """A target with a key of two columns and one large value."""
    fields = {"id": pa.int64(), "part": pa.string(), "big": pa.string(), "_wd_lsn": pa.int64()}
    fields |= {"_wd_commit_ts": UTC_TIME, "_wd_raw": RAW, **OWN[mode]}
    return ModeTarget(MODES[mode], TYPES, (0, 1), (2,), pa.schema(list(fields.items())), truncates)


def versions(mode: str, *rows: dict) -> pa.Table:
    """Row versions, each of a position; what isn't given is null, and no value is unchanged."""
    fields = {"action": pa.string(), "b0": pa.int64(), "b1": pa.string(), "c0": pa.int64()}
    fields |= {"c1": pa.string(), "c2": pa.string(), "u2": pa.bool_(), "lsn": pa.int64()}
    fields |= {"commit_ts": UTC_TIME} | (CHANGES if mode == "changelog" else STATES) | {"raw": RAW}
    given = [
        {"u2": False, "moved": False} | row
        | {"commit_ts": at(row["lsn"]), "to_ts": at(row["to_lsn"]) if row.get("to_lsn") else None}
        for row in rows
    ]  # fmt: skip
    return pa.Table.from_pylist(given, pa.schema(list(fields.items())))


def held(mode: str, *rows: dict) -> pa.Table:
    """Rows that the target has."""
    return pa.Table.from_pylist([{"part": "p", **row} for row in rows], target_of(mode).schema)


def changes(mode: str, net: pa.Table) -> list[dict]:
    """Net changes by column: the values that they write, and the key of the row they change."""
    written = target_of(mode).net_columns
    return [
        {
            "action": row["action"],
            "of": tuple(row[base] for base in written.bases),
            **{
                name: row[f"c{i}"]
                for i, name in enumerate(written.names)
                if row["action"] != "delete" and not row[f"u{i}"] and row[f"c{i}"] is not None
            },
        }
        for row in net.to_pylist()
    ]


KEY = {"b0": 1, "b1": "p"}
NEW = {"c0": 1, "c1": "p", "c2": "new"}
VALUES = {"id": 1, "part": "p"}


@pytest.mark.parametrize(
    ("mode", "row", "of", "expected"),
    [
        ("history", {"action": "insert", **NEW, "lsn": 20}, None,
         [{"action": "insert", "of": (None, None, None), "big": "new", "_wd_valid_from": at(20),
           "_wd_valid_from_lsn": 20}]),
        # The state that a row had ends; an update without a value has the target's.
        ("history", {"action": "delete", **KEY, "lsn": 20, "to_lsn": 20}, {"_wd_valid_from_lsn": 5},
         [{"action": "update", "of": (1, "p", 5), "_wd_valid_to": at(20), "_wd_valid_to_lsn": 20}]),
        ("history", {"action": "update", **KEY, **NEW, "c2": None, "u2": True, "lsn": 20},
         {"_wd_valid_from_lsn": 5, "big": "old"},
         [{"action": "insert", "of": (None, None, None), "big": "old", "_wd_valid_from": at(20),
           "_wd_valid_from_lsn": 20}]),
        # One that began where it ends was never visible; a clock that was set back ends none early.
        ("history", {"action": "delete", **KEY, "lsn": 20, "to_lsn": 20},
         {"_wd_valid_from_lsn": 20}, [{"action": "delete", "of": (1, "p", 20)}]),
        ("history", {"action": "delete", **KEY, "lsn": 20, "to_lsn": 20},
         {"_wd_valid_from_lsn": 5, "_wd_valid_from": at(30)},
         [{"action": "update", "of": (1, "p", 5), "_wd_valid_to": at(30), "_wd_valid_to_lsn": 20}]),
        # What the target lacks is neither changed nor ended.
        ("history", {"action": "update", **KEY, **NEW, "lsn": 20}, None, []),
        ("history", {"action": "delete", **KEY, "lsn": 20, "to_lsn": 20}, None, []),
        ("history", {"action": "skip", **KEY, "lsn": 20}, {"_wd_valid_from_lsn": 5}, []),
        ("soft_delete", {"action": "insert", **NEW, "lsn": 20}, None,
         [{"action": "upsert", "of": (1, "p"), "big": "new", "_wd_deleted": False}]),
        ("soft_delete", {"action": "insert", **NEW, "lsn": 20, "to_lsn": 22}, None,
         [{"action": "upsert", "of": (1, "p"), "big": "new", "_wd_deleted": True, "_wd_lsn": 22,
           "_wd_commit_ts": at(22), "_wd_deleted_at": at(22)}]),
        ("soft_delete", {"action": "delete", **KEY, "lsn": 20, "to_lsn": 20},
         {"_wd_deleted": False, "_wd_lsn": 5, "_wd_commit_ts": at(30)},
         [{"action": "update", "of": (1, "p"), "_wd_deleted": True, "_wd_lsn": 20,
           "_wd_commit_ts": at(30), "_wd_deleted_at": at(30)}]),
        ("changelog", {"action": "update", **KEY, **NEW, "c2": None, "u2": True, "lsn": 20,
                       "place": 7, "xid": 3}, {"big": "old"},
         [{"action": "insert", "of": (), "big": "old", "_wd_op": "update", "_wd_seq": 7,
           "_wd_xid": 3}]),
        ("changelog", {"action": "update", **KEY, **NEW, "c2": None, "u2": True, "lsn": 20,
                       "moved": True, "o0": 4, "o1": "q"}, None,
         [{"action": "insert", "of": (), "_wd_op": "update", "_wd_unchanged": ["big"],
           "_wd_before": {"part": "q", "id": 4}}]),
    ],
)  # fmt: skip
def test_a_row_version_changes_the_current_row(mode, row, of, expected):
    rows = held(mode, *([] if of is None else [{"id": 1, **of}]))
    net = target_of(mode).net_rows(versions(mode, row), rows)
    new = {**VALUES, "_wd_lsn": row["lsn"], "_wd_commit_ts": at(row["lsn"])}
    expected = [(new if "big" in one or "_wd_op" in one else {}) | one for one in expected]
    assert changes(mode, net) == expected


def test_a_state_ends_where_its_key_ends_not_where_an_equal_one_begins():
    """A key 1.0 becomes 1.00: what may be there at the new key ends later, and is another row."""
    before = target_of("history")
    fields = {field.name: field.type for field in before.schema} | {"part": pa.string()}
    kinds = {"id": NumericAsText(), "part": Text(), "big": Text()}
    schema = pa.schema(list((fields | {"id": pa.string()}).items()))
    target = ModeTarget(before.mode, kinds, (0, 1), (2,), schema)
    rows = pa.Table.from_pylist([{"id": "1.0", "part": "p", "_wd_valid_from_lsn": 5}], schema)
    ends = versions("history", *({"action": "delete", "lsn": n, "to_lsn": n} for n in (20, 30)))
    for name, keys in {"b0": ["1.0", "1.00"], "b1": ["p", "p"]}.items():
        ends = ends.set_column(ends.column_names.index(name), name, pa.array(keys))
    net = changes("history", target.net_rows(ends, rows))
    assert [(one["of"], one["_wd_valid_to_lsn"]) for one in net] == [(("1.0", "p", 5), 20)]


def test_every_copy_of_a_row_that_another_writer_doubled_ends():
    rows = held("history", *({"id": 1, "_wd_valid_from_lsn": lsn} for lsn in (4, 5)))
    end = versions("history", {"action": "delete", **KEY, "lsn": 20, "to_lsn": 20})
    net = changes("history", target_of("history").net_rows(end, rows))
    assert [one["of"] for one in net] == [(1, "p", 4), (1, "p", 5)]


def test_a_truncate_is_a_change_of_a_changelog():
    target = target_of("changelog", (Truncation(9, 20, 20, 3),))
    assert changes("changelog", target.truncated_rows()) == [
        {"action": "insert", "of": (), "_wd_op": "truncate", "_wd_seq": 9, "_wd_xid": 3,
         "_wd_lsn": 20, "_wd_commit_ts": at(20)},
    ]  # fmt: skip


LOG = [
    {"id": 1, "big": "a", "_wd_op": "snapshot", "_wd_lsn": 5, "_wd_seq": -1},
    {"id": 2, "big": "b", "_wd_op": "snapshot", "_wd_lsn": 5, "_wd_seq": -1},
    {"id": 1, "big": "c", "_wd_op": "update", "_wd_lsn": 10, "_wd_seq": 2},
]
MOVE = {"id": 3, "big": "b", "_wd_op": "update", "_wd_lsn": 11, "_wd_seq": 3}
MOVE |= {"_wd_before": {"part": "p", "id": 2}}


@pytest.mark.parametrize(
    ("later", "current"),
    [
        ([], {1: "c", 2: "b"}),
        ([MOVE], {1: "c", 3: "b"}),
        # A key that is written in another way, and equals the one before.
        ([MOVE | {"_wd_before": {"part": "p", "id": 3}}], {1: "c", 2: "b", 3: "b"}),
        # A row takes the key that another one left in the same transaction.
        ([MOVE, MOVE | {"id": 2, "big": "n", "_wd_seq": 4, "_wd_before": None}],
         {1: "c", 2: "n", 3: "b"}),
        ([{"id": 1, "_wd_op": "delete", "_wd_lsn": 12, "_wd_seq": 4}], {2: "b"}),
        ([{"_wd_op": "truncate", "part": None, "_wd_lsn": 12, "_wd_seq": 4},
          {"id": 4, "big": "d", "_wd_op": "insert", "_wd_lsn": 12, "_wd_seq": 5}], {4: "d"}),
    ],
)  # fmt: skip
def test_a_changelog_tells_its_current_rows(later, current, tmp_path):
    """Whatever the order in which its files are read, by Arrow as by a query."""
    rows = held("changelog", *LOG, *later)
    rows = rows.take(pa.array(np.random.default_rng(1).permutation(len(rows))))
    target = target_of("changelog")
    assert target.mode.may_be_current(rows, lambda keys: np.ones(len(keys), np.bool_)).all()
    found = target.mode.choose_current(rows, target)
    assert {row["id"]: row["big"] for row in found.to_pylist()} == current
    place = Lake(tmp_path.as_uri()).target("s.t")
    write_deltalake(place.uri, rows)
    text = target.mode.live_query(["id", "big"], target.key_names)
    found = query(text.format(rows="target"), {"target": place.open()}).read_all()
    assert {row["id"]: row["big"] for row in found.to_pylist()} == current


@pytest.mark.parametrize(
    ("mode", "action", "expected"),
    [
        ("history", "insert", ["insert"]), ("history", "update", ["insert", "update"]),
        ("history", "delete", ["update"]),
        ("soft_delete", "insert", ["upsert"]), ("soft_delete", "update", ["upsert"]),
        ("soft_delete", "delete", ["update"]),
        ("changelog", "insert", ["insert"]), ("changelog", "delete", ["insert"]),
    ],
)  # fmt: skip
def test_a_difference_from_a_snapshot_is_a_change_at_its_position(mode, action, expected):
    row = {"action": action, **KEY, "lsn": 1}
    row |= {} if action == "delete" else NEW
    rows = held(mode, {"id": 1, "_wd_valid_from_lsn": 5, "_wd_deleted": False, "_wd_lsn": 5}
                if mode != "changelog" else {"id": 1, "_wd_lsn": 5})  # fmt: skip
    target = target_of(mode)
    differences = versions(mode, row).drop_columns(
        ["u2", *(STATES if mode != "changelog" else CHANGES)]
    )
    target = ModeTarget(target.mode, TYPES, (0, 1), (), target.schema)
    net = changes(mode, target.net_rows(target.versions_of(differences, 40, 40, 6), rows))
    assert [one["action"] for one in net] == expected
    assert {one.get("_wd_lsn", 40) for one in net} == {40}
    if mode == "changelog":
        assert [(one["_wd_op"], one["_wd_seq"], one["id"]) for one in net] == [(action, -7, 1)]

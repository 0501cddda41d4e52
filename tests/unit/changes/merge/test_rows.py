"""Which rows net changes take where there is no key, and raw values of updated rows."""

import random

import numpy as np
import pyarrow as pa
import pytest

from tests.support.data.pg_types import ANY_NUMERIC, FLOAT8, INT4, array_of
from waldelta.changes.merge.rows import codes_of_duplicates, combined_raw, match_codes, removals_of
from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.snapshot.read_table import RAW_TYPE
from waldelta.types.type_map import target_type

KINDS = [target_type(t, DEFAULT_TYPES) for t in (ANY_NUMERIC, FLOAT8, array_of(FLOAT8), INT4)]
COLUMNS = [(f"column {i}", kind) for i, kind in enumerate(KINDS)]


def row(numeric=None, number=None, numbers=None, whole=None):
    return (numeric, number, numbers, whole)


def matched(rows, changes, columns=COLUMNS, *, metadata=True) -> list[int]:
    """``rows`` are (values, raw), ``changes`` are (action, values, raw, place)."""
    names = [name for name, _ in columns]
    held = {
        name: pa.array([values[i] for values, _ in rows], columns[i][1].arrow)
        for i, name in enumerate(names)
    }
    net = {"action": pa.array([change[0] for change in changes], pa.string())}
    net |= {
        f"b{i}": pa.array([change[1][i] for change in changes], kind.arrow)
        for i, (_, kind) in enumerate(columns)
    }
    net["place"] = pa.array([change[3] for change in changes], pa.int64())
    if metadata:
        held["_wd_raw"] = pa.array([raw for _, raw in rows], RAW_TYPE)
        net["base_raw"] = pa.array([change[2] for change in changes], RAW_TYPE)
    rows, removals = pa.table(held), removals_of(changes := pa.table(net))
    removed = changes.take(pa.array(removals))
    codes = codes_of_duplicates(rows, removed, columns, metadata=metadata)
    return np.append(removals, -1)[match_codes(*codes, len(rows))].tolist()


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        pytest.param([row("x"), row("x")], [row("x")], [0, -1], id="one of two"),
        pytest.param([row(), row(whole=0)], [row()], [0, -1], id="null is equal, and no 0"),
        pytest.param([row("1.00"), row("1.0")], [row("1.0")], [-1, 0], id="written alike first"),
        pytest.param([row("1.00")], [row("1.0")], [0], id="equal, if none is written alike"),
        pytest.param([row("1.00"), row("1.0")], [row("1.0"), row("1.0")], [1, 0], id="both"),
        pytest.param([row("10"), row("100")], [row("100")], [-1, 0], id="zeros that count"),
        pytest.param([row(None, 0.0), row(None, -0.0)], [row(None, -0.0)], [-1, 0], id="-0"),
        pytest.param([row(None, NAN)], [row(None, NAN)], [0], id="NaN"),
        pytest.param(
            [row(numbers=[0.0, None]), row(numbers=[0.0]), row(numbers=None), row(numbers=[])],
            [row(numbers=[-0.0, None]), row(numbers=[])],
            [0, -1, -1, 1],
            id="arrays",
        ),
    ],
)
def test_which_row_is_taken(rows, changes, expected):
    given = [("delete", values, None, place) for place, values in enumerate(changes)]
    assert matched([(values, None) for values in rows], given) == expected


def test_raw_values_are_compared_in_any_order():
    rows = [(row(), {"a": "1", "b": "2"}), (row(), {}), (row(), {"a": "1"})]
    changes = [
        ("delete", row(), {"b": "2", "a": "1"}, 0),
        ("insert", row(), {"a": "1"}, 1),
        ("update", row(), None, 2),
    ]
    assert matched(rows, changes) == [0, 2, -1]


def test_the_earlier_change_takes_the_only_row():
    changes = [("delete", row("x"), None, 7), ("update", row("x"), None, 3)]
    assert matched([(row("x"), None)], changes) == [1]


def test_rows_without_columns_are_equal():
    changes = [("delete", (), None, 0)]
    assert matched([((), None), ((), None)], changes, []) == [0, -1]


def test_a_target_without_metadata_columns():
    changes = [("delete", row("1.0"), None, 0)]
    assert matched([(row("1.00"), None), (row(), None)], changes, metadata=False) == [0, -1]


VALUES = [[None, "1.0", "1.00", "10"], [None, 0.0, -0.0], [None, [0.0], [-0.0], []], [None, 1]]
RAWS = [None, {}, {"a": "1"}]


def equal_to(values, raw):
    numeric, number, numbers, whole = values
    shortest = numeric.rstrip("0").rstrip(".") if numeric and "." in numeric else numeric
    return (shortest, number, tuple(numbers) if numbers is not None else None, whole, bool(raw))


def written_as(values, raw):
    return repr((values, bool(raw)))


def test_random_changes_take_what_a_plain_simulation_takes():
    """One row for each change while there is one, preferring rows that are written alike."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)

    def some(most):
        return [
            (tuple(rng.choice(of) for of in VALUES), rng.choice(RAWS))
            for _ in range(rng.randrange(most))
        ]

    for _ in range(200):
        rows, olds = some(60), some(30)
        changes = [
            (rng.choice(["update", "delete", "insert"]), *old, place)
            for place, old in enumerate(olds)
        ]
        rng.shuffle(changes)
        taken = matched(rows, changes)
        removals = sorted((c for c in changes if c[0] != "insert"), key=lambda change: change[3])
        left = [equal_to(*held) for held in rows]
        expected = []
        for change in removals:
            if (equal := equal_to(*change[1:3])) in left:
                left.remove(equal)
                expected.append(change)
        assert sorted(changes[i][3] for i in taken if i >= 0) == [c[3] for c in expected], seed
        for i, old in zip(taken, rows, strict=True):
            assert i < 0 or equal_to(*old) == equal_to(*changes[i][1:3]), seed
        texts = {written_as(*old) for old in rows}
        for text in texts:
            of = [i for i, held in zip(taken, rows, strict=True) if written_as(*held) == text]
            sought = sum(written_as(*c[1:3]) == text for c in removals)
            assert sum(i >= 0 for i in of) >= min(sought, len(of)), seed


def test_raw_values_of_columns_that_keep_theirs():
    old = pa.array([[("a", "1"), ("b", "2")], [("b", "3")], None, [("a", "4")]], RAW_TYPE)
    sent = pa.array([[("b", "9")], None, None, None], RAW_TYPE)
    keeps = {"a": np.array([True, True, True, False])}
    assert combined_raw(old, sent, keeps).to_pylist() == [
        [("a", "1"), ("b", "9")],
        None,
        None,
        None,
    ]

"""Unfold: of any changes each state and each change is a row, however they were cut into ranges."""

import random
from operator import itemgetter
from types import SimpleNamespace

import pyarrow as pa
import pytest

from tests.support.seeds import chosen_seed, rounds
from waldelta.changes.decode.collapse import DELETE, INSERT, UPDATE, ColumnNumbering, event_schema
from waldelta.changes.decode.row_states import Truncation, Unfolding, row_versions
from waldelta.target_modes.target_mode import Fold

TS = pa.timestamp("us", tz="UTC")
NUMBERING = ColumnNumbering(2, (0,), (1,))
SCHEMA = event_schema(NUMBERING, [pa.int64(), pa.string()]).append(pa.field("xid", pa.int64()))


def event(place, op, commit, old=None, new=None, value=None, at=None):
    """One change; an update without a value leaves a large one as it is."""
    unchanged = op == UPDATE and value is None
    return {
        "ord": place,
        "op": op,
        "o0": old,
        "c0": new,
        "c1": value,
        "u1": unchanged,
        "lsn": commit,
        "commit_ts": commit if at is None else at,
        "xid": commit,
    }


class Table:
    """A source's table, the changes sent, and the states that its transactions left."""

    def __init__(self, rows):
        self.rows, self.events, self.truncates, self.place = dict(rows), [], [], 0
        self.states = {key: [(0, value)] for key, value in rows.items()}
        self.closed = []

    def transaction(self, commit, rng):
        """Some statements; what is between them is no state."""
        before = dict(self.rows)
        emptied = False
        # The clock may have been set back.
        at = commit - rng.choice([0, 0, 4])
        for _ in range(rng.randint(1, 4)):
            emptied |= self._statement(commit, at, rng)
        for key in before.keys() | self.rows.keys():
            touched = emptied or any(
                e["lsn"] == commit and key in (e["o0"], e["c0"]) for e in self.events
            )
            if touched and key in before:
                since, value = self.states[key].pop()
                self.closed.append((key, value, since, commit))
            if touched and key in self.rows:
                self.states.setdefault(key, []).append((commit, self.rows[key]))

    def _statement(self, commit, at, rng):
        self.place += 1
        key, other, value = rng.randint(1, 5), rng.randint(1, 5), f"v{self.place}"
        if rng.random() < 0.08:
            self.rows.clear()
            self.truncates.append(Truncation(self.place, commit, at, commit))
            return True
        if key not in self.rows:
            self.rows[key] = value
            self.events.append(event(self.place, INSERT, commit, None, key, value, at))
        elif rng.random() < 0.3:
            del self.rows[key]
            self.events.append(event(self.place, DELETE, commit, key, at=at))
        elif other in self.rows and other != key:
            return False
        else:
            sent = value if rng.random() < 0.5 else None
            held = self.rows.pop(key)
            self.rows[other] = sent or held
            self.events.append(event(self.place, UPDATE, commit, key, other, sent, at))
        return False

    @property
    def all_states(self):
        """Every state with its begin and its end."""
        still = [
            (key, value, since, None)
            for key, found in self.states.items()
            for since, value in found
        ]
        return sorted([*self.closed, *still], key=repr)


def applied(target, rows, truncates):
    """What the MERGE of a history does, row by row; ``target`` are [key, value, from, to]."""
    now = {row[0]: row for row in target if row[3] is None}
    new, ended = [], {}
    for row in rows:
        if row["action"] == "delete":
            assert row["b0"] not in ended
            ended[row["b0"]] = row["to_lsn"]
        elif row["action"] in ("insert", "update"):
            value = now[row["b0"]][1] if row["u1"] else row["c1"]
            new.append([row["c0"], value, row["lsn"], row["to_lsn"]])
    for key, row in now.items():
        if key in ended:
            row[3] = ended[key]
        elif truncates:
            row[3] = truncates[0].lsn
    return [*target, *new]


def follow_each_other_in_time(rows):
    """No state ends before it began, nor begins before its key's last one ended."""
    ends = {}
    states = [row for row in rows if row["action"] in ("insert", "update")]
    for row in sorted(states, key=itemgetter("lsn")):
        assert (
            ends.get(row["c0"], row["commit_ts"])
            <= row["commit_ts"]
            <= (row["to_ts"] or row["commit_ts"])
        )
        ends[row["c0"]] = row["to_ts"]


def unfolded(table, unfolding, since=0):
    events = pa.Table.from_pylist(table.events[since:], SCHEMA)
    return row_versions(events, NUMBERING, unfolding).to_pylist()


@pytest.mark.parametrize("ranges", [1, 3])
def test_a_history_has_every_state_that_a_transaction_left(ranges):
    """The seed is printed; WALDELTA_SEED repeats one."""
    seed = chosen_seed()
    for n in rounds(200):
        rng = random.Random(f"{seed} {n}")
        table = Table({1: "a", 2: "b", 3: "c"})
        target = [[key, value, 0, None] for key, value in table.rows.items()]
        for part in range(ranges):
            since, emptied = len(table.events), len(table.truncates)
            for commit in range(10):
                table.transaction(10 + part * 10 + commit, rng)
            truncates = tuple(table.truncates[emptied:])
            rows = unfolded(table, Unfolding(Fold.STATES, 0, truncates), since)
            target = applied(target, rows, truncates)
            follow_each_other_in_time(rows)
        assert sorted(map(tuple, target), key=repr) == table.all_states, (
            f"WALDELTA_SEED={seed}",
            n,
            table.events,
        )


def test_soft_delete_has_one_row_for_each_key_its_last_one():
    """The seed is printed; WALDELTA_SEED repeats one."""
    seed = chosen_seed()
    for n in rounds(200):
        rng = random.Random(f"{seed} {n}")
        table = Table({1: "a", 2: "b", 3: "c"})
        target = {key: (value, False) for key, value in table.rows.items()}
        for commit in range(10, 25):
            table.transaction(commit, rng)
        rows = unfolded(table, Unfolding(Fold.LAST_STATES, 0, tuple(table.truncates)))
        touched = [row["b0"] if row["action"] == "delete" else row["c0"] for row in rows]
        assert len(touched) == len(set(touched))
        before = dict(target)
        for row in rows:
            if row["action"] == "delete":
                target[row["b0"]] = (before[row["b0"]][0], True) if row["b0"] in before else None
            else:
                target[row["c0"]] = (
                    before[row["b0"]][0] if row["u1"] else row["c1"],
                    row["to_lsn"] is not None,
                )
        if table.truncates:
            target |= {key: (target[key][0], True) for key in before.keys() - set(touched)}
        live = {key: row[0] for key, row in target.items() if row is not None and not row[1]}
        assert live == table.rows, (f"WALDELTA_SEED={seed}", n, table.events)


def test_a_changelog_has_every_change_in_order():
    """An unchanged large value is the newest that the range tells; a move tells the key before."""
    table = Table({1: "a", 2: "b"})
    table.events = [
        event(1, UPDATE, 10, 1, 1, "new"),
        event(2, UPDATE, 10, 1, 7),
        event(3, UPDATE, 11, 2, 2),
        event(4, DELETE, 12, 7),
    ]
    rows = unfolded(table, Unfolding(Fold.CHANGES))
    told = [
        (r["action"], r["c0"], r["c1"], r["u1"], r["o0"], r["b0"], r["place"], r["xid"])
        for r in rows
    ]
    assert told == [
        ("update", 1, "new", False, None, 1, 1, 10),
        ("update", 7, "new", False, 1, 1, 2, 10),
        ("update", 2, None, True, None, 2, 3, 11),
        ("delete", 7, None, False, None, 1, 4, 12),
    ]


CASES = {
    "what one transaction did and undid is no state":
     ([event(1, INSERT, 10, None, 9, "x"), event(2, DELETE, 10, 9)], Unfolding(Fold.STATES),
      [("delete", 10)]),
    "what the copy may have seen begins with the copy":
     ([event(1, INSERT, 10, None, 9, "x"), event(2, UPDATE, 30, 9, 9, "y")],
      Unfolding(Fold.STATES, 20), [("delete", 20), ("insert", 20), ("insert", 30)]),
    "an update behind a TRUNCATE has no row":
     ([event(2, UPDATE, 10, 9, 9, "x")], Unfolding(Fold.STATES, 0, (Truncation(1, 9, 9, 9),)),
      [("skip", 10)]),
}  # fmt: skip


SET_BACK = {
    "by a later change": ([event(1, INSERT, 10, None, 9, "x", 1000),
                           event(2, DELETE, 20, 9, at=900)], (), [(1000, 1000)]),
    "by a TRUNCATE": ([event(1, INSERT, 10, None, 9, "x", 1000)], (Truncation(2, 20, 900, 20),),
                      [(1000, 1000)]),
    "by what comes behind one":
     ([event(1, INSERT, 10, None, 9, "x", 900), event(3, INSERT, 30, None, 9, "y", 950)],
      (Truncation(2, 20, 1000, 20),), [(900, 1000), (1000, None)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SET_BACK)
def test_no_state_ends_before_it_began(name):
    """Whatever the source's clock does, states follow each other in time."""
    events, truncates, expected = SET_BACK[name]
    rows = unfolded(SimpleNamespace(events=events), Unfolding(Fold.STATES, 0, truncates))
    told = sorted(
        (row["lsn"], row["commit_ts"], row["to_ts"]) for row in rows if row["action"] == "insert"
    )
    assert [
        tuple(moment and pa.scalar(moment, TS).value for moment in row[1:]) for row in told
    ] == expected


@pytest.mark.parametrize("name", CASES)
def test_states(name):
    events, unfolding, expected = CASES[name]
    rows = row_versions(pa.Table.from_pylist(events, SCHEMA), NUMBERING, unfolding).to_pylist()
    assert sorted((row["action"], row["lsn"]) for row in rows) == expected

"""The ledger on a local disk: total order, reads of few files, and what pruning keeps."""

import json
import resource
import threading
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.cases import cases
from tests.support.bookkeeping import append_by_kind, table_at, write_earlier
from tests.support.disk import Disk
from waldelta.errors import LateWriter, StateError, TargetNotWritable
from waldelta.lake import Lake, Overtaken, bookkeeping_uri, delta_target, local_path
from waldelta.lake.ledger import (
    BatchCut,
    ColumnState,
    Gap,
    Ledger,
    Run,
    SlotMove,
    StorageState,
    TableState,
    TargetCut,
    now,
)
from waldelta.lake.ledger import table as ledger_table
from waldelta.lake.ledger.ledger import next_generation
from waldelta.lake.ledger.prune_ledger import (
    keep_cuts,
    keep_gaps,
    keep_moves,
    keep_states,
    prune_ledger,
)
from waldelta.lake.ledger.records import (
    FORMAT,
    AttributeState,
    ConsumedBatch,
    FileState,
    LabelState,
    schema_of,
)
from waldelta.lake.ledger.table import read_sorted
from waldelta.slot.gaps import CLOSED, OPEN, open_gaps

DAY = timedelta(days=1)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
OLD = NOON - 100 * DAY


@dataclass(frozen=True, slots=True)
class LaterRun(Run):
    """A run as a later version records it."""

    later: int | None = None


def move(
    event: str, lsn: int, at: datetime = NOON, *, slot: str = "s", incarnation: str = "0/1"
) -> SlotMove:
    return SlotMove(at, "r", event, slot, "1", 1, incarnation, lsn)


def run(run_id: str, at: datetime = NOON, verb: str = "consume", status: str = "running") -> Run:
    return Run(at, run_id, verb, status)


def state(table: str, generation: int, status: str, at: datetime = NOON, **details) -> TableState:
    return TableState(at, "r", table, generation, status, **details)


def cut(batch: int, at: datetime = NOON) -> BatchCut:
    return BatchCut(at, "r", batch, batch * 100, None, [TargetCut("t", 1, batch)])


def gap(status: str, incarnation: str, at: datetime = NOON) -> Gap:
    return Gap(at, "r", status, "s", "1", 1, incarnation, 16, None, "SlotLost", "why", "resync")


def files(ledger: Ledger, kind) -> int:
    return len(DeltaTable(bookkeeping_uri(ledger.lake.root, kind.table)).file_uris())


@pytest.fixture
def ledger(lake):
    return Ledger(Lake(lake))


def test_an_empty_ledger_has_nothing(ledger):
    assert (
        ledger.slot_moves(),
        ledger.slot_events(),
        ledger.table_states(),
        ledger.batches(),
        ledger.runs(),
    ) == ([], [], {}, [], [])
    assert (ledger.last_cut(), ledger.last_run(), ledger.run_result("r")) == (None, None, None)
    assert ledger.furthest_lsn("s", "0/1") == 0
    assert prune_ledger(ledger, NOON, None) == 0


def test_the_row_appended_last_is_the_latest_though_a_clock_was_set_back(ledger):
    """A run on a machine whose clock is behind must not be overruled by older rows."""
    for number, at in enumerate((NOON, NOON - DAY, NOON - 2 * DAY, NOON)):
        ledger.append(state("t", number, "synced", at))
        ledger.append(run("r", at, status=str(number)))
    assert ledger.table_states()["t"].generation == 3
    assert [r.status for r in ledger.runs()] == ["0", "1", "2", "3"]
    assert ledger.last_run().status == ledger.run_result("r").status == "3"
    ats = [r.at for r in ledger.runs()]
    assert ats == sorted(set(ats))


@pytest.mark.parametrize("most", [0, 2_000])
def test_few_states_are_kept_in_memory_and_many_are_filtered(ledger, monkeypatch, most):
    """Rows of another run, which appends to the same table, are seen."""
    monkeypatch.setattr("waldelta.lake.ledger.table._SMALL_ROWS", most)
    assert ledger.table_rows("t") == []
    for number, name in enumerate(("t", "u", "t")):
        Ledger(Lake(ledger.lake.root)).append(state(name, number, "synced", NOON + number * DAY))
        assert [row.generation for row in ledger.table_rows()] == list(range(number + 1))
    assert [row.generation for row in ledger.table_rows("t")] == [0, 2]


def test_appends_of_several_writers_are_all_there_in_one_order(ledger):
    """Whoever loses the race appends behind the winner."""

    def append(writer: int) -> None:
        for number in range(4):
            Ledger(ledger.lake).append(run(f"{writer}-{number}", NOON))

    writers = [threading.Thread(target=append, args=(writer,)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    runs = ledger.runs()
    assert sorted(r.run_id for r in runs) == sorted(f"{w}-{n}" for w in range(4) for n in range(4))
    assert len({r.at for r in runs}) == 16
    for writer in range(4):
        assert [r.run_id for r in runs if r.run_id[0] == str(writer)] == [
            f"{writer}-{n}" for n in range(4)
        ]


def test_of_two_compactions_at_once_one_is_given_up(ledger):
    """delta-rs's OPTIMIZE would commit both, and every row would be there twice."""
    for number in range(3):
        ledger.append(run(f"r{number}", NOON))
    table = ledger.table(Run)
    one, other = table.place.open(), table.place.open()
    table._compact(one, one.table_files)
    with pytest.raises(Overtaken):
        table._compact(other, other.table_files)
    assert [r.run_id for r in ledger.runs()] == ["r0", "r1", "r2"]
    assert len(table.place.open().table_files) == 1
    assert len(list(local_path(table.uri).glob("*.parquet"))) == 4


def test_a_failed_compaction_fails_no_append(ledger, monkeypatch):
    """The row is there: a caller that appends it again would have it twice."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger_table, "replace_by_rows", fail)
    monkeypatch.setattr(Run, "most_files", 2)
    for number in range(4):
        ledger.append(run(f"r{number}", NOON))
    assert len(ledger.runs()) == 4


def test_large_files_are_not_written_again(ledger, monkeypatch):
    """Whatever the age of the ledger, a compaction reads and writes little."""
    monkeypatch.setattr(ledger_table, "_SMALL_BYTES", 1)
    monkeypatch.setattr(Run, "most_files", 2)
    for number in range(4):
        ledger.append(run(f"r{number}", NOON))
    assert len(ledger.table(Run).place.open().table_files) == 4
    monkeypatch.setattr(ledger_table, "_MOST_FILES", 4)
    ledger.append(run("r4", NOON))
    assert len(ledger.table(Run).place.open().table_files) == 1
    assert len(ledger.runs()) == 5


def test_who_comes_too_late_adds_nothing(ledger):
    """A run that slept knows an older row than the newest: what it would say is outdated."""
    begun = ledger.append_state(state("t", 1, "copying", NOON), None)
    ledger.append_state(state("u", 1, "copying", OLD), None)
    copied = ledger.append_state(state("t", 1, "synced", OLD), begun)
    for late in (None, begun):
        with pytest.raises(LateWriter, match="another run replaced the rows"):
            ledger.append_state(state("t", 1, "failed"), late)
    assert copied.at > begun.at
    assert ledger.table_states()["t"] == copied
    ledger.append_cut(cut(1), None)
    first = ledger.last_cut()
    ledger.append_cut(cut(2), first)
    for late in (None, first):
        with pytest.raises(LateWriter):
            ledger.append_cut(cut(1), late)
    assert [c.batch for c in ledger.batches()] == [1, 2]


@pytest.mark.parametrize(
    "late, newest, refused",
    [
        ("failed", "succeeded", True),
        ("failed", "running", True),  # its next stage is to come
        ("failed", "failed", True),
        ("succeeded", "running", True),
        # While the earlier one did the work, the later one met its locks.
        ("succeeded", "failed", False),
        ("running", "failed", False),
    ],
)
def test_the_attempt_that_began_last_tells_what_became_of_a_run(ledger, late, newest, refused):
    """One that slept ends after the next, and mostly fails; recorded earlier it hides nothing."""
    earlier, later = (
        replace(run("r"), started_at=ledger.begin_run("r", "consume"), changes=n) for n in range(2)
    )
    ledger.append_run(replace(earlier, status="failed"))
    ledger.append_run(replace(later, status=newest))
    with pytest.raises(LateWriter, match="a later attempt") if refused else nullcontext():
        ledger.append_run(replace(earlier, status=late))
    assert ledger.run_result("r").status == (newest if refused else late)


def test_a_clock_that_is_behind_makes_no_attempt_an_earlier_one(ledger):
    """Whoever begins has seen what is recorded of the run; other runs and verbs don't matter."""
    ledger.append_run(run("r", now() + DAY, status="failed"))
    for status in ("running", "succeeded"):
        begun = ledger.begin_run("r", "consume")
        ledger.append_run(replace(run("r", now(), status=status), started_at=begun))
    assert ledger.run_result("r").status == "succeeded"
    ledger.append_run(replace(run("r", verb="replay"), started_at=OLD))
    ledger.append_run(replace(run("other"), started_at=OLD))
    assert [row.verb for row in ledger.runs()] == ["consume"] * 3 + ["replay", "consume"]


def test_reads_filter(ledger):
    """By slot and life, by run and verb, by newest; a long run id is found too."""
    long = "manual__" + "x" * 300
    for row in (
        move("creating", 5, incarnation=""),
        move("created", 10),
        move("intent", 30),
        move("intent", 20),
        move("intent", 99, incarnation="0/2"),
        move("intent", 77, slot="other"),
        run("a"), run(long), run("a", verb="sync"), run("a", status="failed"),
        cut(1), cut(2),
    ):  # fmt: skip
        ledger.append(row)
    assert [m.event for m in ledger.slot_events()] == ["creating", "created"]
    assert ledger.furthest_lsn("s", "0/1") == 30
    assert ledger.run_result("a").status == "failed"
    assert ledger.run_result("a", "sync").verb == "sync"
    assert ledger.run_result(long).run_id == long
    assert ledger.last_cut().batch == 2
    assert ledger.last_cut().targets == [TargetCut("t", 1, 2)]


def test_a_table_never_has_many_files(ledger, monkeypatch):
    """Reads stay fast without maintenance: every so many appends the files become one."""
    monkeypatch.setattr(Run, "most_files", 3)
    for number in range(9):
        ledger.append(run(f"r{number}"))
        assert files(ledger, Run) <= 3
    assert [r.run_id for r in ledger.runs()] == [f"r{n}" for n in range(9)]
    assert ledger.run_result("r7").run_id == "r7"


def test_a_table_of_an_earlier_version_is_read_and_goes_on(ledger):
    """A column that was added since has its default in old rows."""
    write_earlier(ledger.lake.root, [state("t", 1, "synced")], ["incarnation"])
    assert ledger.table_states()["t"].incarnation is None
    ledger.append(state("u", 1, "synced", incarnation="0/1"))
    expected = {"t": None, "u": "0/1"}
    assert {name: s.incarnation for name, s in ledger.table_states().items()} == expected


def test_pruning_drops_what_is_old_and_leaves_one_file(ledger):
    moves = [move("created" if n == 0 else "intent", n, OLD) for n in range(6)]
    runs = [run(f"r{n}", OLD) for n in range(6)]
    cuts = [cut(n, OLD) for n in range(6)]
    states = [state("t", n, "synced", OLD) for n in range(6)]
    for rows in (moves, runs, cuts, states):
        append_by_kind(ledger, rows[:3])
        append_by_kind(ledger, rows[3:])
    ledger.append(run("new"))
    assert prune_ledger(ledger, NOON - DAY, None) == 4 + 6 + 5 + 4
    assert [m.lsn for m in ledger.slot_moves()] == [0, 5]
    assert [r.run_id for r in ledger.runs()] == ["new"]
    assert ledger.last_cut().batch == 5
    assert ledger.table_states()["t"].generation == 5
    assert [files(ledger, kind) for kind in (SlotMove, Run, BatchCut, TableState)] == [1, 1, 1, 1]
    assert prune_ledger(ledger, NOON - DAY, None) == 0
    ledger.append(run("next"))
    assert [r.run_id for r in ledger.runs()] == ["new", "next"]


def test_a_row_appended_while_rows_are_pruned_stays(ledger):
    """The rewrite is a compare-and-swap too."""
    ledger.append(run("old", OLD))
    judged = []

    def keep(rows):
        if not judged:
            ledger.append(run("meanwhile"))
        judged.append([r.run_id for r in rows])
        return [r.run_id != "old" for r in rows]

    assert ledger.table(Run).prune(keep) == 1
    assert judged == [["old"], ["old", "meanwhile"]]
    assert [r.run_id for r in ledger.runs()] == ["meanwhile"]


KEPT_MOVES = {
    "the furthest intent of each life":
     ([move("created", 1, OLD), move("intent", 9, OLD), move("intent", 5, OLD),
       move("intent", 3, OLD, incarnation="2")], [True, True, False, True]),
    "lives, whatever their age":
     ([move("creating", 1, OLD, incarnation=""), move("adopted", 1, OLD), move("dropped", 1, OLD)],
      [True, True, True]),
    "the last batch's, behind which the slot moved on": (
        [
            replace(move("intent", lsn, OLD), batch=batch)
            for lsn, batch in ((1, 1), (2, 2), (3, None), (9, None))
        ],
        [False, True, False, True],
    ),
    "that the last batch was compared, not that another one was": (
        [
            replace(move(event, batch, OLD), batch=batch)
            for batch in (1, 2)
            for event in ("intent", "compared")
        ],
        [False, False, True, True],
    ),
    "young intents": ([move("created", 1, OLD), move("intent", 2), move("intent", 3)],
                      [True, True, True]),
}  # fmt: skip


def landed(lsn: int, batch: int | None) -> SlotMove:
    return replace(move("intent", lsn), batch=batch)


# An idle move has no batch; what followed on one that the log has lost was no idle one to it.
LANDED = {
    "all of it": ([landed(20, 1), landed(30, 2), landed(40, None)], 2, 40),
    "none": ([landed(20, 1), landed(30, 2), landed(40, None)], 0, 10),
    "up to an earlier day": ([landed(20, 1), landed(25, None), landed(30, 2), landed(40, None)], 1,
     25),
    "in an earlier life": ([replace(move("created", 10), batch=7), landed(20, None), landed(30, 8)],
     0, 20),
}  # fmt: skip


@pytest.mark.parametrize("moves, last, furthest", LANDED.values(), ids=LANDED)
def test_how_far_a_change_log_is_known_to_have_come(ledger, moves, last, furthest):
    """By the moves that came before the first over a batch that it hasn't got."""
    append_by_kind(ledger, [move("created", 10), *moves])
    assert ledger.furthest_lsn("s", "0/1", last) == furthest


# What followed on a batch that was consumed before it was compared, and where the slot stood then,
# if that is to be told.
BY_GET = replace(landed(20, 2), compared_after=True)
UNCOMPARED = {
    "consumed": ([BY_GET], 20),
    "recovered": ([BY_GET, landed(20, 2)], None),
    "recovered where nothing could be compared": ([BY_GET, BY_GET], 20),
    "compared": ([BY_GET, replace(move("compared", 20), batch=2)], None),
    "then passed over": ([BY_GET, move("intent", 30)], 20),
    "then another batch": ([BY_GET, landed(30, 3)], None),
    "another life": ([replace(BY_GET, incarnation="0/2")], None),
    "by advance": ([landed(20, 2)], None),
    "nothing": ([], None),
}  # fmt: skip


@pytest.mark.parametrize("rows, uncompared", UNCOMPARED.values(), ids=UNCOMPARED)
def test_a_batch_that_nothing_says_was_compared(ledger, rows, uncompared):
    """Rows of an earlier version, too, say nothing of it, and are no reason to warn."""
    write_earlier(ledger.lake.root, [move("created", 10)], ["compared_after"])
    append_by_kind(ledger, rows)
    found = ledger.uncompared("s", "0/1")
    assert (found.lsn if found is not None else None) == uncompared
    assert [row.event for row in ledger.slot_events()] == ["created"]


@pytest.mark.parametrize("moves, kept", KEPT_MOVES.values(), ids=KEPT_MOVES)
def test_moves_that_recovery_rests_on_are_kept(moves, kept):
    assert keep_moves(moves, NOON - DAY) == kept


def test_moves_over_batches_that_the_change_log_holds_are_kept():
    """They say how many messages landed, however long a failing target keeps the log."""
    moves = [landed(10 * batch, batch) for batch in (1, 2, 3, 4)]
    assert keep_moves(moves, NOON + DAY, 2) == [False, True, True, True]
    assert keep_moves(moves, NOON + DAY) == [False, False, False, True]


def test_batches_that_were_consumed(ledger):
    """By the first move over each that counted; a slot that went back counts the rest again."""
    rows = [
        landed(10, 1),
        replace(landed(20, 2), messages=5),
        replace(landed(25, 2), messages=4),
        replace(BY_GET, incarnation="0/2"),
    ]
    write_earlier(ledger.lake.root, [move("created", 5)], ["messages"])
    assert ledger.consumed_batches("s", "0/1") == {}
    append_by_kind(ledger, rows)
    expected = {1: ConsumedBatch(10, None), 2: ConsumedBatch(20, 5)}
    assert ledger.consumed_batches("s", "0/1") == expected


LANDED_BY = [
    ("another run", [("a", 20, 1, 5)], None),
    ("one attempt", [("r", 20, 1, 5), ("r", 30, 2, 7)], (10, 30, {1: 5, 2: 7})),
    ("an attempt after others' runs", [("a", 20, 1, 5), ("r", 30, 2, 7)], (20, 30, {2: 7})),
    ("two attempts, and another run between", [("r", 20, 1, 5), ("a", 30, 2, 1), ("r", 40, 3, 2)],
     (10, 40, {1: 5, 3: 2})),
    ("a batch whose count a kill prevented", [("r", 20, 1, 5), ("r", 30, 2, None)],
     (10, 30, {1: 5, 2: None})),
    ("another run's batch, moved past again", [("a", 20, 1, 5), ("r", 20, 1, None)], None),
    ("WAL without changes", [("r", 20, None, None)], None),
]  # fmt: skip


@cases("moves, landed", LANDED_BY)
def test_what_a_runs_attempts_landed(ledger, moves, landed):
    """By the moves of the slot, which also a killed attempt recorded."""
    life = SlotMove(NOON, "setup", "created", "s", "1", 1, "0/1", 10)
    ledger.append(life)
    for run_id, lsn, batch, changes in moves:
        intent = {"run_id": run_id, "event": "intent", "lsn": lsn, "batch": batch}
        ledger.append(replace(life, **intent, changes=changes))
    found = ledger.landed_by("s", "0/1", "r")
    assert (None if found is None else (found.start_lsn, found.end_lsn, found.changes)) == landed


@pytest.mark.parametrize("stored", [None, 1, FORMAT + 1])
def test_a_lake_of_another_format_is_refused(ledger, stored):
    """What its tables mean isn't known: an earlier lake has open decisions in tables of others."""
    created = replace(move("created", 10), format=stored or FORMAT)
    write_earlier(ledger.lake.root, [created], [] if stored else ["format"])
    ledger.append(move("intent", 20))
    with pytest.raises(StateError, match=f"format {stored or 1}, .* format {FORMAT}: "):
        ledger.slot_events()


def test_the_latest_state_and_copy_of_each_target_are_kept():
    """And how that copy began, and the first of each set of columns: the schema's history."""
    began = [state("a", n, "copying", OLD) for n in (2, 3)]
    assert keep_states(
        [began[0], state("a", 2, "synced", OLD), began[1], state("a", 3, "synced", OLD)], NOON - DAY
    ) == [False, True, True, True]
    states = [
        state("a", 1, "synced", OLD),
        state("a", 2, "synced", OLD),
        state("a", 3, "synced", OLD),
        state("a", 4, "copying", OLD),
        state("b", 1, "failed", OLD),
        state("c", 1, "copying"),
        state("c", 1, "synced"),
    ]
    assert keep_states(states, NOON - DAY) == [True, False, True, True, True, True, True]
    added = replace(states[1], columns=[ColumnState("x", 23, -1, "integer", "int", not_null=False)])
    expected = [True, True, True, True]
    assert keep_states([states[0], added, states[2], states[3]], NOON - DAY) == expected


@pytest.mark.parametrize(
    ("held", "following"),
    [
        ([], 1),
        ([(1, "copying"), (1, "synced")], 2),
        ([(1, "synced"), (2, "copying"), (2, "failed")], 3),
        ([(3, "copying"), (2, "synced")], 4),
    ],
)
def test_no_two_copies_have_one_generation(held, following):
    """Files and commits of a copy that failed, or was undone, stay for a while."""
    rows = [TableState(NOON, "r", "public.t", *of) for of in held]
    assert next_generation(rows) == following


def test_cuts_expire_but_for_the_newest(ledger):
    """Marked in rows that an earlier version wrote too; repeated, it writes nothing."""
    write_earlier(ledger.lake.root, [cut(1, OLD)], ["expired"])
    ledger.append(cut(2, OLD + DAY))
    assert [row.expired for row in ledger.batches()] == [False, False]
    assert [ledger.expire_cuts(before) for before in (OLD, NOON, NOON)] == [0, 1, 0]
    assert [(row.batch, row.expired) for row in ledger.batches()] == [(1, True), (2, False)]
    ledger.append(cut(3))
    assert ledger.expire_cuts(NOON + DAY) == 1
    expected = [(1, True), (2, True), (3, False)]
    assert [(row.batch, row.expired) for row in ledger.batches()] == expected
    assert ledger.batches()[0].targets == cut(1, OLD).targets


def test_cuts_are_kept_as_long_as_the_change_log_needs_them():
    """Old cuts say which batches may go, and where the log begins; the newest stays."""
    cuts = [cut(1, OLD), cut(2, OLD), cut(3, OLD), cut(4)]
    assert keep_cuts(cuts, NOON - DAY, 3) == [False, True, True, True]
    assert keep_cuts(cuts, NOON - DAY, None) == [False, False, False, True]
    assert keep_cuts(cuts, NOON + DAY, None) == [False, False, False, True]


def test_rows_with_a_clock_ahead_are_kept(ledger):
    """They count as young; nothing needs them to be old."""
    ledger.append(run("ahead", now() + 365 * DAY))
    ledger.append(replace(run("next"), at=now()))
    assert prune_ledger(ledger, now() + DAY, None) == 0
    assert ledger.last_run().run_id == "next"


def test_structs_of_an_earlier_version_get_the_fields_of_this_one(lake):
    """Rows that were there have the defaults."""
    first = replace(cut(1), targets=[TargetCut("public.t", 1, 5, inserted=3)])
    written = asdict(first)
    for name in ("completed", "quarantined", "raw_rows"):
        del written["targets"][0][name]
    targets = pa.array([written["targets"]])
    table = pa.Table.from_pylist([written], schema=schema_of(BatchCut))
    write_deltalake(
        bookkeeping_uri(lake, BatchCut.table),
        table.set_column(table.schema.get_field_index("targets"), "targets", targets),
    )
    ledger = Ledger(Lake(lake))
    assert ledger.last_cut().targets == first.targets
    later = replace(cut(2), targets=[replace(first.targets[0], quarantined=7)])
    ledger.append(later)
    assert [found.targets for found in ledger.batches()] == [first.targets, later.targets]


def test_what_rewrites_are_told_by_comes_back_as_it_was(lake):
    """Else every run would record the state again; older ones have no labels."""
    storage = StorageState(
        [FileState(1, 2)], [AttributeState(1, 700, has_missing=True)], [LabelState(1, 5, "sad")]
    )
    ledger = Ledger(Lake(lake))
    ledger.append(TableState(now(), "r", "public.t", 1, "synced", storage=storage))
    assert ledger.table_states()["public.t"].storage == storage
    earlier = asdict(TableState(now(), "r", "public.u", 1, "synced", storage=storage))
    earlier["storage"]["labels"] = None
    write_deltalake(
        bookkeeping_uri(lake, TableState.table),
        pa.Table.from_pylist([earlier], schema=schema_of(TableState)),
        mode="append",
    )
    assert ledger.table_states()["public.u"].storage == replace(storage, labels=[])


def test_gaps_are_open_until_their_newest_row_says_otherwise(ledger):
    """One row a life at a time: whoever comes second adds nothing. The newest is kept."""
    rows = [gap(OPEN, "0/1", OLD), gap(CLOSED, "0/1", OLD + DAY), gap(OPEN, "0/2", OLD + 2 * DAY)]
    ledger.append_gap(rows[0], None)
    with pytest.raises(LateWriter):
        ledger.append_gap(rows[0], None)
    ledger.append_gap(rows[1], rows[0])
    ledger.append_gap(rows[2], None)
    assert ledger.gaps("s") == rows
    assert ledger.gaps("other") == []
    assert [open_gaps(rows[:n]) for n in range(4)] == [[], rows[:1], [], rows[2:]]
    assert keep_gaps(rows, NOON) == [False, True, True]
    assert keep_gaps(rows, OLD + DAY) == [False, True, True]
    assert prune_ledger(ledger, NOON, None) == 1


def test_a_limit_on_files_has_a_name(ledger):
    """Not only delta-rs' account of a file that it couldn't copy."""
    ledger.append(run("r1", NOON))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for append in (
            lambda: ledger.append(run("r2", NOON)),
            lambda: ledger.append(move("intent", 1)),
        ):
            with pytest.raises(
                TargetNotWritable, match=r"File too large.*: raise the limit on the size of files"
            ):
                append()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ledger.append(run("r3", NOON))
    assert [r.run_id for r in ledger.runs()] == ["r1", "r3"]


def test_each_file_is_opened_once(lake, monkeypatch):
    """A run reads the ledger some times per table: whatever was there before isn't opened again."""
    opened = []
    real = pa.BufferReader
    monkeypatch.setattr(
        pa, "BufferReader", lambda content: opened.append(bytes(content)) or real(content)
    )
    for number in range(3):
        Ledger(Lake(lake)).append(TableState(now(), "r", f"public.t{number}", 1, "synced"))
        assert len(Ledger(Lake(lake)).table_states()) == number + 1
    assert len(opened) == len(set(opened)) == 3


def test_a_scan_reads_columns_from_a_moment_on(ledger):
    """Within statistics' millisecond, across files, and for columns that aren't there yet."""
    table = ledger.table(Run)
    assert table.scan(["run_id", "at"]).num_rows == 0
    for number in range(3):
        ledger.append(run(f"run-{number}", NOON + timedelta(microseconds=900 + 3000 * number)))
    assert table.scan(["run_id"], NOON + timedelta(microseconds=950))["run_id"].to_pylist() == [
        "run-1",
        "run-2",
    ]
    assert (
        table.scan(
            ["run_id"], NOON + timedelta(microseconds=900), pc.field("run_id") != "run-1"
        ).num_rows
        == 2
    )
    later = ledger.table(LaterRun)
    assert later.scan(["later", "run_id"]).to_pylist()[0] == {"later": None, "run_id": "run-0"}
    expected = ["run-1", "run-2"]
    assert [row.run_id for row in later.read(since=NOON + timedelta(microseconds=950))] == expected


def test_rewritten_files_are_read_by_parts(ledger, monkeypatch):
    """One run's result is found without reading others', also after maintenance."""
    monkeypatch.setattr(Run, "rows_per_group", 10)
    table = ledger.table(Run)
    for half in range(2):
        rows = [run(str(n), NOON + timedelta(seconds=n)) for n in range(half * 50, half * 50 + 50)]
        table.extend(rows)
    table.prune(lambda rows: [row.run_id != "99" for row in rows])
    (file,) = DeltaTable(table.uri).file_uris()
    assert pq.ParquetFile(file.removeprefix("file://")).num_row_groups == 10
    expected = ["97", "98"]
    assert table.scan(["run_id"], NOON + timedelta(seconds=97))["run_id"].to_pylist() == expected


def test_a_power_cut_leaves_a_ledger_that_can_be_read(lake, tmp_path, monkeypatch):
    """The checkpoint is on the disk before anything points to it or old entries go."""
    monkeypatch.setattr(delta_target, "CHECKPOINT_INTERVAL", 3)
    disk, ledger, rows = Disk(monkeypatch), Ledger(Lake(lake)), []
    table = local_path(bookkeeping_uri(lake, SlotMove.table))

    def cut():
        if (table / "_delta_log/_last_checkpoint").exists():
            left = disk.after_a_cut(table, tmp_path / f"cut{len(rows)}")
            rows.append(len(read_sorted(table_at(left.as_uri()).open())))

    ledger.append(move("intent", 0))
    # delta-rs goes by the table itself, Spark too.
    properties = {"delta.checkpointInterval": "3", "delta.logRetentionDuration": "interval 0 days"}
    DeltaTable(table).alter.set_table_properties(properties)
    disk.at_each = cut
    for number in range(1, 6):
        ledger.append(move("intent", number))
        assert disk.volatile(local_path(lake), f"_waldelta/{SlotMove.table}") == []
    assert len(list(table.glob("_delta_log/*.checkpoint.parquet"))) == 2
    assert ledger.table(SlotMove).prune(lambda rows: [True] * len(rows)) == 0
    cut()
    assert rows == sorted(rows)
    assert rows[-1] == 6
    assert len(list(table.glob("_delta_log/*.json"))) < 3


def test_a_commit_that_a_power_cut_left_empty_is_none(ledger):
    """Readers find a version without changes where the log's last entry wasn't forced."""
    for number in range(3):
        ledger.append(move("intent", number))
    log = local_path(bookkeeping_uri(ledger.lake.root, SlotMove.table)) / "_delta_log"
    (log / f"{2:020d}.json").write_bytes(b"")
    ledger = Ledger(Lake(ledger.lake.root))  # No process outlives a power cut.
    assert [m.lsn for m in ledger.slot_moves()] == [0, 1]
    ledger.append(move("intent", 9))
    assert [m.lsn for m in ledger.slot_moves()] == [0, 1, 9]


def test_a_root_with_letters_of_its_own_has_checkpoints(tmp_path, monkeypatch):
    """delta-rs tells such a folder in another spelling than it was given."""
    monkeypatch.setattr(delta_target, "CHECKPOINT_INTERVAL", 2)
    root = f"file://{tmp_path}/données"
    for number in range(3):
        Ledger(Lake(root)).append(move("intent", number))
    assert list(
        local_path(bookkeeping_uri(root, SlotMove.table)).glob("_delta_log/*2.checkpoint.parquet")
    )


@pytest.mark.parametrize(
    "runs, told",
    [
        pytest.param([], False, id="no run has told anything"),
        pytest.param([("r", 1, None, 7)], False, id="it ended before"),
        pytest.param([("r", 1, False, None)], True,
                     id="its own run has, by which one table failed"),
        pytest.param([("r", -1, True, 7)], True, id="its own run has, whose clock is behind"),
        pytest.param([("r", -1, False, 6)], False,
                     id="an earlier attempt of its own run has told less"),
        pytest.param([("r", -1, False, None)], False,
                     id="an earlier attempt of its own run has told of nothing"),
        pytest.param([("before", -1, True, 7)], False, id="an earlier run says nothing of it"),
        pytest.param([("r", 1, None, 7), ("later", 2, True, 7)], True,
                     id="a later one has, of what a killed one did"),
    ],
)  # fmt: skip
def test_whether_a_cut_is_told(tmp_path, runs, told):
    """By any run; a cut that maintenance publishes again, or of an earlier life, is no other."""
    ledger = Ledger(Lake(tmp_path.as_uri()))
    ledger.append(replace(cut(7, NOON - DAY), end_lsn=3))
    made = replace(cut(7), targets=[TargetCut("t", 1, 7, inserted=1), TargetCut("u", 1, 3)])
    ledger.append_cut(made, ledger.last_cut())
    again = replace(
        made, at=NOON + DAY, run_id="maintain", targets=[TargetCut("t", 1, 8), TargetCut("u", 1, 3)]
    )
    ledger.append_cut(again, ledger.last_cut())
    for run_id, minutes, applied, version in runs:
        result = json.dumps({"tables": {} if version is None else {"t": {"version": version}}})
        row = run(run_id, NOON + timedelta(minutes=minutes))
        ledger.append(replace(row, applied=applied, result=result))
    ledger.append(replace(run("maintain", NOON + DAY, "maintain"), applied=None))
    assert ledger.is_reported(ledger.last_cut()) == told

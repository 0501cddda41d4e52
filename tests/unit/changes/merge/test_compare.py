"""Complete rows are compared with a target's files: what each would change, and what is extra."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from tests.support.data.merges import net_of, one_by_one, plan, staged, write_files
from waldelta.changes.decode.collapse import ColumnNumbering
from waldelta.changes.merge.compare import Comparison, FileRows
from waldelta.changes.merge.rows import match
from waldelta.changes.merge.statements import NetColumns
from waldelta.changes.stage import net_files
from waldelta.changes.stage.net_files import NetFiles
from waldelta.lake import open_parquet
from waldelta.postgres import PgType
from waldelta.types.type_map import target_type

pytestmark = pytest.mark.usefixtures("small_parts")

# Each complete row, and what it does to the target.
COMPLETE = {
    "equal": (("upsert", 1, "a", "A"), None),
    "another value": (("upsert", 9, "i", "J"), "update"),
    "null": (("upsert", 10, "j", None), "update"),
    "missing": (("upsert", 11, "k", "K"), "insert"),
    "gone": (("purge", 19, None, None), "delete"),
    "never there": (("purge", 21, None, None), None),
}
HELD = [(1, "a", "A"), (9, "i", "I")], [(10, "j", "J"), (19, "s", "S")], [(20, "t", "T")]


def comparison(job, rows, extra=None) -> Comparison:
    schema = net_of([], None).schema
    changes = [
        {"action": action, "b0": key, "c0": None if action == "purge" else key, "c1": a, "c2": b}
        for action, key, a, b in rows
    ]
    net = NetFiles.of(staged(job, pa.Table.from_pylist(changes, schema)), job.lake)
    kinds = [target_type(PgType(20, -1, "bigint")), *[target_type(PgType(25, -1, "text"))] * 2]
    names = plan().decode.names
    written = NetColumns(names, ColumnNumbering(3, (0,)), True)
    held = FileRows.of(job.lake.target("s.t").open(), written)
    return Comparison(net, held, written, dict(zip(names, kinds, strict=True)), extra)


def test_what_a_row_would_change(job):
    write_files(job, *HELD)
    rows = [row for row, _ in COMPLETE.values()]
    found = comparison(job, rows).run(SimpleNamespace(run=one_by_one))
    assert dict(zip(COMPLETE, found.actions.to_pylist(), strict=True)) == {
        name: expected for name, (_, expected) in COMPLETE.items()
    }
    assert (found.extra, found.is_doubled) == (0, False)


def test_rows_of_other_keys_are_staged_as_deletes(job):
    write_files(job, *HELD)
    rows = [row for row, _ in COMPLETE.values() if row[0] == "upsert"]
    extra = f"{job.pipeline.target.root}/extra"
    found = comparison(job, rows, extra).run(SimpleNamespace(run=one_by_one))
    assert found.actions.to_pylist() == [None, "update", "update", "insert"]
    gone = open_parquet(extra).to_table()
    assert (found.extra, sorted(gone["b0"].to_pylist())) == (2, [19, 20])
    assert set(gone["action"].to_pylist()) == {"delete"}


@pytest.mark.parametrize(
    "files", [([(1, "a", "A"), (1, "a", "A")],), ([(1, "a", "A")], [(1, "a", "b")])]
)
@pytest.mark.parametrize("action, doubled", [("upsert", True), ("purge", False)])
def test_a_key_twice(job, files, action, doubled):
    """A purge removes both rows, and nothing could bring them to one row."""
    write_files(job, *files)
    value = (None, None) if action == "purge" else ("a", "A")
    found = comparison(job, [(action, 1, *value)]).run(SimpleNamespace(run=one_by_one))
    assert found.is_doubled is doubled


@pytest.mark.parametrize("kind", [pa.int16(), pa.int64(), pa.string()])
def test_keys_are_matched_whatever_their_order(kind):
    """Nulls match nothing."""
    numbers = np.random.default_rng(7).permutation(50)
    net = pa.array([*numbers[:30].tolist(), None], pa.int64()).cast(kind)
    held = pa.array([None, *numbers[10:].tolist()], pa.int64()).cast(kind)
    written = NetColumns(["id"], ColumnNumbering(1, (0,)), False)
    found = match(pa.table({"id": held}), pa.table({"b0": net}), written)
    assert found.tolist() == [-1, *range(10, 30), *[-1] * 20]


@pytest.mark.parametrize("order", ["equal", "two runs", "reversed", "scattered"])
def test_rows_are_compared_whatever_their_order(job, order, monkeypatch):
    """Rows in long runs are compared where they are, others are copied first."""
    monkeypatch.setattr(net_files, "ROWS_PER_PART", 600)
    monkeypatch.setattr(net_files, "ROWS_PER_READ", 600)
    numbers = list(range(1_200))
    held = {
        "equal": numbers,
        "two runs": [*numbers[600:], *numbers[:600]],
        "reversed": numbers[::-1],
        "scattered": np.random.default_rng(7).permutation(1_200).tolist(),
    }[order]
    write_files(job, *([(i, "a", str(i)) for i in part] for part in (held[:700], held[700:])))
    differing = {3, 650, 1_199}
    rows = [("upsert", i, "a", "other" if i in differing else str(i)) for i in numbers]
    found = comparison(job, rows).run(SimpleNamespace(run=one_by_one))
    assert set(np.flatnonzero(found.actions.is_valid())) == differing

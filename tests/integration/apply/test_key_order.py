"""Keys whose columns have another order than the table's, in every mode."""

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from tests.oracles.compare import differing
from tests.oracles.target_rows import read_target
from tests.support.pipelines import new_pipeline
from waldelta.jobs.pipeline import Pipeline
from waldelta.stages.check.check import check

# {0} is the table, {1} a column of its key.
PLAIN = "create table {0} (b int, v text, {1} int, primary key ({1}, b))"
TABLES = {
    "mirror": PLAIN,
    "by_index": "create table {0} (b int not null, v text, {1} int not null);"
    " create unique index by_index_key on {0} ({1}, b);"
    " alter table {0} replica identity using index by_index_key",
    "identity_full": f"{PLAIN}; alter table {{0}} replica identity full",
    "no_key": "create table {0} (b int, v text, {1} int); alter table {0} replica identity full",
    "soft": PLAIN,
    "versions": PLAIN,
    "changes": PLAIN,
    "parts": f"{PLAIN} partition by range (b); create table parts_1 partition of {{0}} for values"
    " from (0) to (50); create table parts_2 ({1} int not null, b int not null, v text);"
    " alter table {0} attach partition parts_2 for values from (50) to (1000)",
}
MODES = {"soft": "soft_delete", "versions": "history", "changes": "changelog"}
MIRRORS = [name for name in TABLES if name not in MODES]
ROWS = "insert into {} values (100, 'x', 1), (1, 'y', 100), (7, 'z', 8)"
CHANGES = (
    "update {} set {} = 200 where b = 1",
    "delete from {} where b = 7",
    "insert into {} values (8, 'n', 7)",
    "update {} set v = 'w' where b = 100",
)
# Its name needs Delta's column mapping, with which Spark merges.
COLUMN = '"order no"'


def pipeline(database, lake, tables, column=COLUMN, *, checked=True) -> Pipeline:
    """A pipeline with a target of each of these tables, which have rows."""
    for name in tables:
        database.execute(TABLES[name].format(name, column))
    write(database, tables, ROWS)
    targets = {f"public.{name}": {"mode": MODES[name]} for name in tables if name in MODES}
    if "parts" in tables:
        targets["public.parts"] = {"partition_root": True}
    names, target = [f"public.{name}" for name in tables], {"root": lake, "tables": targets}
    made = new_pipeline(database, lake, names, target=target, quality={"enabled": checked})
    made.setup()
    return made


def write(database, tables, *statements: str, column=COLUMN) -> None:
    for name in tables:
        for statement in statements:
            database.execute(statement.format(name, column))


def check_targets(runner, made) -> None:
    """Compare each target with its source by values, and check its expectations."""
    job = made.job("compare")
    assert differing(runner, job) == {}
    assert not check(runner, job.pipeline, job.ledger, "check").warnings


def moves(made) -> list[dict]:
    """The keys before the changes of the changelog that moved a row, in their order."""
    target = QueryBuilder().register("t", DeltaTable(made.target_path("public.changes")))
    rows = pa.table(target.execute("select _wd_before, _wd_lsn, _wd_seq from t")).to_pylist()
    ordered = sorted(rows, key=lambda row: (row["_wd_lsn"], row["_wd_seq"]))
    return [row["_wd_before"] for row in ordered if row["_wd_before"] is not None]


@pytest.mark.soak("the modes of the ordinary test, on Spark")
def test_modes_that_keep_rows(runner, database, lake):
    """The values of the key's columns could stand for each other: swapped ones are another key."""
    made = pipeline(database, lake, MODES)
    made.sync(runner, run_id="sync")
    write(database, MODES, *CHANGES)
    assert made.consume(runner, run_id="consume").warnings == []
    check_targets(runner, made)
    assert moves(made) == [{"order no": 100, "b": 1}]
    # A renamed column of the key, and then a key in the other order.
    write(database, MODES, 'alter table {} rename "order no" to "No."')
    write(database, MODES, 'update {} set "No." = 9 where b = 8')
    made.consume(runner, run_id="renamed")
    check_targets(runner, made)
    assert moves(made) == [{"No.": 100, "b": 1}, {"No.": 7, "b": 8}]
    database.execute('alter table changes drop constraint changes_pkey, add primary key (b, "No.")')
    made.sync(runner, ["public.changes"], run_id="other order")
    database.execute('update changes set "No." = 10 where b = 8')
    made.consume(runner, run_id="in the other order")
    check_targets(runner, made)
    assert moves(made)[-1] == {"No.": 9, "b": 8}


def test_the_driver_merges_mirrors(runner, database, lake):
    """By a primary key, an index, complete old rows, without a key, and merged from partitions."""
    made = pipeline(database, lake, MIRRORS, "a", checked=False)
    made.sync(runner, run_id="sync")
    write(database, MIRRORS, *CHANGES, column="a")
    assert made.consume(runner, run_id="consume").warnings == []
    for name in MIRRORS:
        rows = read_target(made.target_path(f"public.{name}"), "a", "b", "v")
        assert set(map(tuple, rows)) == {(1, 100, "w"), (200, 1, "y"), (7, 8, "n")}, name

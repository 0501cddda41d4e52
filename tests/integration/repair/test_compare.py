"""The comparison of a target with its source finds every difference, and nothing else."""

from datetime import date
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.oracles.compare import compare_target, difference, difference_here
from tests.support.pipelines import job_of
from waldelta.config import PipelineFile
from waldelta.errors import SchemaChanged, StateError
from waldelta.lake import target_uri
from waldelta.lake.ledger import SlotMove, now
from waldelta.postgres.server_position import read_position
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.spark

SCHEMA = "id int, text string, number double, _wd_raw map<string,string>"
ROWS = [
    (1, "a", 1.5, None),
    (2, None, float("nan"), {"number": "x", "text": "y"}),
    (3, "c", 0.0, None),
]


NAMES = ["id", "text", "number", "_wd_raw"]


def compared_by_spark(request, source, target, keys=("id",)):
    runner = request.getfixturevalue("runner")
    frames = [runner.spark().createDataFrame(rows, SCHEMA) for rows in (source, target)]
    return difference(*frames, NAMES, list(keys), "public.t")


def compared_here(_request, source, target, keys=("id",)):
    kinds = [pa.int32(), pa.string(), pa.float64(), pa.map_(pa.string(), pa.string())]
    sides = [
        pa.table([pa.array([row[n] for row in rows], kind) for n, kind in enumerate(kinds)], NAMES)
        for rows in (source, target)
    ]
    return difference_here(*sides, NAMES, list(keys), "public.t")


@pytest.fixture(
    params=[
        compared_here,
        pytest.param(
            compared_by_spark, marks=pytest.mark.nightly("the oracle as make test-all uses it")
        ),
    ]
)
def compare(request):
    """Compares two lists of rows."""
    return partial(request.param, request)


CASES = {
    "equal": (ROWS, 0, 0),
    "in another order": (ROWS[::-1], 0, 0),
    "a row missing": (ROWS[1:], 1, 0),
    "a row too many": ([*ROWS, (4, "d", 1.0, None)], 0, 1),
    "a row twice": ([*ROWS, ROWS[0]], 0, 1),
    "a value changed": ([(1, "b", 1.5, None), *ROWS[1:]], 1, 1),
    "an empty string for null": ([ROWS[0], (2, "", *ROWS[1][2:]), ROWS[2]], 1, 1),
    "minus zero for zero": ([*ROWS[:2], (3, "c", -0.0, None)], 1, 1),
    "another exact text": ([ROWS[0], (*ROWS[1][:3], {"number": "x"}), ROWS[2]], 1, 1),
    "no raw values, as an empty map": ([(1, "a", 1.5, {}), *ROWS[1:]], 0, 0),
    "nothing there": ([], 3, 0),
}


@pytest.mark.parametrize("target, missing, extra", CASES.values(), ids=CASES.keys())
def test_frames_are_compared_as_multisets_of_exact_values(compare, target, missing, extra):
    """Missing and extra rows are counted with their multiplicity."""
    found = compare(ROWS, target)
    assert (found.source_rows, found.target_rows) == (len(ROWS), len(target))
    assert (found.missing, found.extra, found.rows) == (missing, extra, missing + extra)


def test_a_few_keys_of_the_rows_concerned_are_told(compare):
    """Key columns only, so that the report shows where to look."""
    found = compare(ROWS, [(1, "b", 1.5, None), *ROWS[1:]])
    assert sorted(found.keys) == ["extra id=1", "missing id=1"]


def test_without_a_key_whole_rows_are_told(compare):
    """A multiset of rows has nothing else to name them by."""
    found = compare(ROWS, ROWS[1:], keys=())
    assert found.keys == ("missing id=1, text=a, number=1.5, _wd_raw=null",)


SOURCE = """
create table readings (station text, day date, value numeric(8, 2), ratio double precision,
  secret text, note text,
                       taken timestamptz, primary key (station, day)) partition by list (station);
create table readings_north partition of readings for values in ('north');
create table readings_rest partition of readings default;
insert into readings
select case when n % 3 = 0 then 'north' else 'south' end, date '2024-01-01' + n, case n when 7
  then 'NaN' else n / 8.0 end,
       case n when 8 then 'NaN' when 9 then '-0' else n / 3.0 end, 'hidden', nullif(repeat('x', n),
         ''),
       timestamptz '2024-01-01' + n * interval '1 hour'
from generate_series(0, 59) as n;
create publication readings_pub for table readings (station, day, value, ratio, note, taken)
    where (station = 'south' or day < '2024-01-10') with (publish_via_partition_root);
"""


@pytest.fixture
def job(runner, database, lake):
    """A partitioned table with a filter and a hidden column, copied into its target."""
    database.execute(SOURCE)
    slot = f"s_{database.name}"
    document = {
        "pipeline": "test",
        "source": {"conn_id": "test_source", "slot": slot,
                   "publications": [{"name": "readings_pub", "manage": False}]},
        "target": {"root": lake},
    }  # fmt: skip
    made = job_of(PipelineFile.model_validate(document), database.conninfo, "run-1")
    ((lsn,),) = database.execute(
        "select lsn::text from pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,)
    )  # fmt: skip
    server = read_position(database.connection)
    made.ledger.append(
        SlotMove(now(), "run-0", "created", slot, server.system_identifier, server.timeline, lsn, 0)
    )
    sync(runner, made)
    return made


def compare_readings(runner, job):
    return compare_target(
        runner, job.source.conninfo, job.pipeline, job.ledger.table_states()["public.readings"]
    )


def test_a_fresh_copy_equals_its_source(runner, job):
    """Filter, column list, partitions and unheld values are the same on both sides."""
    found = compare_readings(runner, job)
    assert (found.source_rows, found.target_rows, found.rows) == (43, 43, 0)


SOUTH = "station = 'south' and day = '2024-02-01'"
TAMPERING = {
    "one value": (lambda t: t.update({"note": "'y'"}, predicate=SOUTH), 1, 1),
    "one value for null": (lambda t: t.update({"note": "null"}, predicate=SOUTH), 1, 1),
    "the exact text": (lambda t: t.update({"_wd_raw": "null"}, predicate="day = '2024-01-08'"), 1,
                       1),
    "one row less": (lambda t: t.delete("day = '2024-01-02'"), 1, 0),
    "one row twice": (lambda t: write_deltalake(t, _rows_of(t, date(2024, 1, 2)), mode="append"), 0,
                      1),
}  # fmt: skip


def _rows_of(target, day):
    rows = target.to_pyarrow_table()
    return rows.filter(pc.equal(rows["day"], day))


def test_tampering_is_found_on_either_side(runner, job, database):
    """Whatever is changed behind our back, the comparison sees it and names the key."""
    uri = target_uri(job.pipeline.target.root, "public", "readings")
    version = DeltaTable(uri).version()
    for name, (tamper, missing, extra) in TAMPERING.items():
        tamper(DeltaTable(uri))
        found = compare_readings(runner, job)
        assert (found.missing, found.extra) == (missing, extra), name
        assert all("station=south, day=2024-" in key for key in found.keys), name
        assert len(found.keys) == missing + extra, name
        DeltaTable(uri).restore(version)
    database.execute(
        "insert into readings values ('south', '2030-01-01', 1, 1, 'hidden', 'new', now())"
    )
    found = compare_readings(runner, job)
    assert (found.missing, found.extra) == (1, 0)


def test_a_comparison_that_means_nothing_is_refused(runner, job, database):
    """Other columns, or a table that isn't published: a named error instead of a number."""
    database.execute("alter publication readings_pub set table readings (station, day, value)")
    with pytest.raises(SchemaChanged, match=r"public.readings: its target lacks .* sync it again"):
        compare_readings(runner, job)
    database.execute("drop publication readings_pub")
    database.execute("create publication readings_pub")
    with pytest.raises(
        StateError, match=r"public\.readings isn't in the publications readings_pub"
    ):
        compare_readings(runner, job)

"""The examples of docs/explanation/row-filters.md are what PostgreSQL, Spark and setup do."""

import itertools
import re
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from tests.support.pipelines import job_for, new_pipeline
from tests.support.servers.roles import connect_as, new_role
from waldelta.changes.decode.collapse import DELETE, INSERT, UPDATE
from waldelta.changes.decode.route import (
    SAME,
    SENT,
    UNKNOWN,
    judgement,
    operations_by_arrow,
    plan_routing,
)
from waldelta.errors import ConfigError
from waldelta.lake.ledger import ColumnState
from waldelta.postgres import TableId
from waldelta.postgres.type_catalog import read_types
from waldelta.row_filter import resolve_filter
from waldelta.row_filter.spark.translate import spark_condition
from waldelta.snapshot.read_table import raw_map
from waldelta.spark.arrow_schema import ddl
from waldelta.stages.setup.setup import plan_setup
from waldelta.types.type_map import target_type

pytestmark = pytest.mark.spark

PAGE = (Path(__file__).parents[3] / "docs/explanation/row-filters.md").read_text()
ORDERS = re.search(r"```sql\n(create table orders.*?)```", PAGE, re.DOTALL)[1]
TABLE = TableId("public", "orders")


def rows_of(*header: str) -> list[list[str]]:
    """The cells of the table with this header, without the backquotes around them."""
    after = PAGE.split("| " + " | ".join(header) + " |\n")[1].split("\n\n")[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in after.splitlines()[1:]]
    return [
        [cell.strip().replace("\\|", "|").removeprefix("`").removesuffix("`") for cell in line]
        for line in lines
    ]


KEPT, REFUSED = (
    rows_of("filter", "keeps", "because"),
    rows_of("filter", "the message says", "instead"),
)
UPDATES = rows_of("old row", "new row", "the target gets", "for example")
# Of a publication, with the words that setup has for each; the last one is no table's.
ENTRIES = [
    (f"tables: [{entry}]", " ".join(says.split()))
    for entry, says in re.findall(r'^- `(\{.+\})`:\s+setup says "([^"]+)"', PAGE, re.M)
] + [("all_tables: true", re.search(r"`(accept_future_tables: true)`", PAGE)[1])]


@pytest.fixture
def orders(database, conn, runner):
    """The page's table as a target holds it: its columns, and its rows as a Spark table."""
    database.execute(ORDERS)
    described = conn.execute(
        "select attname, atttypid::int8, atttypmod from pg_attribute where attrelid ="
        " 'public.orders'::regclass and attnum > 0 order by attnum"
    ).fetchall()
    types = read_types(conn, [(oid, typmod) for _, oid, typmod in described])
    columns, arrays, raws = [], {}, {}
    for name, oid, typmod in described:
        target = target_type(types[oid, typmod])
        # Not ::text, which strips the padding of char(n).
        texts = conn.execute(
            f"select case when {name} is distinct from null then concat({name}) end from"
            " public.orders order by id"
        )
        arrays[name], raw = target.from_text(pa.array([row[0] for row in texts], pa.string()))
        raws |= {} if raw is None else {name: raw}
        columns.append(
            ColumnState(name, oid, typmod, types[oid, typmod].name, target.spark, not_null=False)
        )
    held = pa.table(arrays)
    held = held.append_column("_wd_raw", raw_map(raws, len(held)))
    return columns, runner.spark().createDataFrame(held, ddl(held.schema))


def test_filters_that_are_translated(conn, orders):
    """Those of both tables keep the rows that the page says, in PostgreSQL and in Spark."""
    columns, frame = orders
    assert len(KEPT) > 12
    asked = [
        *((text, keeps) for text, keeps, _ in KEPT),
        *((text, None) for _, _, text in REFUSED if text),
    ]
    conditions = [spark_condition(resolve_filter(conn, TABLE, text), columns) for text, _ in asked]
    judged = frame.selectExpr(
        "id", *(f"coalesce({c}, false) as k{n}" for n, c in enumerate(conditions))
    ).collect()
    for number, (text, keeps) in enumerate(asked):
        theirs = [
            row[0]
            for row in conn.execute(
                f"select id from public.orders where {text} order by id".encode()
            )
        ]
        ours = sorted(row["id"] for row in judged if row[f"k{number}"])
        assert (text, ours) == (text, theirs)
        assert keeps is None or (text, ", ".join(map(str, ours)) or "none") == (text, keeps)


def test_filters_that_are_refused(conn, orders):
    """With the reason that the page tells."""
    assert len(REFUSED) > 7
    for text, says, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            spark_condition(resolve_filter(conn, TABLE, text), orders[0])
        assert says in str(caught.value), text


KINDS = {"I": "INSERT", "U": "UPDATE", "D": "DELETE"}
CODES = {INSERT: "INSERT", UPDATE: "UPDATE", DELETE: "DELETE", None: "nothing"}


def test_updates(database, conn, runner):
    """The filtered publication sends what the page says; routing makes the same."""
    database.execute(
        f"{ORDERS}; create publication filtered for table orders where (state = 'open')"
    )
    database.execute(
        "select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot := f"s_{database.name}",)
    )
    routing = plan_routing(
        resolve_filter(conn, TABLE, "state = 'open'"),
        [ColumnState("state", 25, -1, "text", "string", not_null=False)],
    )
    rows = []
    for _, _, gets, statement in UPDATES:
        (key,) = re.findall(r"id = (\d)", statement)
        before, after = (
            database.execute(text)
            and database.execute(f"select state from orders where id = {key}")[0][0]
            for text in ("select 1", f"{statement} returning 1")
        )
        rows.append((UPDATE, SENT, after, before))
        sent = database.execute(
            "select chr(get_byte(data, 0)) from pg_logical_slot_get_binary_changes(%s, null, null,"
            " 'proto_version', '1', 'publication_names', 'filtered')",
            (slot,),
        )
        assert [KINDS[kind] for (kind,) in sent if kind in KINDS] == (
            [] if gets == "nothing" else [gets]
        ), statement
    events = (
        runner.spark()
        .createDataFrame(rows, "op int, old_row int, n0 string, p0 string")
        .coalesce(1)
    )
    judged = [CODES[row[0]] for row in events.selectExpr(judgement(routing)).collect()]
    assert judged == [gets for _, _, gets, _ in UPDATES]


def test_routing_is_the_same_here_and_on_spark(database, conn, runner):
    """Each operation, what is known of the old row, and both rows: matching, not matching, null."""
    database.execute(ORDERS)
    routing = plan_routing(
        resolve_filter(conn, TABLE, "state = 'open'"),
        [ColumnState("state", 25, -1, "text", "string", not_null=False)],
    )
    states = ("open", "shut", None)
    kinds = itertools.product((INSERT, UPDATE, DELETE), (SAME, SENT, UNKNOWN), states, states)
    names = ("ord", "op", "old_row", "n0", "p0")
    rows = pa.table(
        dict(zip(names, zip(*((n, *row) for n, row in enumerate(kinds)), strict=True), strict=True))
    )
    frame = runner.spark().createDataFrame(rows.to_pylist(), ddl(rows.schema)).coalesce(1)
    expected = [row[0] for row in frame.selectExpr(judgement(routing)).collect()]
    assert operations_by_arrow(rows, routing)["op"].to_pylist() == expected
    assert {None, INSERT, UPDATE, DELETE} == {*expected}


def test_what_setup_refuses(database, conn, lake):
    """By the words that the page shows; before anything is changed."""
    database.execute(ORDERS.replace("alter table orders replica identity full;", ""))
    database.execute(
        "create table parts (id int primary key) partition by range (id); create table parts_1"
        " partition of parts default"
    )
    assert len(ENTRIES) == 6
    for entry, says in ENTRIES:
        plan = plan_setup(
            conn, job_for(database, lake, {"name": "p", **yaml.safe_load(f"{{{entry}}}")})
        )
        assert says in "\n".join(plan.problems), entry
    message = re.search(
        r"\n((?:    target\.tables\.public\.orders\.where uses.*\n)(?:    .*\n)+)", PAGE
    )[1]
    target = {"root": lake, "tables": {"public.orders": {"where": "state = 'open'"}}}
    plan = new_pipeline(database, lake, ["public.orders"], target=target).check()
    assert " ".join(message.split()) in " ".join(" ".join(plan.problems).split())
    assert database.execute("select count(*) from pg_publication") == [(0,)]


@pytest.mark.nightly("a page's words; test_drift has the change")
def test_what_a_run_says_when_a_filter_changed(runner, database, lake, monkeypatch):
    """A DBA's publication stays; a target's own filter is repaired."""
    database.execute(
        "create table t (id int primary key, a int); insert into t select g, g from"
        " generate_series(1, 10) g;create table u (id int primary key, a int); insert into u select"
        " g, g from generate_series(1, 40000) g; analyze u;alter table t replica identity full;"
        " alter table u replica identity full;create publication p for table t where (a > 5), u"
    )

    def pipeline(where):
        target = {"root": lake, "tables": {"public.u": {"where": where}}}
        source = {
            "conn_id": "test_source",
            "slot": f"s_{database.name}",
            "publications": [{"name": "p", "manage": False}],
        }
        return new_pipeline(database, lake, source=source, target=target)

    with new_role(database, "reader") as role:
        database.execute(
            f"grant select on t, u to {role}; grant temporary on database {database.name} to {role}"
        )
        connect_as(monkeypatch, database, role)
        is_as_told(runner, database, pipeline)


def is_as_told(runner, database, pipeline):
    pipeline("a > 30000").setup()
    pipeline("a > 30000").sync(runner)
    database.execute(
        "alter publication p set table t where (a < 3), u;insert into u select g, 1 from"
        " generate_series(50001, 50003) g; update u set a = -a where id > 50000"
    )
    repaired, told = sorted(
        pipeline("a <= 10000").consume(runner).warnings, key=lambda text: "drifted" in text
    )
    assert told.startswith(
        "public.t drifted from its source: its publications' filter is (a < 3), but its copy was"
        " made with (a > 5); the target stays as it is"
    )
    assert "a repair would add 2 rows and remove 5: " in told
    assert told.endswith("waldelta sync FILE --tables public.t")
    assert re.fullmatch(
        r"public\.u: target\.tables\.public\.u\.where is a <= 10000, but its copy was made with"
        r" a > 30000: it was repaired as of 0/[0-9A-F]+: 10,000 rows added, 10,000 removed, 3 that"
        r" changed during the repair were read again",
        repaired,
    )

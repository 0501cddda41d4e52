"""Leaves merged into one target, and one table split into several."""

import re

import pytest

from tests.oracles.compare import differing
from tests.oracles.target_rows import assert_equal, source_rows, target_rows
from tests.support.pipelines import copied_pipeline, pipeline_on
from waldelta.errors import PreflightFailed
from waldelta.jobs import Pipeline
from waldelta.stages.land.idle_check import check_idle

pytestmark = pytest.mark.spark

BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 100) i)"


def pipeline(
    database, lake, tables, targets, *, via_root=False, listed=None, checked=True
) -> Pipeline:
    """A pipeline that publishes these tables in one publication."""
    entries = listed or [{"name": f"public.{name}"} for name in tables]
    publication = {"name": "p", "tables": entries, "publish_via_partition_root": via_root}
    own = {f"public.{name}": entry for name, entry in targets.items()}
    target = {"root": lake, "tables": own}
    return pipeline_on(database, lake, publication, target=target, quality={"enabled": checked})


def mending(made) -> Pipeline:
    """The same with ``drift: repair``."""
    target = made.file.target.model_copy(update={"drift": "repair"})
    return Pipeline(made.file.model_copy(update={"target": target}))


# --- leaves gathered in one target

# Each root: its columns, its key, what its leaves have. Leaf _2 is partitioned itself, leaf _3 has
# its columns in another order and one that was dropped, leaf _4 is the default.
KINDS = {
    "by_root": ("primary key (id, part)", "", ""),
    "by_leaf": ("", "add primary key (id)", ""),
    "by_full": ("", "", "replica identity full"),
    "full_key": ("primary key (id, part)", "", "replica identity full"),
    "by_index": ("primary key (id, part)", "alter v set not null",
                 "replica identity using index {leaf}_v"),
}  # fmt: skip
# The key columns of their targets.
TARGET_KEYS = {
    "by_root": ["id", "part"],
    "by_leaf": ["_wd_relid", "id"],
    "by_full": [],
    "full_key": ["id", "part"],
    "by_index": ["_wd_relid", "v"],
}
LEAVES = ("1", "2_a", "2_b", "3", "4")


def ddl(root: str) -> str:
    key, leaf_key, identity = KINDS[root]
    keys = f", {key}" if key else ""
    made = f"""
        create table {root}(id int not null, part int not null, v text,
          big text{keys}) partition by range (part);
        create table {root}_1 partition of {root} for values from (0) to (10);
        create table {root}_2 partition of {root} for values
          from (10) to (20) partition by list (part);
        create table {root}_2_a partition of {root}_2 for values in (10, 11, 12);
        create table {root}_2_b partition of {root}_2 default;
        create table {root}_3(gone int, big text, v text, part int not null, id int not null{keys});
        alter table {root}_3 drop gone;
        alter table {root} attach partition {root}_3 for values from (20) to (30);
        create table {root}_4 partition of {root} default;"""
    for leaf in LEAVES:
        made += f"alter table {root}_{leaf} alter big set storage external;"
        made += f"alter table {root}_{leaf} {leaf_key};" if leaf_key else ""
        made += (
            f"create unique index {root}_{leaf}_v on {root}_{leaf}(v);"
            if "index" in identity
            else ""
        )
        made += (
            f"alter table {root}_{leaf} {identity.format(leaf=f'{root}_{leaf}')};"
            if identity
            else ""
        )
    return made


BEFORE = [
    (
        f"insert into t select g, g % 40, 'v' || g, case when g % 3 = 0 then {BIG} end from"
        " generate_series(1, 80) g"
    )
]
CHANGES = [
    (f"insert into t values (201, 1, 'a', {BIG}), (202, 11, 'b', {BIG}), (203, 21, 'c', {BIG}),"
     " (204, 99, 'd', null)"),
    "update t set v = v || '!' where id % 5 = 0",
    "update t set part = part + 10 where id between 201 and 203",  # crosses leaves
    "update t set part = 11, v = 'back' where id = 202",
    "update t set id = id + 1000 where part = 3",  # moves keys
    "update t set part = 25 where id = 6; update t set part = 6 where id = 25",
    "delete from t where id % 7 = 0",
    "truncate t_2_a",
    ("insert into t values (301, 10, 'after', 'x'), (302, 11, 'too', null); update t set v ="
     " 'then' where id = 301"),
    ("update t set part = 12 where id = 302; delete from t where id = 301; insert into t values"
     " (303, 12, 'new', null)"),
    "truncate t_1; insert into t values (401, 1, 'again', null); truncate t_1",
    "update t set part = 2 where id = 203",  # into a leaf that was emptied
    ("begin; savepoint s; truncate t_3; insert into t values (500, 20, 'z'); rollback to s;"
     " insert into t values (501, 20, 's'); commit"),
]  # fmt: skip
# Of two of them one leaf and nothing else; of the others the whole tree.
THEN = ["truncate t_3"]
ALL = [
    (
        "truncate t; insert into t values (1, 1, 'r', null), (2, 12, 's', null), (3, 22, 't',"
        " null), (4, 40, 'u', null)"
    )
]
# A new leaf, a new column.
LAST = [
    "create table t_5 partition of t for values from (100) to (110)",
    "insert into t values (600, 100, 'n'), (601, 20, 'o')",
    "alter table t add column more text default 'd'",
    (
        "insert into t values (602, 101, 'p', null, 'm'), (603, 1, 'q', null, 'n'); update t set"
        " more = 'x' where id = 1"
    ),
]
TIDY = {
    "by_full": "alter table t_5 replica identity full",
    "by_leaf": "alter table t_5 add primary key (id)",
    "by_index": (
        "alter table t_5 alter v set not null; create unique index t_5_v on t_5(v); "
        "alter table t_5 replica identity using index t_5_v"
    ),
    "full_key": "alter table t_5 replica identity full",
}


DUPLICATES = [
    "insert into by_full select id, part, v, big from by_full where part in (15, 35)",
    (
        "delete from by_full where part = 15 and ctid in (select min(ctid) from by_full where part"
        " = 15 group by id)"
    ),
    (
        "update by_full set v = 'one of two' where part = 35 and ctid in (select min(ctid) from"
        " by_full where part = 35)"
    ),
]


def on_each(database, statements, roots):
    """Run the statements, which are about ``t``, on each root."""
    for root in roots:
        for statement in statements:
            database.execute(re.sub(r"\bt(_\w+)?\b(?!')", rf"{root}\1", statement))
            if "t_5 partition" in statement and root in TIDY:
                database.execute(TIDY[root].replace("t_5", f"{root}_5"))


@pytest.mark.parametrize(
    "roots",
    [
        ("by_leaf", "by_full"),
        pytest.param(
            ("by_root", "full_key", "by_index"),
            marks=pytest.mark.nightly("the same statements on further keys and identities"),
        ),
    ],
    ids=" ".join,
)
def test_gathered_leaves(runner, database, lake, monkeypatch, roots):
    """TRUNCATE of one leaf between others, rows that cross leaves, a new leaf, a new column."""
    for root in roots:
        database.execute(ddl(root))
    on_each(database, BEFORE, roots)
    gathered = {root: {"partition_root": True} for root in roots}
    made = pipeline(database, lake, roots, gathered, checked=False)
    told, root = made.setup().describe(), roots[0]
    assert f"public.{root} merges partitions public.{root}_1, public.{root}_2_a" in told
    made.sync(runner)
    columns = ["_wd_relid", "id", "part", "v", "big"]

    def compare(*what):
        for root in roots:
            theirs = source_rows(database, root, *["tableoid::bigint", *columns[1:]])
            assert_equal(target_rows(made.job(), root, *columns), theirs, root, what)

    compare("copied")
    keys = {name: state.key_columns for name, state in made.job().read_states().items()}
    assert keys == {f"public.{root}": TARGET_KEYS[root] for root in roots}
    for statement in DUPLICATES if "by_full" in roots else ():
        database.execute(statement)
    for number, statements in enumerate((CHANGES, THEN, LAST)):
        if statements is THEN:
            for root in roots:
                on_each(database, THEN if root in ("by_root", "by_full") else ALL, (root,))
        else:
            on_each(database, statements, roots)
        with monkeypatch.context() as patch:
            if number == 0:
                patch.setattr(
                    "waldelta.lake.changelog.batch_range.MOST_DRIVER_ROWS", 0
                )  # Spark's tasks decode
            assert made.consume(runner, f"run {number}").warnings == []
        columns += ["more"] if statements is LAST else []
        compare(statements)
    assert differing(runner, made.job()) == {}
    assert {found["action"] for found in made.status()["targets"].values()} == {"apply"}


# --- one table in several targets

SPLIT = f"""
create table f(id int primary key, origin text, v text, big text); alter table f replica identity
  full;
alter table f alter big set storage external;
create table r(id int, v text, primary key (id)) partition by range (id);
create table r_1 partition of r for values from (minvalue) to (10);
create table r_2 partition of r for values from (10) to (20) partition by range (id);
create table r_2_a partition of r_2 for values from (10) to (15);
create table r_2_b partition of r_2 for values from (15) to (20);
create table r_3 partition of r default;
create table l(id int, region text, at timestamptz, v text, primary key (id,
  region)) partition by list (region);
create table l_1 partition of l for values in ('a', 'b');
create table l_2 partition of l for values in ('c');
alter table l replica identity full; alter table l_1 replica identity full;
alter table l_2 replica identity full;
insert into f select g, case g % 3 when 0 then 'LAX' when 1 then 'SFO' end, 'v', {BIG}
  from generate_series(1, 12) g;
insert into r select g, 'v' from generate_series(1, 25) g;
insert into l select g, (array['a', 'b', 'c'])[g % 3 + 1],
  '2026-01-01'::timestamptz + g * interval '1 day', 'v'
from generate_series(1, 12) g;
"""
SPLIT_TARGETS = {
    "f": {},
    "f_lax": {"from": "public.f", "where": "origin = 'LAX'"},
    "f_big": {"from": "public.f", "where": "id > 100 or origin is null"},
    "r_1": {"from": "public.r"},
    "r_2": {"from": "public.r"},
    "r_3": {"from": "public.r", "where": "id <> 22 -- but one"},
    "l_1": {"from": "public.l", "where": "v <> 'no'"},
    "l_2": {"from": "public.l"},
}
# What each target holds, as the source has it.
HELD = {
    "f": ("f", "true"),
    "f_lax": ("f", "origin = 'LAX'"),
    "f_big": ("f", "id > 100 or origin is null"),
    "r_1": ("r_1", "true"),
    "r_2": ("r_2", "true"),
    "r_3": ("r_3", "id <> 22"),
    "l_1": ("l_1", "v <> 'no'"),
    "l_2": ("l_2", "true"),
}
SPLIT_CHANGES = [
    "insert into f values (101, 'LAX', 'x', null), (102, 'SFO', 'y', null), (13, null, 'z', null)",
    ("update f set origin = case origin when 'LAX' then 'SFO' else 'LAX' end where id < 8;"
     " update f set id = id + 200 where id = 9"),
    "delete from f where id in (102, 12)",
    ("delete from r where id in (14, 15, 23); update r set id = id + 10 where id in (4, 5, 13);"
     " update r set id = 4 where id = 21"),
    ("update r set v = 'w' where id % 2 = 0; delete from r where id in (1, 16, 25); insert into"
     " r values (16, 'n'), (26, 'n')"),
    ("update l set region = 'c', v = 'moved' where id in (1, 2); update l set region = 'b' where"
     " id = 5; update l set v = 'no' where id = 6"),
    "delete from l where id = 8; insert into l values (20, 'a'), (21, 'c')",
]  # fmt: skip
SPLIT_THEN = [
    (
        "alter table f add column more int default 7; insert into f values (30, 'LAX', 'm', null,"
        " 8), (31, 'SFO', 'm', null, 9)"
    ),
    "truncate r; insert into r values (1, 'r'), (11, 'r'), (16, 'r'), (30, 'r')",
    (
        "create table l_3 partition of l for values in ('d'); alter table l_3 replica identity"
        " full; insert into l values (40, 'd', null, null), (41, 'a', null, 'x')"
    ),
]


@pytest.mark.soak("several targets in many runs")
def test_one_table_in_several_targets(runner, database, lake):
    """By filters and by partitions; rows that go from one to another; and the checks pass."""
    for statement in filter(str.strip, SPLIT.split(";\n")):
        database.execute(statement)
    made = pipeline(database, lake, ["f", "r", "l"], SPLIT_TARGETS, via_root=True, checked=False)
    told = made.setup().describe()
    assert "public.r_1 gets the changes of public.r where ((id IS NOT NULL) AND (id < 10))" in told
    assert "public.r is not a target itself" in told
    assert "public.f_lax gets the changes of public.f where origin = 'LAX'" in told
    made.sync(runner)

    def compare(*what):
        for table, (source, where) in HELD.items():
            state = made.job().read_states()[f"public.{table}"]
            names = [c.name for c in state.columns if c.name != "at"]
            assert_equal(
                target_rows(made.job(), table, *names),
                source_rows(database, source, *names, where=where),
                what,
            )

    compare("copied")
    for number, statements in enumerate((SPLIT_CHANGES, SPLIT_THEN)):
        for statement in statements:
            database.execute(statement)
        result = made.consume(runner, f"run {number}")
        assert not any("copied again" in text for text in result.warnings), result.warnings
        compare(statements)
    assert set(made.status()["targets"]) == {f"public.{name}" for name in SPLIT_TARGETS}
    pipeline(database, lake, ["f", "r", "l"], SPLIT_TARGETS, via_root=True).validate(runner)
    others = {name: of for name, of in SPLIT_TARGETS.items() if name != "l_2"}
    others |= {"f_big": {"from": "public.f", "where": "id > 200"}}
    fewer = mending(pipeline(database, lake, ["f", "r", "l"], others, via_root=True, checked=False))
    # Of the targets of the root, the one whose partition was emptied is mended, by its rows.
    database.execute(
        "truncate r_2_b; insert into r values (17, 'r'), (18, 'r'); update r set v = 'late' where"
        " id in (1, 11)"
    )
    told = [
        text
        for text in fewer.consume(runner, "fewer").warnings
        if "copied" in text or "repaired" in text
    ]
    assert [text.split(":")[0] for text in told] == ["public.f_big", "public.r_2"]
    assert all("it was repaired" in text for text in told), told
    job = fewer.job()
    assert target_rows(job, "f_big", "id") == source_rows(database, "f", "id", where="id > 200")
    for table in ("r_1", "r_2"):
        ours = target_rows(job, table, "id", "v")
        assert_equal(ours, source_rows(database, table, "id", "v"), table)
    assert fewer.status()["targets"]["public.l_2"]["action"] == "removed"


# --- leaves that come with rows, or go


def test_a_leaf_that_is_published_later(runner, database, lake):
    """The rows that it had before were sent to nobody: a run reports it, and a copy helps."""
    database.execute(
        "create table p(id int primary key, v text) partition by range (id); create table p_1"
        " partition of p for values from (0) to (10); create table p_2 partition of p for values"
        " from (10) to (20);insert into p select g, 'v' from generate_series(8, 11) g"
    )
    gathered = {"p": {"partition_root": True}}
    copied_pipeline(runner, pipeline(database, lake, ["p_1"], gathered, checked=False))
    both = pipeline(database, lake, ["p_1", "p_2"], gathered, checked=False)
    both.setup()
    assert "publication drift" in check_idle(both.job("look")).reason
    database.execute("insert into p values (12, 'new')")
    assert any(
        "partition public.p_2 was added" in text for text in both.consume(runner, "one").warnings
    )
    assert set(target_rows(both.job(), "p", "id")) == {(8,), (9,), (12,)}
    assert both.consume(runner, "two").warnings == []
    database.execute("create table p_3 partition of p for values from (20) to (30)")
    three = pipeline(database, lake, ["p_1", "p_2", "p_3"], gathered, checked=False)
    three.setup()
    three.sync(runner, ["public.p"])
    assert target_rows(three.job(), "p", "id") == source_rows(database, "p", "id")


def test_gathered_leaves_that_came_and_went_are_mended(runner, database, lake):
    """The rows of the one that was attached enter, and those of the one that was detached leave."""
    database.execute(
        "create table p(id int primary key, v text) partition by range (id); create table p_1"
        " partition of p for values from (0) to (10); create table p_2 partition of p for values"
        " from (10) to (20); insert into p select g, 'v' from generate_series(1, 15) g;"
        " create table late(v text, id int primary key); insert into late values ('had', 21)"
    )
    gathered = {"p": {"partition_root": True}}
    made = mending(pipeline(database, lake, ["p"], gathered, checked=False))
    copied_pipeline(runner, made)
    database.execute(
        "alter table p attach partition late for values from (20) to (30); alter table p detach"
        " partition p_1; delete from p_1; update p set v = 'w' where id = 12"
    )
    (told,) = made.consume(runner, "one").warnings
    assert "it was repaired" in told
    assert "1 row added, 9 removed" in told
    theirs = source_rows(database, "p", "tableoid::bigint", "id", "v")
    assert target_rows(made.job(), "p", "_wd_relid", "id", "v") == theirs
    database.execute("insert into p values (22, 'new')")
    assert made.consume(runner, "two").warnings == []
    assert (22,) in target_rows(made.job(), "p", "id")


# --- setup

DDL = """
create table t(id int primary key, a int); create table plain(id int primary key);
create table p(id int, a int, v text) partition by range (id);
create table p_1 partition of p for values from (0) to (10); alter table p_1 add primary key (id);
create table p_2 partition of p default; alter table p_2 add primary key (id);
create table q(id int, a int) partition by range (id);
create table q_1 partition of q for values from (0) to (10); alter table q_1 add primary key (id);
create table q_2 partition of q default; alter table q_2 add primary key (id, a);
create table h(id int primary key) partition by hash (id);
create table h_1 partition of h for values with (modulus 2, remainder 0);
create table h_2 partition of h for values with (modulus 2, remainder 1);
"""
GATHER = {"partition_root": True}
PART = [{"name": "public.p_1", "where": "id > 1"}, {"name": "public.p_2"}]
LISTS = [
    {"name": "public.p_1", "columns": ["id", "a"]},
    {"name": "public.p_2", "columns": ["id", "v"]},
]
# What is published, whether via roots, the targets, what setup says.
REFUSED = {
    "no such root": (["t"], False, {"nope": GATHER},
                     r"nope.partition_root: public.nope does not exist"),
    "not partitioned": (["t"], False, {"t": GATHER},
                        r"public.t isn't partitioned: remove partition_root"),
    "via its root": (["p"], True, {"p": GATHER},
                     r"published via its root.*publish_via_partition_root: false"),
    "not published": (["t"], False, {"p": GATHER},
                      r"no publication of this pipeline publishes a partition"),
    "other keys": (["q"], False, {"q": GATHER},
                   r"different keys \(public.q_1: id; public.q_2: a, id\): give them the same"),
    "other filters": (PART, False, {"p": GATHER},
                      r"different row filters \(public.p_1: .*id > 1.*; public.p_2: none\)"),
    "other columns": (LISTS, False, {"p": GATHER},
                      r"different column lists \(public.p_1: a, id; public.p_2: id, v\)"),
    "a leaf with an entry": (["p"], False, {"p": GATHER, "p_1": {}},
                             r"public.p_1 can't be a target too"),
    "from what is gathered": (["p"], False, {"p": GATHER,
                                             "a": {"from": "public.p_1", "where": "id > 1"}},
                              r"partition_root merges the partitions of public.p_1"),
    "from nowhere": (["t"], False, {"a": {"from": "public.plain", "where": "id > 1"}},
                     r"no publication.*publishes public.plain"),
    "from a leaf of a root": (["p"], True, {"a": {"from": "public.p_1", "where": "id > 1"}},
                              r"under that name.*the root"),
    "a name that is published": (["t", "plain"], False,
                                 {"plain": {"from": "public.t", "where": "id > 1"}},
                                 r"target names are unique: choose another"),
    "a table of that name": (["t"], False, {"plain": {"from": "public.t", "where": "id > 1"}},
                             r"isn't a partition of public.t"),
    "all of it": (["t"], False, {"a": {"from": "public.t"}},
                  r"no partition of public.t, so it would hold all.*write a where"),
    "hash": (["h"], True, {"h_1": {"from": "public.h"}}, r"h_1.from.*satisfies_hash_partition"),
    "outside the identity": (["t"], False, {"a": {"from": "public.t", "where": "a > 5"}},
                             r"replica identity full"),
}  # fmt: skip
ALLOWED = {
    "leaves with keys of their own": (["p"], False, {"p": GATHER}),
    "some leaves": (["p_1"], False, {"p": GATHER}),
    "gathered, filtered by the key": (["p"], False, {"p": GATHER | {"where": "id > 5"}}),
    "two of one": (["t"], False, {"a": {"from": "public.t", "where": "id > 5"},
                                  "b": {"from": "public.t", "where": "id < 9"}}),
}  # fmt: skip


def test_setup_allows(database, lake):
    """What works."""
    database.execute(DDL)
    for case, (tables, via_root, targets) in ALLOWED.items():
        made = pipeline(database, lake, tables, targets, via_root=via_root)
        assert not made.check().problems, case


def test_setup_refuses_by_name(database, lake):
    """With the place and the remedy, before anything is changed."""
    database.execute(DDL)
    for case, (tables, via_root, targets, message) in REFUSED.items():
        listed = [
            entry if isinstance(entry, dict) else {"name": f"public.{entry}"} for entry in tables
        ]
        made = pipeline(database, lake, [], targets, via_root=via_root, listed=listed)
        with pytest.raises(PreflightFailed) as caught:
            made.setup()
        assert re.search(message, str(caught.value)), (case, str(caught.value))
    assert database.execute("select count(*) from pg_publication") == [(0,)]

"""The pipeline against PostgreSQL's own subscription: the same changes, the same rows."""

import os
from dataclasses import replace
from itertools import combinations, count, islice

import psycopg
import pytest
from deltalake import DeltaTable

from tests.oracles.publication_cases import all_cases, scenario, some_cases
from tests.oracles.publication_scenarios import RandomScenario, together
from tests.oracles.scenario import Scenario, running
from tests.support.seeds import chosen_seed, is_long
from waldelta.lake.ledger import now

pytestmark = [pytest.mark.pg, pytest.mark.spark, pytest.mark.usefixtures("merged_by_tasks")]

BEFORE = "insert into {t} select g, g % 6, 'v' || g, 'w' from generate_series(1, 24) g;"
# One batch each. Part 0 to 3 is published; ids from 100 on lie in another leaf.
STEPS = {
    "every kind of change": [
        "insert into {t} select g, g % 6, 'n' || g, 'w' from generate_series(25, 36) g",
        "update {t} set v = v || ' changed' where id in (1, 4, 25)",  # inside, outside, new
        "update {t} set w = null where id in (2, 5)",
        "update {t} set part = part - 3 where id in (5, 10, 29)",  # enters
        "update {t} set part = part + 3 where id in (1, 7, 25)",  # leaves
        "update {t} set part = 5 where id in (4, 16)",  # stays outside
        "delete from {t} where id in (3, 11, 26)",
        (
            "begin; update {t} set part = 0 where id = 22; update {t} set part = 5 where id = 22;"
            " commit"
        ),
        (
            "begin; update {t} set part = 4 where id = 12; update {t} set part = 1, v = 'back'"
            " where id = 12; commit"
        ),
        (
            "begin; savepoint s; delete from {t}; rollback to s; update {t} set v = null where id ="
            " 13; commit"
        ),
    ],
    "keys move": [
        "update {t} set id = id + 50 where id in (6, 8)",
        "update {t} set id = id + 100 where id in (9, 14, 15)",  # to the other leaf
        "update {t} set id = id + 100, part = 1 where id in (17, 23)",  # and into the filter
        "update {t} set id = id + 100, part = 5 where id in (18, 19)",  # and out of it
        (
            "begin; delete from {t} where id = 20; insert into {t} values (20, 2, 'again', null);"
            " commit"
        ),
        (
            "begin; delete from {t} where id = 21; insert into {t} values (21, 5, 'again', null);"
            " commit"
        ),
        (
            "insert into {t} values (150, 1, 'x', 'y'); update {t} set id = 99 where id = 150;"
            " update {t} set id = 151 where id = 99"
        ),
    ],
    "a leaf is truncated": [
        "truncate {leaf}",
        "insert into {t} values (40, 1, 'after', 'y'), (41, 5, 'after', 'y')",
    ],
    "all is truncated": [
        "begin; truncate {t}; insert into {t} values (1, 1, 'a', 'b'), (2, 5, 'c', 'd'); commit",
        "update {t} set part = 2 where id = 2",
    ],
}

# All of it needs half as many runs when the first two come in one batch; the last is a test of its
# own elsewhere. What TRUNCATE does doesn't ask for the identity: one stands for all.
SHORT = {
    "every kind of change, keys move": [*STEPS["every kind of change"], *STEPS["keys move"]],
    "a leaf is truncated": STEPS["a leaf is truncated"],
}


def for_all(cases, statements):
    leaf = {case: case.name if case.layout == "plain" else f"{case.name}_1" for case in cases}
    return [text.format(t=case.name, leaf=leaf[case]) for text in statements for case in cases]


def test_every_two_properties_meet():
    """In the few cases that make test takes as well as in all of them."""

    def pairs(cases):
        properties = [
            (("identity", c.identity), (c.filter,), (c.layout,), ("listed", c.listed))
            for c in cases
        ]
        return {pair for of_one in properties for pair in combinations(of_one, 2)}

    assert pairs(some_cases()) == pairs(all_cases())


@pytest.mark.nightly("the cross product, beside random scenarios")
def test_cross_product(runner, database, postgres, lake):
    """Replica identity x operation x filter x partition root x column list; all in a soak."""
    cases = all_cases() if is_long() else some_cases()
    before = "".join(for_all(cases, [BEFORE]))
    with running(runner, database, postgres, lake, scenario(cases, before)) as both:
        for what, statements in STEPS.items() if is_long() else SHORT.items():
            concerned = [
                c for c in cases if is_long() or "truncated" not in what or c.identity == "default"
            ]
            both.step(*for_all(concerned, statements), what=what)


SCENARIOS = int(os.environ.get("WALDELTA_SCENARIOS") or 4)
TOGETHER = 16  # over one slot


@pytest.mark.parametrize("first", range(0, SCENARIOS, TOGETHER))
def test_random_scenarios(runner, database, postgres, lake, first):
    """Four in make test; WALDELTA_SCENARIOS says how many; their seeds are printed, and
    WALDELTA_SEED=s WALDELTA_SCENARIOS=1 repeats one alone.
    """
    seed = chosen_seed() + first
    scenarios = [RandomScenario(seed + n) for n in range(min(TOGETHER, SCENARIOS - first))]
    small = {"batch": {"max_changes": 50}} if first // TOGETHER % 2 == 0 else {}
    with running(runner, database, postgres, lake, replace(together(scenarios), **small)) as both:
        # One run, two, one, two …; those of small batches are applied while others land
        for number in range(1 + first // TOGETHER % 2):
            for scenario in scenarios:
                both.write(scenario.transactions(12))
            both.step(what=(f"WALDELTA_SEED={seed}", number))


@pytest.mark.nightly("random replays, beside random scenarios")
def test_a_replay_is_what_the_subscriber_has(runner, database, postgres, lake):
    """Random changes; targets are set back to before each run, which is replayed.

    Only of publications that send every change: a replay brings rows as the source has them.
    """
    seed = chosen_seed()
    scenarios = [*islice((s for s in map(RandomScenario, count(seed)) if s.exact), 4)]
    with running(runner, database, postgres, lake, together(scenarios)) as both:
        for number in range(3):
            paths = map(both.pipeline.target_path, both.subscribed())
            versions = {path: DeltaTable(path).version() for path in paths}
            start = now()
            for scenario in scenarios:
                both.write(scenario.transactions(8))
            both.step(what=(f"WALDELTA_SEED={seed}", number))
            until = now()
            for path, version in versions.items():
                if DeltaTable(path).version() > version:
                    DeltaTable(path).restore(version)
            replayed = both.pipeline.replay(runner, start, until)
            both.compare((f"WALDELTA_SEED={seed}", number, replayed.warnings))


# Publications that others made, of tables whose own UPDATEs and DELETEs fail since then.
_UNFIT = """
create table no_key(id int, v int);
create table outside(id int primary key, v int);
create table lacks_key({id}v int not null);
create table whole_row(id int primary key, v int);
alter table whole_row replica identity full;
create table parted(id int primary key, v int) partition by range (id);
create table parted_1 partition of parted for values from (0) to (100);
create table parted_2 partition of parted default;
alter table parted_1 replica identity nothing;
alter table parted_2 replica identity full;
"""
UNFIT = Scenario(
    tables=_UNFIT.format(id="id int primary key, "),
    subscriber_tables=_UNFIT.format(id=""),
    create_publications="""
create publication theirs for table no_key, outside where (v > 0), lacks_key(v), whole_row(id, v);
create publication by_root for table parted with (publish_via_partition_root = true);
""",
    publications=("theirs", "by_root"),
    before=(
        "insert into no_key values (1, 1), (1, 1); insert into outside values (1, 1), (2, 0);"
        " insert into lacks_key values (1, 1);insert into whole_row values (1, 1); insert into"
        " parted values (1, 1), (100, 1), (101, 1);"
    ),
)
REFUSED = (
    "update no_key set v = 2",
    "delete from outside",
    "update lacks_key set v = 2",
    "update whole_row set v = 2",
    "delete from parted where id = 1",
)


@pytest.mark.nightly("publications of others, beside random scenarios")
def test_publications_of_others_that_refuse_updates(runner, database, postgres, lake):
    """Setup names the consequence; the pipeline does as PostgreSQL's subscriber."""
    with running(runner, database, postgres, lake, UNFIT) as both:
        for statement in REFUSED:
            with pytest.raises(psycopg.Error, match=r"replica identity|column list"):
                database.execute(statement)
        plan = both.pipeline.check()
        assert plan.problems == ()
        for table in (
            "no_key",
            "outside",
            "lacks_key",
            "whole_row",
            "parted, partition public.parted_1",
        ):
            found = [text for text in plan.warnings if f"table public.{table}: " in text]
            assert any(
                "so its own UPDATEs and DELETEs fail on the source" in text for text in found
            )
        both.step(
            "insert into no_key values (1, 1), (2, 2); insert into outside values (3, 3), (4, 0);"
            " insert into lacks_key values (2, 2);insert into whole_row values (2, 2); insert into"
            " parted values (2, 2), (102, 2)",
            "update parted set v = 3 where id = 101; delete from parted where id = 100",
            what="inserts",
        )
        both.step("truncate lacks_key", "insert into lacks_key values (5, 5)", what="truncate")
        both.step(
            "alter table no_key replica identity full; alter table parted_1 replica identity"
            " default",
            "update no_key set v = v + 1; delete from parted where id = 1",
            what="mended on the source",
        )

"""A pipeline's life through the public surface: tables added later, teardown and a second life."""

from tests.oracles.compare import differing
from tests.support.pipelines import copied_pipeline, new_pipeline


def test_a_table_added_to_the_publication_later(runner, database, lake):
    """Setup alters by the difference, sync copies the new table alone, consume feeds both."""
    database.execute(
        "create table a(id int primary key, v text); create table b(id int primary key, v text)"
    )
    database.execute("insert into a values (1, 'a'); insert into b values (1, 'b')")
    copied_pipeline(runner, new_pipeline(database, lake, ["public.a"]))
    database.execute("insert into b values (2, 'before'); insert into a values (2, 'a2')")
    second = new_pipeline(database, lake, ["public.a", {"name": "public.b", "where": "id < 100"}])
    plan = second.setup()
    assert "add table" in plan.as_sql().lower()
    database.execute("insert into b values (3, 'between'), (300, 'filtered')")
    copied = second.sync(runner)
    assert list(copied.tables) == ["public.b"]
    database.execute(
        "update b set v = 'after' where id = 1; delete from b where id = 2; update a set v = 'x'"
    )
    second.consume(runner)
    assert differing(runner, second.job()) == {}
    assert second.setup().is_empty


def test_a_table_that_left_the_publication_and_returns_is_copied_again(runner, database, lake):
    """What it got meanwhile is in no change; until it returns its target stays."""
    database.execute(
        "create table a(id int primary key, v text); create table b(id int primary key, v text)"
    )
    database.execute("insert into a values (1, 'a'); insert into b values (1, 'b')")
    both = copied_pipeline(runner, new_pipeline(database, lake, ["public.a", "public.b"]))
    without = new_pipeline(database, lake, ["public.a"])
    without.setup()
    assert without.job().read_states()["public.b"].status == "removed"
    database.execute("insert into b values (2, 'nobody listened'); insert into a values (2, 'a2')")
    assert without.consume(runner).targets.not_applied == []
    both.setup()
    database.execute("insert into b values (3, 'heard')")
    assert list(both.sync(runner).tables) == ["public.b"]
    database.execute("insert into b values (4, 'after')")
    both.consume(runner)
    assert differing(runner, both.job()) == {}


def test_teardown_and_a_second_life(runner, database, lake):
    """Teardown removes what the pipeline made; after a new setup old copies are taken again."""
    database.execute("create table a(id int primary key, v text); insert into a values (1, 'a')")
    pipeline = copied_pipeline(runner, new_pipeline(database, lake, ["public.a"]))
    database.execute("insert into a values (2, 'b')")
    pipeline.consume(runner)
    assert pipeline.teardown()
    assert database.execute("select count(*) from pg_publication") == [(0,)]
    assert database.execute(
        "select count(*) from pg_replication_slots where database = current_database()"
    ) == [(0,)]
    database.execute("insert into a values (3, 'nobody listened'); delete from a where id = 1")
    pipeline.setup()
    assert pipeline.job().read_states() == {}
    pipeline.sync(runner)
    database.execute("insert into a values (4, 'second life')")
    pipeline.consume(runner)
    assert differing(runner, pipeline.job()) == {}

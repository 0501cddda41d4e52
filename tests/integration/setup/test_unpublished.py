"""Tables that the file lists and no publication has: each run says so until they are back."""

import pytest

from tests.support.pipelines import job_for
from waldelta.postgres import connect
from waldelta.postgres.publication_checks import unpublished
from waldelta.stages.setup.setup import apply_setup

pytestmark = pytest.mark.pg


def test_what_counts_as_published(any_database, lake):
    """By its own entry, its root's, its schema's, or with all tables."""
    any_database.execute(
        "create table t (id int primary key); create table r (id int primary key) partition by"
        " range (id);create table r1 partition of r default; create schema app; create table app.t"
        " (id int primary key);create publication theirs for table t"
    )
    tables = [{"name": f"public.{name}"} for name in ("t", "r", "r1")]
    with connect(any_database.conninfo, "test") as conn:
        own = {
            "name": "p",
            "tables": [*tables, {"name": "app.t"}],
            "schemas": ["app"],
            "accept_future_tables": True,
        }
        job = job_for(any_database, lake, own, {"name": "theirs", "manage": False})

        def lacking():
            return list(unpublished(conn, job.pipeline.source).tables)

        assert lacking() == ["app.t", "public.r", "public.r1", "public.t"]
        apply_setup(conn, job)
        assert lacking() == []
        any_database.execute(
            "alter publication p drop table r1, app.t; alter publication theirs drop table t"
        )
        assert lacking() == []
        any_database.execute(
            "alter publication p drop tables in schema app; alter publication p drop table r"
        )
        assert lacking() == ["app.t", "public.r", "public.r1"]
        any_database.execute("drop publication p; create publication p for all tables")
        assert lacking() == []
        any_database.execute("drop publication p")
        assert lacking() == ["app.t", "public.r", "public.r1", "public.t"]


def test_a_renamed_publication_is_named_with_its_present_name(any_database, lake, caplog):
    """Its tables aren't missing from it."""
    any_database.execute("create table t (id int primary key); create table u (id int primary key)")
    own = {"name": "p", "tables": [{"name": "public.t"}, {"name": "public.u"}]}
    job = job_for(any_database, lake, own)
    with connect(any_database.conninfo, "test") as conn:
        apply_setup(conn, job)
        any_database.execute("alter publication p rename to q")
        (told,) = unpublished(conn, job.pipeline.source).warnings()
        assert told == (
            "publication 'p' does not exist, so PostgreSQL sends no changes of its tables: it may"
            " be 'q' now: alter publication q rename to p, or run setup; then run the initial sync"
            " of its tables"
        )
        any_database.execute("drop publication q")
        (told,) = unpublished(conn, job.pipeline.source).warnings()
        assert "no publication has its mark, so it was dropped: run setup; then" in told
        any_database.execute("create publication p for table t")
        (told,) = unpublished(conn, job.pipeline.source).warnings()
        begins = "in the pipeline file, but not published: public.u; the source has "
        assert told.startswith(f"{begins}the table, but its publication doesn't name it")
        any_database.execute("drop table u")
        (told,) = unpublished(conn, job.pipeline.source).warnings()
        assert told.startswith(f"{begins}no table of this name")

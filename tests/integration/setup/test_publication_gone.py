"""Publications, or tables of them, that are dropped or made behind our back."""

import pytest

from tests.support.pipelines import job_for
from waldelta.errors import PreflightFailed, PublicationGone
from waldelta.lsn import Lsn
from waldelta.postgres.publication_checks import find_unpublished
from waldelta.slot.read.peek import PeekBound, call, peek
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup import _slot_setup as younger
from waldelta.stages.setup.setup import apply_setup, plan_setup


@pytest.mark.parametrize("how", ["created anew", "dropped", "listed too early"])
def test_a_publication_that_is_gone_where_the_slot_is_read(any_database, any_conn, lake, how):
    """Before 18 waiting changes can't be decoded then; 18 passes over it."""
    any_database.execute("create table t (id int primary key); create table u (id int primary key)")
    job = job_for(any_database, lake, {"name": "p", "tables": [{"name": "public.t"}]})
    apply_setup(any_conn, job)
    any_database.execute("insert into t values (1)")
    entries = [{"name": "p", "tables": [{"name": "public.t"}]}]
    if how == "listed too early":
        any_database.execute("create publication q for table u")
        entries.append({"name": "q", "manage": False})
    else:
        any_database.execute("drop publication p; insert into t values (2)")
        any_database.execute(
            "create publication p for table t" if how == "created anew" else "select"
        )
    job = job_for(any_database, lake, *entries, slot=job.pipeline.source.slot)
    if any_conn.info.server_version >= 180000 or how != "listed too early":
        assert check_idle(job).has_work  # the first change that waits can be read
    else:
        with pytest.raises(
            PublicationGone,
            match="remove it from the file, let a run consume the waiting changes",
        ):
            check_idle(job)
    if any_conn.info.server_version < 180000:
        with pytest.raises(PublicationGone, match="does not exist at the WAL position"):
            list(
                peek(
                    job.source.conninfo,
                    job.pipeline.source,
                    PeekBound(Lsn((1 << 63) - 1), None, 60.0, 1),
                )
            )


def test_setup_and_the_run_name_the_same_way_out(any_database, any_conn, lake):
    """Of a publication that setup is to make, on a slot that is read already."""
    any_database.execute("create table t (id int primary key); create table u (id int primary key)")
    ours, theirs = (
        {"name": name, "tables": [{"name": f"public.{of}"}]}
        for name, of in (("p", "t"), ("q", "u"))
    )
    first = job_for(any_database, lake, ours)
    apply_setup(any_conn, first)
    slot = first.pipeline.source.slot
    job = job_for(any_database, lake, ours, theirs, slot=slot)
    if any_conn.info.server_version >= 180000:
        assert apply_setup(any_conn, job).problems == ()
        return
    any_database.execute("insert into t values (1)")
    way_out = "add its tables to a publication that this slot already reads"
    assert way_out in " ".join(plan_setup(any_conn, job).problems)
    with pytest.raises(PublicationGone, match=way_out):
        check_idle(job)
    both = {"name": "p", "tables": [{"name": "public.t"}, {"name": "public.u"}]}
    followed = job_for(any_database, lake, both, slot=slot)
    assert apply_setup(any_conn, followed).problems == ()
    any_database.execute("insert into u values (2)")
    assert _inserted(any_database, followed) == ["1", "2"]


def test_setup_and_check_name_a_dbas_publication_that_is_younger_than_the_slot(
    any_database, any_conn, lake
):
    """They try a copy of the slot; 18 sends what came after the publication."""
    any_database.execute("create table t (id int primary key); create table u (id int primary key)")
    ours = {"name": "p", "tables": [{"name": "public.t"}]}
    first = job_for(any_database, lake, ours)
    apply_setup(any_conn, first)
    assert apply_setup(any_conn, first).findings == plan_setup(any_conn, first).findings
    slot = first.pipeline.source.slot

    def job(*names):
        return job_for(
            any_database,
            lake,
            ours,
            *({"name": name, "manage": False} for name in names),
            slot=slot,
        )

    any_database.execute(
        "insert into u values (1); create publication q for table u; insert into u values (2)"
    )
    if any_conn.info.server_version >= 180000:
        assert apply_setup(any_conn, job("q")).problems == ()
        assert _inserted(any_database, job("q")) == ["2"]
        return
    (problem,) = plan_setup(any_conn, job("q")).problems
    assert '(publication "q" does not exist)' in problem
    with pytest.raises(
        PreflightFailed,
        match="remove it from the file, let a run consume the waiting changes, add it again",
    ):
        apply_setup(any_conn, job("q"))
    assert plan_setup(any_conn, first).problems == ()
    _inserted(any_database, first)
    assert apply_setup(any_conn, job("q")).problems == ()
    with any_database.connect() as early:
        early.execute("insert into u values (3)")
        any_database.execute("create publication later for table u")
        plan = plan_setup(any_conn, job("q", "later"))
        assert plan.problems == ()
        assert "'later' is newer than open transactions (pid " in " ".join(plan.warnings)
        assert "'q' is newer" not in " ".join(plan.warnings)
    assert 'publication "later" does not exist' in " ".join(
        plan_setup(any_conn, job("q", "later")).problems
    )
    assert any_database.execute("select count(*) from pg_replication_slots where temporary") == [
        (0,)
    ]


def test_a_session_in_which_decoding_failed_decodes_nothing_more(
    any_database, any_conn, lake, monkeypatch
):
    """A server without the fix of its minor release could crash by it."""
    any_database.execute("create table t (id int primary key)")
    sessions, real = [], younger._read_all

    def reads(conn, *of):
        sessions.append(conn.info.backend_pid)
        real(conn, *of)

    ours = {"name": "p", "tables": [{"name": "public.t"}]}
    job = job_for(any_database, lake, ours)
    apply_setup(any_conn, job)
    if any_conn.info.server_version >= 180000:
        return  # such publications aren't tried
    # More than can be decoded in the time that it is given.
    any_database.execute(
        "insert into t select generate_series(1, 20000); create publication q for table t"
    )
    monkeypatch.setattr(younger, "_read_all", reads)
    monkeypatch.setattr(younger, "TRIAL_S", 0.001)
    job = job_for(
        any_database, lake, ours, {"name": "q", "manage": False}, slot=job.pipeline.source.slot
    )
    for _ in range(2):
        assert "the trial read failed (canceling statement due to statement timeout)" in " ".join(
            plan_setup(any_conn, job).warnings
        )
    assert len({*sessions, any_conn.info.backend_pid}) == 3


def _inserted(database, job):
    """Consume what waits; the keys of the rows that were inserted."""
    source = job.pipeline.source
    rows = database.execute(f"{call('get', source, Lsn((1 << 63) - 1), None, 'data')}")
    return [data[-1:].decode() for (data,) in rows if data[:1] == b"I"]


def test_what_counts_as_published(any_database, any_conn, lake):
    """By its own entry, its root's, its schema's, or with all tables."""
    any_database.execute(
        "create table t (id int primary key); create table r (id int primary key) partition by"
        " range (id);create table r1 partition of r default; create schema app; create table app.t"
        " (id int primary key);create publication theirs for table t"
    )
    tables = [{"name": f"public.{name}"} for name in ("t", "r", "r1")]
    own = {
        "name": "p",
        "tables": [*tables, {"name": "app.t"}],
        "schemas": ["app"],
        "accept_future_tables": True,
    }
    job = job_for(any_database, lake, own, {"name": "theirs", "manage": False})

    def lacking():
        return list(find_unpublished(any_conn, job.pipeline.source).tables)

    assert lacking() == ["app.t", "public.r", "public.r1", "public.t"]
    apply_setup(any_conn, job)
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


def test_a_renamed_publication_is_named_with_its_present_name(any_database, any_conn, lake):
    """Its tables aren't missing from it."""
    any_database.execute("create table t (id int primary key); create table u (id int primary key)")
    own = {"name": "p", "tables": [{"name": "public.t"}, {"name": "public.u"}]}
    job = job_for(any_database, lake, own)
    apply_setup(any_conn, job)
    any_database.execute("alter publication p rename to q")
    (told,) = find_unpublished(any_conn, job.pipeline.source).warnings()
    assert told == (
        "publication 'p' does not exist, so PostgreSQL sends no changes of its tables: it may"
        " be 'q' now: alter publication q rename to p, or run setup; then run the initial sync"
        " of its tables"
    )
    any_database.execute("drop publication q")
    (told,) = find_unpublished(any_conn, job.pipeline.source).warnings()
    assert "no publication has its mark, so it was dropped: run setup; then" in told
    any_database.execute("create publication p for table t")
    (told,) = find_unpublished(any_conn, job.pipeline.source).warnings()
    begins = "in the pipeline file, but not published: public.u; the source has "
    assert told.startswith(f"{begins}the table, but its publication doesn't name it")
    any_database.execute("drop table u")
    (told,) = find_unpublished(any_conn, job.pipeline.source).warnings()
    assert told.startswith(f"{begins}no table of this name")

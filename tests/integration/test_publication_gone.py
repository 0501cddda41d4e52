"""Publications that are dropped or made behind our back while changes wait in the slot."""

from __future__ import annotations

import pytest

from tests.integration.test_setup import job_for
from waldelta.connection import connect
from waldelta.errors import PublicationGone
from waldelta.idle import look
from waldelta.lsn import Lsn
from waldelta.peek import PeekBound, peek
from waldelta.setup import apply_setup

pytestmark = pytest.mark.pg


@pytest.mark.parametrize("how", ["created anew", "dropped", "listed too early"])
def test_a_publication_that_is_gone_where_the_slot_is_read(any_database, lake, how):
    """Behind our back, while changes wait: before 18 they can't be decoded, which has a name; 18 passes it over."""
    any_database.execute("create table t (id int primary key); create table u (id int primary key)")
    with connect(any_database.conninfo, "test") as conn:
        job = job_for(any_database.conninfo, lake, {"name": "p", "tables": [{"name": "public.t"}]})
        apply_setup(conn, job)
        any_database.execute("insert into t values (1)")
        entries = [{"name": "p", "tables": [{"name": "public.t"}]}]
        if how == "listed too early":
            any_database.execute("create publication q for table u")
            entries.append({"name": "q", "manage": False})
        else:
            any_database.execute("drop publication p; insert into t values (2)")
            any_database.execute("create publication p for table t" if how == "created anew" else "select")
        job = job_for(any_database.conninfo, lake, *entries, slot=job.pipeline.source.slot)
        if conn.info.server_version >= 180000 or how != "listed too early":
            assert look(job).has_work  # the first change that waits can be read
        else:
            with pytest.raises(PublicationGone, match="take it out, let a run consume what waits"):
                look(job)
        if conn.info.server_version < 180000:
            with pytest.raises(PublicationGone, match="does not exist at the WAL position"):
                list(peek(job.conninfo, job.pipeline.source, PeekBound(Lsn((1 << 63) - 1), None, 60.0, 1)))

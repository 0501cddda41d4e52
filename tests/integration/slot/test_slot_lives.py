"""A slot's lives: a copy made under an earlier one doesn't count for the present one."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.pipelines import job_for
from waldelta.lake.ledger import TableState, now
from waldelta.postgres.server_position import read_position
from waldelta.slot import recover
from waldelta.slot.slot import create_slot
from waldelta.stages.setup.setup import apply_setup, teardown

pytestmark = pytest.mark.pg


@pytest.fixture
def job(database, lake):
    database.execute("create table t (id int primary key)")
    return job_for(database, lake, {"name": "p", "tables": [{"name": "public.t"}]})


def copied(job, at=None):
    """What a sync records in the slot's present life."""
    incarnation = job.read_identity().incarnation
    job.ledger.append(
        TableState(at or now(), "r", "public.t", 1, "synced", incarnation=incarnation)
    )


def test_a_slot_adopted_twice_at_the_same_place_has_two_lives(conn, job):
    """Changes in between never came, and the position doesn't say so."""
    create_slot(conn, job.pipeline.source.slot)
    apply_setup(conn, job)
    first = job.read_identity()
    copied(job)
    assert list(job.read_states()) == ["public.t"]
    teardown(conn, job)
    apply_setup(conn, job)
    second = job.read_identity()
    assert job.read_states() == {}
    assert second.incarnation == f"{first.incarnation}.2"
    assert second.app_id != first.app_id
    copied(job)
    teardown(conn, job)
    apply_setup(conn, job)
    assert job.read_identity().incarnation == f"{first.incarnation}.3"
    assert job.read_states() == {}


@pytest.mark.parametrize("landed", [[7], []], ids=["some landed", "nothing landed"])
def test_a_late_batch_of_the_life_before_has_a_number_of_its_own(conn, job, landed):
    """A run that died with its slot may commit its batch during the next life."""
    apply_setup(conn, job)
    assert job.read_identity().floor == 0
    log = job.change_log(job.read_identity())
    for batch in landed:
        write_deltalake(
            log.uri, pa.table({"batch": [batch], "ordinal": [0]}), partition_by=["batch"]
        )
    late = log.highest_batch() + 1
    teardown(conn, job)
    apply_setup(conn, job)
    identity = job.read_identity()
    new = recover(conn, job, identity, job.change_log(identity), read_position(conn))
    assert late <= job.read_identity().floor < new.next_batch


def test_a_clock_set_back_between_two_lives_revives_no_copy(conn, job):
    """By the clock the copy of the first life is the younger one."""
    apply_setup(conn, job)
    copied(job, datetime(2100, 1, 1, tzinfo=UTC))
    assert list(job.read_states()) == ["public.t"]
    teardown(conn, job)
    apply_setup(conn, job)
    assert job.read_states() == {}
    copied(job)
    assert list(job.read_states()) == ["public.t"]

"""What has landed, without the rest of a run."""

from dataclasses import replace

from waldelta.lake.changelog import ChangeLog
from waldelta.pipeline import RunResult, StageResult
from waldelta.postgres.server_position import read_position
from waldelta.slot.read.peek import LANDING_SCHEMA, PeekBound
from waldelta.stages.land.drain import land


def land_only(runner, job, batch):
    """Land everything as a run does that dies before it consumes."""
    change_log = job.change_log(job.read_identity())
    with job.source.connect("test") as connection:
        server = read_position(connection)
    change_log.create(LANDING_SCHEMA)
    bound = PeekBound(server.flush_lsn, 1_000_000, 60, server.next_xid8)
    land(runner, job.source.conninfo, job.pipeline.source, bound, change_log, batch)
    return change_log


def batch_end(job, batch):
    return job.change_log(job.read_identity()).end_lsn(batch)


def wrongly_counted(monkeypatch, only: int | None = None):
    """What has landed, or one batch of it, as if one insert more had."""
    real = ChangeLog.landed

    def landed(change_log, batch):
        found = real(change_log, batch)
        if only not in (None, batch):
            return found
        return replace(
            found, transactions=replace(found.transactions, inserts=found.transactions.inserts + 1)
        )

    monkeypatch.setattr(ChangeLog, "landed", landed)


def told(job) -> None:
    """The row of a run that has told of what it applied, without which a look asks for a run."""
    RunResult(
        "consume", job.run_id, "succeeded", stages={"apply": StageResult("succeeded", 0.0)}
    ).record(job)

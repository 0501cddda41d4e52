"""Pipeline: a pipeline's verbs as a Python object, used by the command line and by applications."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waldelta.config import PipelineFile, load_pipeline_file, split_table_name
from waldelta.lake import Lake, target_uri
from waldelta.pipeline import Job, SourceConnections
from waldelta.pipeline.job import load_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from waldelta.pipeline import RunResult
    from waldelta.spark import Runner
    from waldelta.stages.setup.setup import SetupPlan


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A validated pipeline file and its verbs.

    A verb that is given a session, or a runner, does its work there. Without one it works in this
    process while there is little to do, and opens a session as its command would once there is
    more.

    The source's connections come from the environment variables ``AIRFLOW_CONN_<CONN_ID>``. A
    ``lake`` keeps opened tables for all verbs; without one, each opens what it needs.
    """

    file: PipelineFile
    lake: Lake | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path) -> Pipeline:
        """Read a pipeline file; raises ConfigError listing every problem."""
        return cls(load_pipeline_file(path))

    def job(self, run_id: str | None = None, **details: Any) -> Job:
        """Returns one run of a verb, for callers that need its ledger or connection."""
        lake = {} if self.lake is None else {"lake": self.lake}
        return load_job(self.file, run_id, **lake, **details)

    def check(self, spark: SparkSession | None = None, *, estimate: bool = True) -> SetupPlan:
        """Check source and lake without changes; returns findings, and what setup would do.

        With ``estimate`` some seconds are spent on samples of tables that have no copy yet.

        Own expectations are evaluated by Spark; without ``spark`` a session is opened for them.
        A lake on disk is tested from this machine, with ``spark`` also from one of its tasks. An
        object store is probed as by probe_store(), also for errors.
        """
        from waldelta.findings import lacking
        from waldelta.lake import why_not_writable
        from waldelta.stages.check.judge_suites import judging
        from waldelta.stages.setup.preflight.lake import (
            judge_copied,
            probe_store,
            why_not_writable_in_task,
        )
        from waldelta.stages.setup.setup import plan_setup

        job, root = self.job(), self.file.target.root
        probe_store(self.file.target, job.lake, spark)
        _check_readable(job)
        with job.source.connect("check") as connection, judging(job, spark) as judge_suite:
            plan = plan_setup(connection, job, judge_suite)
        if estimate:
            plan = plan.with_estimate(job)
        problems = [why_not_writable(root)]
        if spark is not None:
            problems.append(why_not_writable_in_task(spark, root))
        return replace(
            plan,
            findings=(
                *plan.findings,
                *judge_copied(job),
                *(lacking(text) for text in problems if text is not None),
            ),
        )

    def setup(
        self,
        run_id: str | None = None,
        spark: SparkSession | None = None,
        *,
        expected: str | None = None,
    ) -> SetupPlan:
        """Create or alter publications and slot by the difference to what exists; idempotent.

        An object store is probed before, as by probe_store(), also for errors. Own expectations are
        judged as by check(). Nothing is changed when the plan's digest isn't the ``expected`` one.
        """
        from waldelta.stages.check.judge_suites import judging
        from waldelta.stages.setup.preflight.lake import probe_store
        from waldelta.stages.setup.setup import apply_setup

        job = self.job(run_id)
        probe_store(self.file.target, job.lake, spark)
        _check_readable(job)
        with job.source.connect("setup") as connection, judging(job, spark) as judge_suite:
            return apply_setup(connection, job, judge_suite, expected=expected)

    def sync(
        self,
        spark: SparkSession | Runner | None = None,
        tables: Sequence[str] | None = None,
        reason: str | None = None,
        run_id: str | None = None,
    ) -> RunResult:
        """Copy tables that were never copied, or these; the stream continues during the copy."""
        from waldelta.jobs.sync import run_sync

        with self._run(spark, run_id) as run:
            return run_sync(*run, tables, reason)

    def resync(
        self,
        spark: SparkSession | Runner | None = None,
        tables: Sequence[str] | None = None,
        reason: str | None = None,
        run_id: str | None = None,
        accept_server: str | None = None,
    ) -> RunResult:
        """Continue after the slot was lost or the source changed: recreate the slot, repair the
        targets.

        Only rows that differ are written.
        """
        from waldelta.jobs.sync import run_resync

        with self._run(spark, run_id) as run:
            return run_resync(*run, tables, reason, accept_server=accept_server)

    def consume(
        self,
        spark: SparkSession | Runner | None = None,
        run_id: str | None = None,
        stage: str | None = None,
    ) -> RunResult:
        """Land, consume, apply and check everything up to the server's current position."""
        from waldelta.jobs.consume import consume

        with self._run(spark, run_id) as run:
            return consume(*run, None if stage is None else [stage])

    def replay(
        self,
        spark: SparkSession | Runner | None,
        start: datetime,
        end: datetime,
        tables: Sequence[str] | None = None,
        run_id: str | None = None,
    ) -> RunResult:
        """Bring the rows that the runs from ``start`` to ``end`` changed to the source's present
        state.

        A row that differs is corrected, in all tables or in these; other rows aren't read. Raises
        StateError when the change log no longer goes back that far.
        """
        from waldelta.jobs.replay import replay

        interval = {"interval_start": start, "interval_end": end}
        with self._run(spark, run_id, run_type="backfill", **interval) as run:
            return replay(*run, tables=tables)

    def validate(
        self, spark: SparkSession | Runner | None = None, run_id: str | None = None
    ) -> RunResult:
        """Check every target's expectations now."""
        from waldelta.jobs.validate import run_validate

        with self._run(spark, run_id) as run:
            return run_validate(*run)

    def reconcile(
        self,
        spark: SparkSession | Runner | None = None,
        tables: Collection[str] | None = None,
        repair: bool = False,
        by: str | None = None,
        reason: str | None = None,
        run_id: str | None = None,
    ) -> RunResult:
        """Compare all targets, or these, with a snapshot of the source, while writers continue.

        With ``repair`` rows that differ are read again and corrected; ``by`` is the operator, by
        default the user of this process.
        """
        from waldelta.jobs.reconcile import run_reconcile

        with self._run(spark, run_id) as run:
            return run_reconcile(*run, tables=tables, repair=repair, by=by, reason=reason)

    def maintain(
        self, spark: SparkSession | Runner | None = None, run_id: str | None = None
    ) -> RunResult:
        """Compact targets, delete what is older than the promised retention, prune reports."""
        from waldelta.jobs.maintain import run_maintain

        with self._run(spark, run_id) as run:
            return run_maintain(*run)

    @contextmanager
    def _run(
        self, spark: SparkSession | Runner | None, run_id: str | None, **details: Any
    ) -> Iterator[tuple[Runner, Job]]:
        from waldelta.spark import InProcess, OnSpark, open_runner

        job = self.job(run_id, **details)
        if spark is None:
            with open_runner(f"waldelta {self.file.pipeline}", job) as runner:
                yield runner, job
        elif isinstance(spark, InProcess | OnSpark):
            yield spark, job
        else:
            yield OnSpark(spark), job

    def status(self) -> dict[str, Any]:
        """Returns slot, lag, targets and last run, without Spark."""
        from waldelta.monitoring.status import read_status

        return read_status(self.job())

    def waiting(self, tables: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Returns what waits for a decision in all targets, or in these, as ``decide FILE list``
        prints it; no Spark.
        """
        from waldelta.monitoring.decisions import read_waiting
        from waldelta.pipeline.targets.quarantined_rows import list_quarantined

        job = self.job()
        return list_quarantined(job, tables) + read_waiting(self.file, job.ledger).as_listed(tables)

    def decide(
        self,
        spark: SparkSession | Runner | None,
        action: str,
        run_id: str | None = None,
        **fields: Any,
    ) -> RunResult:
        """Carry out a decision on what waits; only retry and accept may need Spark.

        ``fields`` are the other fields of a DecisionRequest: ``ids``, ``tables``, ``reason``,
        ``by``.
        """
        from waldelta.jobs.decide import run_decide

        with self._run(spark, run_id) as run:
            return run_decide(*run, action, **fields)

    def cut(self) -> dict[str, int]:
        """Returns the newest consistent cut: each target's Delta version, to be read together.

        It is empty before the first cut. It is read from the lake, without Spark and the source.
        Raises StateError when no cut can be read any more.
        """
        from waldelta.pipeline.targets.consistent_cuts import readable_cut

        cut = readable_cut(Job(self.file, SourceConnections(self.file.source), "cut"))
        return {} if cut is None else {target.table_name: target.version for target in cut.targets}

    def dbt_sources(self) -> str:
        """Returns dbt's ``sources.yml`` of the targets, with the source's comments; no Spark.

        Raises StateError before the first copy.
        """
        from waldelta.jobs.dbt_sources import dbt_sources

        return dbt_sources(self.job())

    def teardown(self, run_id: str | None = None) -> list[str]:
        """Drop the slot and the publications that this pipeline created; returns what was dropped.

        The lake stays.
        """
        from waldelta.stages.setup.setup import teardown

        job = self.job(run_id)
        with job.source.connect("teardown") as connection:
            return teardown(connection, job)

    def slots_without_pipeline(self, named: Collection[str], drop: Sequence[str] = ()) -> list[str]:
        """Returns lines about slots that no pipeline file names, or with ``drop`` about dropped
        ones.

        ``named`` are the slots that pipeline files name.
        """
        from waldelta.stages.setup.slots_without_pipeline import (
            drop_slots_without_pipeline,
            find_slots_without_pipeline,
        )

        job = self.job()
        with (
            job.source.connect("orphans") as connection,
            job.source.connect_slot("orphans", connection) as slot_connection,
        ):
            slots = find_slots_without_pipeline(
                connection, {*named, self.file.source.slot}, slot_connection
            )
            if drop:
                return drop_slots_without_pipeline(
                    connection, job.source.conninfo, slots, drop, slot_connection
                )
            return [orphan.describe() for orphan in slots]

    def target_path(self, table: str) -> str:
        """Returns the URI of a table's Delta target, by its name in the pipeline file."""
        target = self.file.target
        return target_uri(target.root, *split_table_name(target.target_names.of(table)))


def _check_readable(job: Job) -> None:
    """Raise TargetNotWritable for a lake whose ledger can't be read, before the source is
    queried.
    """
    from waldelta.lake import named_write_errors

    with named_write_errors(job.pipeline.target.root):
        job.ledger.slot_events()

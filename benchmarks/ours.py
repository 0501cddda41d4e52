"""Our own pipeline as a contender."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time

import pyarrow as pa
import pyarrow.compute as pc
import yaml
from deltalake import DeltaTable

from benchmarks.place import PUBLICATION, Place
from benchmarks.stack import WarmSpark
from benchmarks.verify import compare_with_source
from benchmarks.workloads import FRESH, TASKS, Variant
from tests.soak.lakes import SoakLake
from waldelta.jobs import Pipeline
from waldelta.lake import local_path, target_uri
from waldelta.stages.setup.estimate import CopyEstimate
from waldelta_airflow.launchers.job_process import ChildProcess, ForkedJob

STAGES = ("land", "apply", "check,report")

Notes = dict[str, float]


class Waldelta:
    """Our pipeline: ``warm`` as one job, ``tasks`` as a job per stage, ``fresh`` with its own
    JVM.
    """

    baseline = False

    def __init__(self, place: Place, how: str, variant: Variant, number: int) -> None:
        self.place, self.how = place, how
        self.name = f"{how}, {variant.name}" if variant.name else how
        self.slot = f"bench_{how}_{number}"
        self.file = place.folder / f"{self.slot}.yml"
        self.result = place.folder / f"{self.slot}.json"
        self._store = place.stack.store if variant.on_s3 else None
        folder = (place.folder / f"lake_{self.slot}").as_uri()
        self._lake = self._store.lake(self.slot) if self._store else SoakLake(folder)
        self._root = self._lake.root
        publication = PUBLICATION
        if variant.publication_filter:
            publication = f"{PUBLICATION}_{number}"
            place.publish(publication, variant.publication_filter)
        self._write_file(publication, variant)

    def _write_file(self, publication: str, variant: Variant) -> None:
        source = {
            "conn_id": "bench",
            "slot": self.slot,
            "publications": [{"name": publication, "manage": False}],
        }
        document = variant.document | {
            "pipeline": self.slot,
            "source": source | {"options": variant.options},
            "target": {"root": self._root} | variant.target,
        }
        self.file.write_text(yaml.safe_dump(document))

    def trees(self) -> list[int]:
        return [] if self.how == FRESH else self._spark.trees

    def prepare(self) -> None:
        self.job("setup")
        self.job("sync")

    def copy(self) -> Notes | None:
        return notes_of_job(self.job("sync", "--tables", *self.place.source.tables))

    def first_copy(self) -> Notes | None:
        """Copy the tables that were never copied, as check estimates it."""
        return notes_of_job(self.job("sync"))

    def estimate(self) -> CopyEstimate:
        """Returns what check estimates for the initial copy."""
        os.environ |= {"AIRFLOW_CONN_BENCH": self.place.server.uri(self.place.name)}
        found = Pipeline.load(self.file).check().estimate
        if found is None or found.unknown:
            raise RuntimeError(f"no estimate: {found}")
        return found

    def share_of_estimate(self, estimated: CopyEstimate, notes: Notes) -> Notes:
        """Returns the estimate as shares of what the copy had, by the targets and its stage's
        seconds.
        """
        files = pa.concat_tables(
            pa.table(
                DeltaTable(target_folder(self._root, table)).get_add_actions(flatten=True)
            ).select(["num_records", "size_bytes"])
            for table in self.place.source.tables
        )
        return {
            "estimated rows": estimated.rows / pc.sum(files["num_records"]).as_py(),
            "estimated bytes": estimated.lake_bytes / pc.sum(files["size_bytes"]).as_py(),
            "estimated seconds": estimated.seconds / notes["sync"],
        }

    def apply(self) -> Notes | None:
        before = self._temporary_mb()
        notes = self._tasks() if self.how == TASKS else self._consume()
        return notes | self._bill() | {"temporary_mb": self._temporary_mb() - before}

    def settle(self) -> None:
        """Get ready for the next round; this isn't measured."""

    def begin_anew(self) -> None:
        """Returns to the state before the first copy: an empty lake.

        The next copy is an initial one again, as for all other contenders.
        """
        self.job("teardown")
        shutil.rmtree(local_path(self._root))
        self.job("setup")

    def verify(self, where: str = "true") -> None:
        """Raise RuntimeError where a target differs from the source in rows that meet the
        condition.

        The pipeline's own checks compare nothing with the source.
        """
        root = self._root
        if self._store:
            # DuckDB's reader of S3 is an extension that would have to be downloaded.
            copied = self.place.folder / "copied"
            self._store.bucket.download(copied, f"{self.slot}/")
            root = (copied / self.slot).as_uri()
        targets = {table: target_folder(root, table) for table in self.place.source.tables}
        compare_with_source(self.name, self.place, targets, where)

    def close(self) -> None:
        self.job("teardown")

    def _consume(self) -> Notes:
        began = time.perf_counter()
        result = self.job("consume")
        seconds = time.perf_counter() - began
        return notes_of_job(result, seconds if self.how == FRESH else None) | {
            "changes": result.get("changes", 0)
        }

    def _tasks(self) -> Notes:
        """Run a job for each stage, as Airflow's tasks do; the time in which Airflow starts a task
        isn't included.
        """
        run_id, seconds = f"tasks-{time.time_ns()}", {}
        result: dict = {}
        for stage in STAGES:
            began = time.perf_counter()
            result = self.job("consume", "--run-id", run_id, "--stage", stage)
            seconds[stage] = time.perf_counter() - began
        return notes_of_tasks(seconds, result)

    def _bill(self) -> Notes:
        """Returns what the run itself reports as its cost to the source."""
        source = json.loads(self.result.read_text())["source"]
        return {"server_s": source["server_seconds"], "spilled_mb": source["spilled_bytes"] / 1e6}

    def job(self, *arguments: str) -> dict:
        """Run the command line; returns its result. Raises RuntimeError when it fails."""
        given = [*arguments, str(self.file), "--result", str(self.result)]
        self.result.unlink(missing_ok=True)
        environment = self.environment()
        fresh = self.how == FRESH or arguments[0] in ("setup", "teardown")
        job: ForkedJob | ChildProcess | None
        if fresh:
            job = ChildProcess([sys.executable, "-m", "spark_jobs", *given], environment)
        else:
            job = ForkedJob.ask(
                str(self._spark.jobs), given, environment | {"SPARK_REMOTE": self._spark.remote}
            )
        if job is None or job.run():
            raise RuntimeError(f"{' '.join(given)} failed: its output is in the log")
        return json.loads(self.result.read_text()) if self.result.exists() else {}

    def environment(self) -> dict[str, str]:
        """Returns the environment of a job's process."""
        connection = {"AIRFLOW_CONN_BENCH": self.place.server.uri(self.place.name)}
        return os.environ | connection | dict(self._lake.environment)

    @property
    def _spark(self) -> WarmSpark:
        return self.place.stack.spark_with_store if self._store else self.place.stack.spark

    def _temporary_mb(self) -> float:
        return float(
            self.place.sql(
                "select temp_bytes / 1e6 from pg_stat_database where datname = current_database()"
            )[0][0]
        )


def target_folder(root: str, table: str) -> str:
    """Returns the folder of a table's target in a local lake."""
    return str(local_path(target_uri(root, *table.split("."))))


def notes_of_job(result: dict, seconds: float | None = None) -> Notes:
    """Returns the seconds of a job's stages.

    ``seconds`` is the time since its process started; then the time until everything was applied is
    included.
    """
    notes = {name: stage["seconds"] for name, stage in result.get("stages", {}).items()}
    if seconds is not None:
        notes["applied"] = seconds - notes.get("check", 0.0) - notes.get("report", 0.0)
    return notes


def notes_of_tasks(seconds: Notes, result: dict) -> Notes:
    """Returns the seconds of each task.

    The check's seconds are the stage's, from the run's result, because its task reports, too.
    """
    applied, check = seconds["land"] + seconds["apply"], result["stages"]["check"]["seconds"]
    return seconds | {"applied": applied, "check": check, "tables": len(result["tables"])}

"""Runs a job through the Spark provider's spark-submit hook, on any master whose driver runs on the
task's machine.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk import Connection

from waldelta.errors import ConfigError
from waldelta.permissions import lake_umask
from waldelta.quantities import counted
from waldelta.spark.settings import (
    driver_memory,
    driver_settings,
    jars,
    local_settings,
    log_settings,
)
from waldelta_airflow import settings
from waldelta_airflow._airflow_versions import AirflowException
from waldelta_airflow.launchers.job_process import end_group, ended_with_us

log = logging.getLogger(__name__)

_SHIPPED = "waldelta"
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)


class SparkSubmit(SparkSubmitHook):
    """The provider's hook, with the secret only in the process's environment, and a complete kill.

    The hook's own ``env_vars`` would become ``--conf`` arguments on YARN and Kubernetes, which
    every user of the machine can read. So the process's environment is passed to ``submit``
    instead.
    """

    application = settings.package_folder() / "cli" / "submitted" / "waldelta_job.py"

    def __init__(self, environment: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._environment = dict(environment)

    def run(self) -> int:
        """Run the application to its end and return spark-submit's exit code."""
        try:
            self.submit(
                str(self.application),
                env=self._environment,
                start_new_session=True,
                umask=lake_umask(),
            )
        except AirflowException:
            # The hook's message is the command line; the job's own result explains the failure.
            if self._submit_sp is None or not self._submit_sp.returncode:
                raise
            return int(self._submit_sp.returncode)
        return 0

    def _process_spark_submit_log(self, itr: Iterator[Any]) -> None:
        # The provider does this while spark-submit runs.
        submitted = cast("subprocess.Popen[str]", self._submit_sp)
        with ended_with_us(submitted.pid):
            super()._process_spark_submit_log(itr)
            submitted.wait()

    def end(self) -> None:
        """End spark-submit and everything it started."""
        if self._submit_sp is not None:
            end_group(self._submit_sp.pid, self._submit_sp.poll)
        self.on_kill()


def spark_submit(
    connection: Connection,
    name: str,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
) -> SparkSubmit:
    """Returns the hook for one job; raises ConfigError when the driver would run on another
    machine.

    ``environment`` is the job's, which says where the lake's store is.

    ``folder`` must belong to this submit alone, because it has what executors are sent: a folder
    that exists longer could have been created by another user. In cluster mode the driver would
    lack the source's connection, the pipeline file and a place for its result. Passing the password
    would show it in an argument.
    """
    if connection.extra_dejson.get("deploy-mode") == "cluster":
        raise ConfigError(
            f"connection {connection.conn_id!r} submits with deploy-mode cluster, where the"
            " source's password would have to travel as an argument: set deploy-mode to client"
            " (executors still run on the cluster)"
        )
    master = connection.host or ""
    local = master.startswith("local")
    return SparkSubmit(
        environment,
        conn_id=connection.conn_id,
        # A connection's own spark-defaults.conf can't switch Delta off; its other settings apply.
        conf=driver_settings(environment)
        | log_settings()
        | (local_settings(master) if local else {}),
        jars=",".join(str(jar) for jar in jars()),
        py_files=None if local else str(shipped_packages(folder)),
        driver_memory=driver_memory(),
        name=name,
        application_args=list(arguments),
    )


def shipped_packages(folder: Path) -> Path:
    """Make a zip of our packages for executors on other machines, named by its content."""
    packages = settings.package_folder()
    files = [
        (f"{_SHIPPED}/{path.relative_to(packages).as_posix()}", path.read_bytes())
        # Modules read templates and styles of theirs when they are imported.
        for path in sorted(packages.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    ]
    digest = hashlib.sha256(
        b"\0".join(name.encode() + b"\0" + content for name, content in files)
    ).hexdigest()
    target = folder / f"waldelta-{digest[:16]}.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(zipfile.ZipInfo(name, _FIXED_TIME), content)
    log.info("packed %s for the executors into %s", counted(len(files), "file"), target)
    return target

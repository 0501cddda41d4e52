"""Makes DAGs from a folder of pipeline files, seven per file, and one that sends alerts if they are
configured; a rejected file doesn't affect others.

Sends alerts of all pipelines to the connections in WALDELTA_ALERTS.

Every five minutes the task evaluates what the *Pipelines* page shows: failed and overdue runs,
paused DAGs, the slot, tables and rows that wait, differences from the source. It sends each alert
once, again every 24 hours, and once more when it ends.

- *If it fails*: a connection refused the message, as the log says. The next run sends it.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from airflow.exceptions import SerializationError
from airflow.sdk import DAG, Asset, task

from waldelta.config.pipeline_folder import PipelineFolder, existing_folder
from waldelta.errors import ConfigError
from waldelta_airflow import settings
from waldelta_airflow._airflow_versions import check_alerts_version
from waldelta_airflow.dags._pipeline_dags import build_dags
from waldelta_airflow.launchers.job_process import named_failures
from waldelta_airflow.settings import ALERTS_VARIABLE, alert_connections

# What was sent is stored as the state of this asset, which outlives runs and restarts.
_SENT = Asset("waldelta/alerts")


def build_alerts_dag() -> DAG:
    """Returns the DAG that evaluates all pipelines; it isn't paused when Airflow first sees it."""
    with DAG(
        dag_id=settings.ALERTS_DAG,
        schedule="*/5 * * * *",
        auto_register=False,
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=False,
        tags={"waldelta", "alerts"},
        doc_md=__doc__,
        default_args={
            "retries": 1,
            "retry_delay": settings.retry_delay(),
            "execution_timeout": settings.ALERTS_TIMEOUT,
        },
        dagrun_timeout=timedelta(hours=1),
    ) as dag:

        @task(inlets=[_SENT])
        def send_alerts(**context: Any) -> None:
            from waldelta_airflow.alerts import sending

            with named_failures():
                sending.send_alerts(context)

        send_alerts()
    return dag


class RefusedFile(DAG):
    """Represents a rejected pipeline file, and becomes an import error under that file's name.

    A DAG file that raises loses all its DAGs. An error in a DAG's validation is recorded for the
    DAG file, which removes all of its DAGs from the UI. An error while a DAG is *serialized* is
    recorded for the path the DAG names. So this DAG names the pipeline file and raises when it is
    serialized. (Airflow forgets such an error when it refreshes the list of DAG files, every five
    minutes by default, and records it again after the next parsing.)
    """

    def __init__(self, path: Path, error: Exception) -> None:
        super().__init__(dag_id=f"refused_{path.stem}", schedule=None)
        self.refused_path, self.error = path, error

    @property
    def relative_fileloc(self) -> str:
        """Returns the pipeline file; the importer's assignment of the DAG file's path is
        ignored.
        """
        return str(self.refused_path)

    @relative_fileloc.setter
    def relative_fileloc(self, _: Any) -> None: ...

    def get_serialized_fields(self) -> NoReturn:  # type: ignore[override]
        """Raise the file's error."""
        raise SerializationError(f"{type(self.error).__name__}: {self.error}")


def create_dags() -> dict[str, DAG]:
    """Returns the DAGs of every pipeline file (``*.yml``, ``*.yaml``) in pipelines_folder(), and
    the DAG of alerts if WALDELTA_ALERTS is set, by DAG id.

    Raises ConfigError when that folder doesn't exist.
    """
    dags: dict[str, DAG] = {}
    folder = PipelineFolder.read(existing_folder())
    for path, pipeline in folder.pipelines.items():
        try:
            dags.update({dag.dag_id: dag for dag in build_dags(path, pipeline)})
        except Exception as err:
            folder.refused[path] = err
    for path, error in folder.refused.items():
        why = f"pipeline file {path} is refused: {type(error).__name__}: {error}"
        refused = RefusedFile(path, error if isinstance(error, ConfigError) else ConfigError(why))
        dags[refused.dag_id] = refused
    if alert_connections():
        try:
            check_alerts_version()
            alerts = build_alerts_dag()
        except ConfigError as err:
            # If Airflow is too old for the DAG of alerts, the other DAGs still work.
            alerts = RefusedFile(Path(ALERTS_VARIABLE), err)
        dags[alerts.dag_id] = alerts
    return dags

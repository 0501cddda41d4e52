"""Makes DAGs from a folder of pipeline files, seven per file, and one that sends alerts if they are
configured; a rejected file doesn't affect others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from airflow.exceptions import SerializationError
from airflow.sdk import DAG

from waldelta.config.pipeline_folder import PipelineFolder, existing_folder
from waldelta.errors import ConfigError
from waldelta_airflow._airflow_versions import check_alerts_version
from waldelta_airflow.dags._alerts_dag import build_alerts_dag
from waldelta_airflow.dags._pipeline_dags import build_dags
from waldelta_airflow.settings import ALERTS_VARIABLE, alert_connections


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
            # Where Airflow is too old for it, the others work.
            alerts = RefusedFile(Path(ALERTS_VARIABLE), err)
        dags[alerts.dag_id] = alerts
    return dags

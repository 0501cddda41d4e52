"""The Airflow side of waldelta: DAG factory, operators, pages; ``pipelines`` makes the DAGs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk import DAG

__all__ = ["pipelines"]


def pipelines() -> dict[str, DAG]:
    """Returns the DAGs of every pipeline file in the folder WALDELTA_PIPELINES, by DAG id.

    A DAG file needs one line, and the word DAG, without which Airflow doesn't parse it::

        from waldelta_airflow import pipelines; globals().update(pipelines())  # the DAGs
    """
    from waldelta_airflow._airflow_versions import check_version

    check_version()
    # Importing any module of this package runs this one first.
    from waldelta_airflow.dags.factory import create_dags

    return create_dags()

"""Airflow's plugin of waldelta: its pages. Airflow executes this file by itself, so nothing imports it."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

from waldelta_airflow import web


class WaldeltaPlugin(AirflowPlugin):
    """Adds the pipelines' pages to the UI's navigation, and to the pages of DAGs and their runs."""

    name = "waldelta"
    fastapi_apps: ClassVar[list[dict[str, Any]]] = [  # type: ignore[misc]  # it declares them per instance
        {"app": web.DeferredApp(), "url_prefix": web.PREFIX, "name": "waldelta"}
    ]
    # Airflow fills the names in braces in, and shows the tabs on all DAGs.
    external_views: ClassVar[list[dict[str, Any]]] = [  # type: ignore[misc]
        {"name": "Pipelines", "href": f"{web.PREFIX}/", "destination": "nav", "url_route": "waldelta"},
        {"name": "Data Docs", "href": f"{web.PREFIX}/docs/", "destination": "nav", "url_route": "waldelta-data-docs"},
        {
            "name": "Pipeline",
            "href": f"{web.PREFIX}/dag/{{DAG_ID}}",
            "destination": "dag",
            "url_route": "waldelta-pipeline",
        },
        {
            "name": "Changes",
            "href": f"{web.PREFIX}/dag/{{DAG_ID}}/run/{{RUN_ID}}",
            "destination": "dag_run",
            "url_route": "waldelta-run",
        },
    ]

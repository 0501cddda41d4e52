"""Airflow's plugin of waldelta: the Data Docs page. Airflow executes this file by itself, so nothing imports it."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

from waldelta_airflow import web


class WaldeltaPlugin(AirflowPlugin):
    """Adds the pipelines' Data Docs to the UI's navigation."""

    name = "waldelta"
    fastapi_apps: ClassVar[list[dict[str, Any]]] = [
        {"app": web.DeferredApp(), "url_prefix": web.PREFIX, "name": "waldelta"}
    ]
    external_views: ClassVar[list[dict[str, Any]]] = [
        {"name": "Data Docs", "href": f"{web.PREFIX}/", "destination": "nav", "url_route": "waldelta-data-docs"}
    ]

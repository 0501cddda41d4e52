"""Airflow's plugin of waldelta: its pages. The installed distribution's entry point names it."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin

from waldelta_airflow.settings import URL_PREFIX


class DeferredApp:
    """An ASGI application that is created by its first request.

    Airflow loads plugins in every process, tasks included, and importing FastAPI with Airflow's
    security takes longer than a run with nothing to do.
    """

    _app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Respond to a request."""
        if self._app is None:
            from waldelta_airflow.views.app import create_app

            self._app = create_app()
        await self._app(scope, receive, send)


def _view(view: str, destination: str) -> dict[str, str]:
    """Returns a page of the plugin in Airflow's UI.

    The address has no leading slash, so that a path before Airflow's is kept.
    """
    path = URL_PREFIX.removeprefix("/")
    return {
        "bundle_url": f"{path}/frame.js?view={view}",
        "destination": destination,
        "icon": f"{path}/icon.svg",
        "icon_dark_mode": f"{path}/icon-dark.svg",
    }


class WaldeltaPlugin(AirflowPlugin):
    """Adds the pipelines' pages to the UI's navigation, and to the pages of DAGs and their runs."""

    name = "waldelta"
    # AirflowPlugin declares these lists per instance.
    fastapi_apps: ClassVar[list[dict[str, Any]]] = [  # type: ignore[misc]
        {"app": DeferredApp(), "url_prefix": URL_PREFIX, "name": "waldelta"}
    ]
    # Each page is in the plugin's own frame, which links to DAGs and logs can leave. The tabs are
    # shown on all DAGs.
    react_apps: ClassVar[list[dict[str, Any]]] = [  # type: ignore[misc]
        {
            "name": "Pipelines",
            "url_route": "waldelta",
            "nav_top_level": True,
            **_view("pipelines", "nav"),
        },
        {
            "name": "Data Docs",
            "url_route": "waldelta-data-docs",
            "category": "browse",
            **_view("data-docs", "nav"),
        },
        {"name": "Pipeline", "url_route": "waldelta-pipeline", **_view("dag", "dag")},
        {"name": "Changes", "url_route": "waldelta-run", **_view("run", "dag_run")},
    ]


def is_entry_point() -> bool:
    """Returns whether Airflow loads the plugin by an entry point.

    It shows an import error for a plugin that a file in the plugins folder defines as well.
    """
    name = f"{__name__}:{WaldeltaPlugin.__name__}"
    return any(entry.value == name for entry in entry_points(group="airflow.plugins"))

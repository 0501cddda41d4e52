"""The plugin's application, created at the first request."""

from __future__ import annotations

from typing import Any


class DeferredApp:
    """An ASGI application that is created by its first request.

    Airflow loads plugins in every process, tasks included, and importing FastAPI with Airflow's
    security takes longer than a run with nothing to do.
    """

    _app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Respond to a request."""
        if self._app is None:
            from waldelta_airflow.views._app import create_app

            self._app = create_app()
        await self._app(scope, receive, send)

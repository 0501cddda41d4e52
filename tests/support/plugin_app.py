"""The plugin's application as one of Airflow's users opens it, without Airflow's own around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from fastapi import FastAPI


def plugin_app(role: str | None, username: str = "somebody") -> FastAPI:
    """For a user with a role of Airflow's (None: without any); AIRFLOW_HOME is set before."""
    from airflow.api_fastapi.app import create_auth_manager

    create_auth_manager()
    return _app_of(role, username)


# Its routes take longer to make than most tests; what answers depend on is read each time.
@cache
def _app_of(role: str | None, username: str) -> FastAPI:
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from airflow.api_fastapi.core_api.security import get_user

    from waldelta_airflow.views.app import create_app

    app = create_app()
    app.dependency_overrides[get_user] = lambda: SimpleAuthManagerUser(username=username, role=role)
    return app


def wait_for_glances(replace: Callable[[str, float], None]) -> None:
    """Have the page of all pipelines look at each ledger, and wait for what it reads."""
    for name, seconds in (("FIRST_S", 60.0), ("AGAIN_S", 60.0), ("_CHECKED_S", 0.0)):
        replace(f"waldelta.monitoring.glance_cache.{name}", seconds)


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """Its address, while it is served by a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()

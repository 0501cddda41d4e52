"""The Data Docs page: only for users who are logged in, only files of reports, only below their folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from waldelta_airflow.web import DeferredApp, create_app, data_docs_folder, report_file

pytestmark = pytest.mark.airflow

PLUGIN = Path(__file__).parents[3] / "plugins" / "waldelta_plugin.py"


@pytest.fixture
def docs(write_pipeline, tmp_path):
    folder = tmp_path / "lake" / "_waldelta" / "data_docs"
    (folder / "validations").mkdir(parents=True)
    (folder / "index.html").write_text("<h1>index</h1>")
    (folder / "validations" / "run.html").write_text("<h1>run</h1>")
    (folder / "notes.txt").write_text("not a report")
    (tmp_path / "secret.html").write_text("secret")
    (folder / "link.html").symlink_to(tmp_path / "secret.html")
    write_pipeline("shop")
    return folder


@pytest.fixture
def client(docs):
    from airflow.api_fastapi.core_api.security import get_user
    from fastapi.testclient import TestClient

    app = create_app()
    app.dependency_overrides[get_user] = object
    return TestClient(app)


def test_the_index_links_each_pipeline(client, write_pipeline):
    """Pipelines with reports have a link; a refused file shows what is wrong with it, escaped."""
    write_pipeline("new").write_text("pipeline: <script>")
    page = client.get("/").text
    assert '<a href="docs/shop/index.html">open</a>' in page
    assert "new.yml is refused" in page
    assert "<script>" not in page


@pytest.mark.parametrize("path, text", [("", "index"), ("index.html", "index"), ("validations/run.html", "run")])
def test_reports_are_served_without_scripts(client, path, text):
    """Reports show values from the source; no script in them may act with the reader's login."""
    answer = client.get(f"/docs/shop/{path}")
    assert answer.text == f"<h1>{text}</h1>"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "script-src" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    "path",
    [
        "shop/absent.html",
        "shop/notes.txt",
        "shop/link.html",
        "shop/validations",
        "shop/%2e%2e/%2e%2e/%2e%2e/secret.html",
        "shop/..%2f..%2f..%2fsecret.html",
        "shop/%2fetc%2fpasswd",
        "shop/x%00.html",
        "other/index.html",
        "%2e%2e/index.html",
    ],
)
def test_nothing_else_is_served(client, path):
    """Neither other files nor anything outside the folder, by dots, absolute paths or symbolic links."""
    assert client.get(f"/docs/{path}").status_code == 404


def test_an_absolute_path_doesnt_leave_the_folder(docs, tmp_path):
    """Joining an absolute path replaces the folder; it must be refused."""
    assert report_file(docs, str(tmp_path / "secret.html")) is None


@pytest.mark.parametrize("path", ["/", "/docs/shop/index.html"])
def test_without_login_nothing_is_shown(docs, path):
    """The deferred application, as the plugin mounts it, asks for a login first."""
    from airflow.api_fastapi.app import create_auth_manager
    from fastapi.testclient import TestClient

    create_auth_manager()
    assert TestClient(DeferredApp()).get(path).status_code == 401


def test_data_docs_in_an_object_store_are_not_looked_for_here(write_pipeline):
    """Only folders of this machine are served."""
    from waldelta.pipeline_file import load_pipeline_file

    path = write_pipeline("shop", more="quality: {data_docs: 's3a://bucket/docs'}")
    assert data_docs_folder(load_pipeline_file(path)) is None


def test_the_plugin_loads_nothing_heavy():
    """Airflow loads plugins in every task; FastAPI and Airflow's security come with the first request only."""
    script = (
        "import sys, runpy, airflow.plugins_manager; before = set(sys.modules)\n"
        "names = runpy.run_path(sys.argv[1])\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(names['WaldeltaPlugin'].name, sorted(new & {'fastapi', 'starlette', 'pyarrow', 'pyspark', 'deltalake'}))"
    )
    run = subprocess.run([sys.executable, "-c", script, str(PLUGIN)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "waldelta []"

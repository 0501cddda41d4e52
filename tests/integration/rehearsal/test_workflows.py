"""The workflows of the page: their shell steps, run by bash in a checkout of a request's branch."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from tests.integration.docs.test_howtos import blocks

PIPELINE = """
pipeline: shop
source:
  conn_id: prod
  slot: shop_cdc
  publications: [{name: shop, tables: [{name: public.orders}]}]
target: {root: file:///lake}
"""
BASE = {
    "shop.yml": PIPELINE,
    "schema.sql": "create table orders(id int primary key, n int);",
    "migrations/1.sql": "create table orders(id int primary key, n int);",
    "migrations/2.sql": "select 2;",
}
# The second file is gone, and the dump of the schema already has the new column.
CHANGED = {
    "schema.sql": "create table orders(id int primary key, n int, x int);",
    "migrations/3.sql": "alter table orders add x int;",
}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A clone with the request's branch, and the command on the path."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    command = tmp_path / "bin/waldelta"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m waldelta "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    git("init", "-q", "-b", "main", str(origin), at=tmp_path)
    commit(origin, BASE)
    git("switch", "-q", "-c", "request", at=origin)
    (origin / "migrations/2.sql").unlink()
    commit(origin, CHANGED)
    git("clone", "-q", str(origin), str(clone), at=tmp_path)
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    base = git("rev-parse", "main", at=origin)
    monkeypatch.setenv("CI_MERGE_REQUEST_DIFF_BASE_SHA", base)
    return clone


def git(*arguments: str, at: Path) -> str:
    """What git prints."""
    identity = ("-c", "user.name=n", "-c", "user.email=n@localhost")
    command = ["git", *identity, *arguments]
    return subprocess.run(
        command, cwd=at, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path, files: dict[str, str]) -> None:
    """Commit these files, and what is gone."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git("add", "-A", at=folder)
    git("commit", "-q", "-m", "m", at=folder)


def run(steps: list[str], at: Path) -> None:
    """Run the steps, but the one that installs this package, as both services do."""
    install, *others = steps
    assert install.startswith("pip install")
    for step in others:
        subprocess.run(["bash", "-e", "-c", step], cwd=at, check=True)


@pytest.mark.nightly("the command, as other tests have it, in two workflows")
def test_the_workflows_rehearse_the_files_of_the_request(checkout, tmp_path):
    github, gitlab = map(yaml.safe_load, blocks("how-to/rehearse-a-migration.md", "yaml"))
    steps = github["jobs"]["rehearse"]["steps"]
    run([step["run"] for step in steps if "run" in step], checkout)
    summary = (tmp_path / "summary.md").read_text()
    assert "`migrations/3.sql:1`" in summary
    assert "1 step rehearsed" in summary
    run(gitlab["rehearse"]["script"], checkout)
    (report,) = gitlab["rehearse"]["artifacts"]["reports"].values()
    cases = ET.parse(checkout / report).getroot().findall("testcase")
    assert [case.get("name") for case in cases] == ["migrations/3.sql:1"]
